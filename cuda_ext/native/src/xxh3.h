// XXH3-128 for inputs of 241 bytes and more, written from the specification of the xxHash family (doc/xxhash_spec.md of
// Cyan4973/xxHash, version 0.2): seed 0, default secret.  Shorter inputs are other algorithms, and no object is that short.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hic {

constexpr size_t kXxh3MinBytes = 241;

// The digest of two runs, taken as one, in canonical byte order (the high half first, big-endian).
void xxh3_128(const void* head, size_t head_bytes, const void* tail, size_t tail_bytes, uint8_t digest[16]);

}  // namespace hic
