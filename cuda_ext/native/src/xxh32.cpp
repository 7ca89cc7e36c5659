#include "xxh32.h"

#include <cstring>

namespace hic {
namespace {

constexpr uint32_t kPrime1 = 0x9E3779B1u, kPrime2 = 0x85EBCA77u, kPrime3 = 0xC2B2AE3Du, kPrime4 = 0x27D4EB2Fu,
                   kPrime5 = 0x165667B1u;

uint32_t rotated(uint32_t value, int bits) { return value << bits | value >> (32 - bits); }

uint32_t word(const uint8_t* at) {  // little-endian, as all machines are that this is built for
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

uint32_t xxh32(const void* data, size_t bytes) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  const uint8_t* const end = at + bytes;
  uint32_t hash = kPrime5;
  if (bytes >= 16) {
    uint32_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, 0u - kPrime1};
    for (; end - at >= 16; at += 16)
      for (int lane = 0; lane < 4; ++lane)
        lanes[lane] = rotated(lanes[lane] + word(at + 4 * lane) * kPrime2, 13) * kPrime1;
    hash = rotated(lanes[0], 1) + rotated(lanes[1], 7) + rotated(lanes[2], 12) + rotated(lanes[3], 18);
  }
  hash += static_cast<uint32_t>(bytes);
  for (; end - at >= 4; at += 4) hash = rotated(hash + word(at) * kPrime3, 17) * kPrime4;
  for (; at < end; ++at) hash = rotated(hash + *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 15) * kPrime2;
  hash = (hash ^ hash >> 13) * kPrime3;
  return hash ^ hash >> 16;
}

}  // namespace hic
