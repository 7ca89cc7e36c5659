/* NVIDIA GPUs through the driver alone: libcuda is opened at run time, nothing of CUDA is needed to build.
 *
 * Any thread may call; each stream takes one call at a time.  No call waits for the GPU unless it takes a timeout.  The caller's
 * current context and capture mode are as before when a call returns.  Device, streams and marks live until they are given back;
 * hic_cuda_close comes last. */
#ifndef HICACHE_CAPI_DRIVER_H
#define HICACHE_CAPI_DRIVER_H

#include "copy.h"

enum hic_cuda_code {
  HIC_CUDA = -10,      /* the driver refused; the device works */
  HIC_CUDA_LOST = -11, /* the context is dead: every call fails from now on */
};

enum hic_cuda_notice {
  HIC_NOTICE_HOST_FUNCTION = 1, /* on a side stream, behind the mark's event: a copy stream never waits for it */
  HIC_NOTICE_POLL = 2,          /* a native thread asks the marks, every 50 us while any is open */
};

struct hic_cuda;
struct hic_cuda_stream;
struct hic_cuda_mark; /* the end of all that was submitted to a stream before */

struct hic_cuda_facts {
  char name[128];
  char pci[32]; /* domain:bus:device.function */
  int32_t ordinal, driver_version, major, minor;
  int32_t batch_version;     /* 13000, 12080, or 0: no cuMemcpyBatchAsync, or it has failed */
  int32_t multiprocessors;
  int32_t has_kernel;        /* hic_cuda_load_kernel has gone well */
  int32_t host_address_same; /* registered host memory has the same address on the GPU: needed by kernel and staged */
  uint64_t registered_bytes, batch_calls, single_calls, launches;
};

struct hic_cuda_how {
  int32_t engine;      /* hic_engine */
  int32_t to_host;     /* 1: device to host */
  int32_t notice;      /* hic_cuda_notice: who ends the event */
  uint32_t blocks;     /* of the kernel; 0: 2 */
  uint32_t lanes;      /* threads that copy one run; 0: by its length */
};

/* `path`: libcuda.so.1 if "".  Retains the primary context, which is torch's. */
HIC_API int hic_cuda_open(const char *path, int32_t ordinal, struct hic_cuda **device);
/* Ends the native thread and gives everything back.  HIC_TIMEOUT while a stream is open: then nothing is given back. */
HIC_API int hic_cuda_close(struct hic_cuda *device);
HIC_API int hic_cuda_facts_of(struct hic_cuda *device, struct hic_cuda_facts *facts);
/* A cubin or fatbin of include/copy.h. */
HIC_API int hic_cuda_load_kernel(struct hic_cuda *device, const void *image);
/* HIC_CUDA_LOST and why, once a call or the watchdog has found the context dead; else HIC_OK. */
HIC_API int hic_cuda_lost(struct hic_cuda *device);

/* Make host memory known to the GPU: [address, address + bytes), one registration of at most 64 GiB.  No copy crosses the border
 * of two. */
HIC_API int hic_cuda_register(struct hic_cuda *device, uint64_t address, uint64_t bytes);
HIC_API int hic_cuda_unregister(struct hic_cuda *device, uint64_t address);

/* `urgent`: of the highest priority there is, else of the lowest. */
HIC_API int hic_cuda_stream_open(struct hic_cuda *device, int32_t urgent, struct hic_cuda_stream **stream);
/* HIC_TIMEOUT while an operation is open: then it stays as it is. */
HIC_API int hic_cuda_stream_close(struct hic_cuda_stream *stream);

/* The whole operation: all plans (none will do), the mark of their end, and `event` (may be null) to end that generation of
 * with 0 or HIC_CUDA_LOST.  The plans and their tables may be dropped on return.  After an error `event` has not ended, and
 * part of the copies may still run; the mark of a later call covers them. */
HIC_API int hic_cuda_submit(struct hic_cuda_stream *stream, const struct hic_plan *plans, uint32_t count,
                            const struct hic_cuda_how *how, struct hic_event *event, uint64_t generation,
                            struct hic_cuda_mark **mark);

/* What is submitted from now on runs after a mark of any stream, or after an engine's own CUevent. */
HIC_API int hic_cuda_order(struct hic_cuda_stream *stream, struct hic_cuda_mark *mark);
HIC_API int hic_cuda_order_event(struct hic_cuda_stream *stream, uint64_t event);
/* The same for an engine's own CUstream.  HIC_INVALID while it is being captured in a graph, which would bake this wait in;
 * without a mark that is all that is looked at. */
HIC_API int hic_cuda_order_foreign(struct hic_cuda *device, uint64_t stream, struct hic_cuda_mark *mark);

/* 1 if it has ended, 0 if not, HIC_CUDA_LOST. */
HIC_API int hic_cuda_mark_query(struct hic_cuda_mark *mark);
/* Give the caller's reference back; what was submitted goes on. */
HIC_API void hic_cuda_mark_free(struct hic_cuda_mark *mark);

#endif
