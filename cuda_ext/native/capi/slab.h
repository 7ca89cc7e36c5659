/* The table of a slab store: which slot holds the object of a key.  docs/slab-store.md has the format; backends/slab writes it. */
#ifndef HICACHE_CAPI_SLAB_H
#define HICACHE_CAPI_SLAB_H

#include "capi.h"

/* Look up `count` keys, of 1 to 207 bytes each and one behind the other in `keys`; `digests` has the 16 bytes of xxh3-128 of each.
 * `found` gets three rows of `count` numbers: the slot (all ones: there is none), the length of the object, and the first 8 bytes of
 * the entry.  `entries` (of 256 bytes, one for each of `slots`) and `hints` (8 for each of `buckets`) may be changed by others
 * meanwhile: an entry that is torn is none.  -> HIC_OK, or HIC_INVALID for a key of another length. */
HIC_API int32_t hic_slab_find(const uint8_t *entries, uint64_t slots, const uint64_t *hints, uint64_t buckets, uint64_t count,
                              const uint8_t *keys, const uint64_t *lengths, const uint64_t *digests, uint64_t *found);

#endif
