// XXH3-128 for inputs of 241 bytes and more, and XXH3-64 for those of 1 to 240, written from the specification of the xxHash family (doc/xxhash_spec.md of
// Cyan4973/xxHash, version 0.2), with the default secret.  Each length has algorithms of its own: no object is as short as that, and no key as long.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hic {

constexpr size_t kXxh3MinBytes = 241;

// Of 1 to 240 bytes.
uint64_t xxh3_64(const uint8_t* data, size_t bytes, uint64_t seed);

// With seed 0: the digest of two runs, taken as one, in canonical byte order (the high half first, big-endian).
void xxh3_128(const void* head, size_t head_bytes, const void* tail, size_t tail_bytes, uint8_t digest[16]);

}  // namespace hic
