// XXH32, written from the specification of the xxHash family (doc/xxhash_spec.md of Cyan4973/xxHash, version 0.2).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hic {

// With seed 0.
uint32_t xxh32(const void* data, size_t bytes);

}  // namespace hic
