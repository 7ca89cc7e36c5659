/* Objects in the slots of one file, or of memory: a batch a call, so that the interpreter is left once.
 *
 * Pieces that are neighbours in the file are moved by one request, wherever their buffers lie: a request costs a disk about as
 * much as a megabyte.  Any thread may call; the caller owns all memory until the call returns. */
#ifndef HICACHE_CAPI_SLOTS_H
#define HICACHE_CAPI_SLOTS_H

#include "capi/digest.h"

struct hic_slot_batch {
  uint64_t count; /* pieces */
  uint64_t next;  /* 0 at first: several threads share a batch */
  void *const *buffers;
  const uint64_t *bytes;   /* of each buffer, all of which is moved */
  const uint64_t *offsets; /* where each begins; in ascending order, if neighbours are to be found */
  void *memory;            /* what the offsets are in; NULL: the file `fd` */
  const struct hic_names *names; /* NULL: the content is not looked at.  Else objects, sealed before a write, judged after a read */
  const uint64_t *numbers;       /* which object of the names each is */
  uint8_t *verdicts;             /* hic_verdict of what was read, and HIC_NOT_CACHED; else not touched */
  uint64_t request_bytes;        /* neighbours are put together up to so many */
  int32_t fd;
  int32_t writes; /* 0: a read */
  int32_t error;  /* 0 at first; errno of the first request that failed, EIO where the file ends before a buffer is full */
  int32_t from_cache; /* 1: a read of those pieces that the page cache has; the verdict of the others is HIC_NOT_CACHED, and their
                         buffers are not touched.  Neither a disk nor another read is waited for.  hic_slots_move, of a file */
};

enum { HIC_NOT_CACHED = 255 };

/* Move a batch by one request after the other; each thread that calls has one under way.  -> HIC_OK, or HIC_INVALID with
 * nothing done.  After an error any of the buffers or slots may hold anything. */
HIC_API int32_t hic_slots_move(struct hic_slot_batch *batch);

/* Start to write to the disk what the page cache has of the file from `offset` on, and wait for none of it -> 0, or errno. */
HIC_API int32_t hic_slots_write_out(int32_t fd, uint64_t offset);

/* A queue to the kernel (io_uring) with at most `depth` requests under way -> it, or NULL and errno into *error. */
struct hic_uring;
HIC_API struct hic_uring *hic_uring_open(uint32_t depth, int32_t *error);
/* As hic_slots_move, for a file; the queue is used by one thread at a time, and a batch by one queue. */
HIC_API int32_t hic_uring_move(struct hic_uring *uring, struct hic_slot_batch *batch);
/* Nothing is under way. */
HIC_API void hic_uring_close(struct hic_uring *uring);

#endif
