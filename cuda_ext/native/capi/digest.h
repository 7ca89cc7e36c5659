/* Checksums of stored objects, and hashes of pages: a batch a call.
 *
 * An object is a header of 4096 bytes and its payload in one run (backends/objects.py has the table).  Any thread may call;
 * the caller owns the memory until the call returns. */
#ifndef HICACHE_CAPI_DIGEST_H
#define HICACHE_CAPI_DIGEST_H

#include "capi.h"

enum hic_verdict { /* of an object, as backends/objects.py means it */
  HIC_VERDICT_OK = 0,
  HIC_VERDICT_FOREIGN = 1,
  HIC_VERDICT_CORRUPT = 2,
  HIC_VERDICT_EMPTY = 3,
};

/* What the headers of a batch say, or shall say.  Object i is chunk i % chunk_count of page i / chunk_count. */
struct hic_names {
  const uint8_t *namespace_digest; /* 16 bytes */
  const uint8_t *page_hashes;      /* 32 bytes for each page */
  const uint64_t *chunks;          /* the coordinates of a page's chunks */
  uint64_t chunk_count;
  const uint8_t *unchecked; /* for each page: leave its checksums out when judging.  NULL: none is left out */
};

/* XXH3-128 (seed 0, default secret, canonical byte order) of `head` and `tail` in one run, together at least 241 bytes. */
HIC_API int32_t hic_xxh3_128(const void *head, uint64_t head_bytes, const void *tail, uint64_t tail_bytes, uint8_t *digest);

/* Write the header of each object; objects[i] has bytes[i] bytes, at least 4096. */
HIC_API int32_t hic_seal(uint64_t count, void *const *objects, const uint64_t *bytes, const struct hic_names *names);

/* Judge each object: verdicts[i] becomes a hic_verdict. */
HIC_API int32_t hic_verify(uint64_t count, const void *const *objects, const uint64_t *bytes, const struct hic_names *names,
                           uint8_t *verdicts);

/* SHA-256 chained over pages of token ids, as keys/hashes.py has it: 32 bytes for each page into `hashes`.  `parent` has
 * parent_bytes bytes, 0 or 32. */
HIC_API int32_t hic_page_hashes(const uint8_t *parent, uint64_t parent_bytes, const int64_t *tokens, uint64_t pages,
                                uint64_t page_tokens, uint8_t *hashes);

#endif
