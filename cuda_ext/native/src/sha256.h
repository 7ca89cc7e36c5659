// SHA-256 (FIPS 180-4), with the CPU's own instructions where it has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hic {

class Sha256 {
 public:
  void add(const void* data, size_t bytes);
  // Ends it: nothing may be added afterwards.
  void digest(uint8_t out[32]);

 private:
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint64_t bytes_ = 0;
  uint8_t buffer_[64];
};

}  // namespace hic
