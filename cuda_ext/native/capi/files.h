/* Files of stored objects: a batch a call, so that the interpreter is left once and not five times a file.
 *
 * What is rare is left to backends/folder.py: a call says what it met and goes on.  Any thread may call; the caller owns all
 * memory until the call returns.  Several threads may work at one batch: each takes the next file from `next`. */
#ifndef HICACHE_CAPI_FILES_H
#define HICACHE_CAPI_FILES_H

#include "capi/digest.h"

enum hic_read_outcome { /* otherwise the bytes read, which are those asked for */
  HIC_READ_MISSING = -1, /* no such file, or one that is not ours */
  HIC_READ_TORN = -2,    /* of another length */
  HIC_READ_FAILED = -3,  /* `error` has errno */
};

enum hic_write_outcome {
  HIC_WRITE_FAILED = 0,    /* `error` has errno; the temporary file is gone */
  HIC_WRITE_WRITTEN = 1,
  HIC_WRITE_EXISTS = 2,    /* something has the name; the temporary file stays, whole */
  HIC_WRITE_NO_FOLDER = 3, /* nothing has been made */
  HIC_WRITE_NO_RENAME = 4, /* the file system cannot rename without replacing; the temporary file stays, whole */
  HIC_WRITE_SKIPPED = 5,   /* the disk has filled up before its turn */
};

/* Which file has been read: its mtime and inode. */
struct hic_identity {
  int64_t mtime_ns;
  uint64_t inode;
};

/* Where the objects of a folder are: `<folder>/<shard>/<key>.kv`, the shard as two hex digits of the XXH32 of its key. */
struct hic_places {
  uint64_t count;
  const char *keys; /* one behind the other, each but the last with a zero behind it */
  uint64_t keys_bytes;
  const char *folder;
  uint64_t shards;  /* a power of two, at most 256 */
  char *memory;     /* for the paths: HIC_PATH_BYTES for each, beside the folder's and the keys' own bytes */
  const char **paths;
  uint8_t *shard_of;
};

enum { HIC_PATH_BYTES = 8, HIC_KEY_BYTES = 200 };

struct hic_reads {
  uint64_t count;
  uint64_t next; /* 0 at first */
  const char *const *paths;
  void *const *buffers;
  const uint64_t *bytes;          /* of each buffer: the length that its file must have */
  int64_t touch_before_ns;        /* a file with an older mtime is given the present one */
  const struct hic_names *names;  /* NULL: the content is not looked at */
  int64_t *outcomes;              /* hic_read_outcome */
  struct hic_identity *identities; /* of what was read, or is torn */
  int32_t *errors;
  uint8_t *verdicts; /* hic_verdict of what was read; not touched without names */
};

struct hic_writes {
  uint64_t count;
  uint64_t next; /* 0 at first */
  const char *const *paths;
  const char *temporary; /* a file's temporary one lies beside it, and is called this, ... */
  uint64_t first;        /* ... its number from here on, and `.tmp` */
  void *const *buffers;
  const uint64_t *bytes;
  const struct hic_names *names; /* NULL: the buffers are not touched.  Else they are objects, and sealed first */
  const uint64_t *numbers;       /* which object of the names each is */
  int32_t *outcomes; /* hic_write_outcome, SKIPPED at first */
  int32_t *errors;
  int32_t full; /* set when the disk has no room: what is left is skipped */
  int32_t reserved;
};

struct hic_lookups {
  uint64_t count;
  uint64_t next; /* 0 at first */
  const char *const *paths;
  uint64_t leading; /* `count` at first; then how many, from the front, are regular files that are not empty */
  int32_t error;    /* errno if looking at the next one failed for another reason than that it is not there, else 0 */
  int32_t lock;     /* 0 */
};

/* Fill in paths and shards -> how many of the keys are keys, from the front: letters, digits, `_`, `-` and `.`, the first of them
 * neither `-` nor `.`, at most HIC_KEY_BYTES. */
HIC_API uint64_t hic_files_place(struct hic_places *places);

/* Read whole files into their buffers. */
HIC_API int32_t hic_files_read(struct hic_reads *batch);

/* Write each buffer to a new file (0600) and give that its name when it is whole, unless something has it.  Until then it has the
 * name of its temporary file, or none where the system can do that. */
HIC_API int32_t hic_files_write(struct hic_writes *batch);

/* Look how many of the paths are there, from the front. */
HIC_API int32_t hic_files_look_up(struct hic_lookups *batch);

#endif
