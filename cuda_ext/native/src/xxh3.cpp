#include "xxh3.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

#if HIC_ISA >= 1
#include <immintrin.h>
#endif

namespace hic {
namespace {

constexpr size_t kStripe = 64;
constexpr size_t kSecretBytes = 192;
constexpr size_t kStripesPerBlock = (kSecretBytes - kStripe) / 8;

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9,
                   kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kAvalanche = 0x165667919E3779F9, kShort = 0x9FB21C651E98DF25;

alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t little64(const uint8_t* at) {
  uint64_t value;
  memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  return value;
}

// One block: up to kStripesPerBlock stripes, which take the secret in steps of 8 bytes from `secret`.
using Accumulate = void (*)(uint64_t* acc, const uint8_t* data, size_t stripes, const uint8_t* secret);

void accumulate_plain(uint64_t* acc, const uint8_t* data, size_t stripes, const uint8_t* secret) {
  for (; stripes; --stripes, data += kStripe, secret += 8) {
    for (size_t lane = 0; lane < 8; ++lane) {
      const uint64_t value = little64(data + 8 * lane);
      const uint64_t keyed = value ^ little64(secret + 8 * lane);
      acc[lane ^ 1] += value;
      acc[lane] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
  }
}

#if HIC_ISA >= 1
__attribute__((target("avx2"))) void accumulate_avx2(uint64_t* acc, const uint8_t* data, size_t stripes,
                                                     const uint8_t* secret) {
  __m256i sums[2];
  memcpy(sums, acc, sizeof sums);
  for (; stripes; --stripes, data += kStripe, secret += 8) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + 512, _MM_HINT_T0);
    for (size_t half = 0; half < 2; ++half) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + half);
      const __m256i keyed =
          _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + half));
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
    }
  }
  memcpy(acc, sums, sizeof sums);
}

#if HIC_ISA >= 2
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header (its bug 105593)
__attribute__((target("avx512f"))) void accumulate_avx512(uint64_t* acc, const uint8_t* data, size_t stripes,
                                                          const uint8_t* secret) {
  __m512i sums = _mm512_loadu_si512(acc);
  for (; stripes; --stripes, data += kStripe, secret += 8) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + 512, _MM_HINT_T0);
    const __m512i value = _mm512_loadu_si512(data);
    const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    const __m512i swapped = _mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 3, 2)));
    sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
  }
  _mm512_storeu_si512(acc, sums);
}
#pragma GCC diagnostic pop
#endif

Accumulate choose() {
#if HIC_ISA >= 2
  if (__builtin_cpu_supports("avx512f")) return accumulate_avx512;
#endif
  return __builtin_cpu_supports("avx2") ? accumulate_avx2 : accumulate_plain;
}
#else
Accumulate choose() { return accumulate_plain; }
#endif

void scramble(uint64_t* acc) {
  for (size_t lane = 0; lane < 8; ++lane) {
    acc[lane] ^= acc[lane] >> 47;
    acc[lane] ^= little64(kSecret + kSecretBytes - kStripe + 8 * lane);
    acc[lane] *= kPrime32_1;
  }
}

uint64_t merge(const uint64_t* acc, const uint8_t* secret, uint64_t start) {
  uint64_t sum = start;
  for (size_t pair = 0; pair < 4; ++pair) {
    const unsigned __int128 product = static_cast<unsigned __int128>(acc[2 * pair] ^ little64(secret + 16 * pair)) *
                                      (acc[2 * pair + 1] ^ little64(secret + 16 * pair + 8));
    sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  sum ^= sum >> 37;
  sum *= kAvalanche;
  return sum ^ (sum >> 32);
}

inline uint32_t little32(const uint8_t* at) {
  uint32_t value;
  memcpy(&value, at, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap32(value);
#endif
  return value;
}

inline uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ hash >> 37) * kAvalanche;
  return hash ^ hash >> 32;
}

inline uint64_t rotated(uint64_t value, int by) { return value << by | value >> (64 - by); }

uint64_t of_1_to_3(const uint8_t* data, size_t bytes, uint64_t seed) {
  const uint32_t mixed = static_cast<uint32_t>(data[0]) << 16 | static_cast<uint32_t>(data[bytes / 2]) << 24 |
                         data[bytes - 1] | static_cast<uint32_t>(bytes) << 8;
  uint64_t hash = mixed ^ ((little32(kSecret) ^ little32(kSecret + 4)) + seed);
  hash = (hash ^ hash >> 33) * kPrime64_2;
  hash = (hash ^ hash >> 29) * kPrime64_3;
  return hash ^ hash >> 32;
}

uint64_t of_4_to_8(const uint8_t* data, size_t bytes, uint64_t seed) {
  seed ^= static_cast<uint64_t>(__builtin_bswap32(static_cast<uint32_t>(seed))) << 32;
  const uint64_t value = little32(data + bytes - 4) + (static_cast<uint64_t>(little32(data)) << 32);
  uint64_t hash = value ^ ((little64(kSecret + 8) ^ little64(kSecret + 16)) - seed);
  hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * kShort;
  hash = (hash ^ ((hash >> 35) + bytes)) * kShort;
  return hash ^ hash >> 28;
}

uint64_t of_9_to_16(const uint8_t* data, size_t bytes, uint64_t seed) {
  const uint64_t low = little64(data) ^ ((little64(kSecret + 24) ^ little64(kSecret + 32)) + seed);
  const uint64_t high = little64(data + bytes - 8) ^ ((little64(kSecret + 40) ^ little64(kSecret + 48)) - seed);
  return avalanche(bytes + __builtin_bswap64(low) + high + fold(low, high));
}

inline uint64_t mixed16(const uint8_t* data, const uint8_t* secret, uint64_t seed) {
  return fold(little64(data) ^ (little64(secret) + seed), little64(data + 8) ^ (little64(secret + 8) - seed));
}

// From both ends towards the middle.
uint64_t of_17_to_128(const uint8_t* data, size_t bytes, uint64_t seed) {
  uint64_t sum = bytes * kPrime64_1;
  for (size_t at = (bytes - 1) / 32 + 1; at-- > 0;)
    sum += mixed16(data + 16 * at, kSecret + 32 * at, seed) +
           mixed16(data + bytes - 16 * (at + 1), kSecret + 32 * at + 16, seed);
  return avalanche(sum);
}

uint64_t of_129_to_240(const uint8_t* data, size_t bytes, uint64_t seed) {
  uint64_t sum = bytes * kPrime64_1;
  for (size_t at = 0; at < 8; ++at) sum += mixed16(data + 16 * at, kSecret + 16 * at, seed);
  sum = avalanche(sum) + mixed16(data + bytes - 16, kSecret + 136 - 17, seed);
  for (size_t at = 8; at < bytes / 16; ++at) sum += mixed16(data + 16 * at, kSecret + 16 * (at - 8) + 3, seed);
  return avalanche(sum);
}

class Stripes {
 public:
  void add(const uint8_t* data, size_t stripes) {
    while (stripes) {
      const size_t now = std::min(stripes, kStripesPerBlock - in_block_);
      accumulate_(acc_, data, now, kSecret + 8 * in_block_);
      data += now * kStripe;
      stripes -= now;
      in_block_ += now;
      if (in_block_ == kStripesPerBlock) {
        scramble(acc_);
        in_block_ = 0;
      }
    }
  }

  // The last 64 bytes of the input, which may overlap the stripe before.
  void end(const uint8_t* data) { accumulate_(acc_, data, 1, kSecret + kSecretBytes - kStripe - 7); }

  void digest(uint64_t bytes, uint8_t* out) const {
    const uint64_t halves[2] = {merge(acc_, kSecret + kSecretBytes - kStripe - 11, ~(bytes * kPrime64_2)),
                                merge(acc_, kSecret + 11, bytes * kPrime64_1)};
    for (size_t half = 0; half < 2; ++half)
      for (size_t at = 0; at < 8; ++at) out[8 * half + at] = static_cast<uint8_t>(halves[half] >> (56 - 8 * at));
  }

 private:
  alignas(64) uint64_t acc_[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                  kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  size_t in_block_ = 0;
  Accumulate accumulate_ = [] {
    static const Accumulate chosen = choose();
    return chosen;
  }();
};

}  // namespace

uint64_t xxh3_64(const uint8_t* data, size_t bytes, uint64_t seed) {
  if (bytes <= 3) return of_1_to_3(data, bytes, seed);
  if (bytes <= 8) return of_4_to_8(data, bytes, seed);
  if (bytes <= 16) return of_9_to_16(data, bytes, seed);
  return bytes <= 128 ? of_17_to_128(data, bytes, seed) : of_129_to_240(data, bytes, seed);
}

void xxh3_128(const void* head, size_t head_bytes, const void* tail, size_t tail_bytes, uint8_t digest[16]) {
  const uint8_t *first = static_cast<const uint8_t*>(head), *second = static_cast<const uint8_t*>(tail);
  const size_t bytes = head_bytes + tail_bytes;
  const auto gather = [&](size_t at, uint8_t* out) {  // a stripe that may lie in both runs
    const size_t from_first = at < head_bytes ? std::min(kStripe, head_bytes - at) : 0;
    if (from_first) memcpy(out, first + at, from_first);
    if (from_first < kStripe) memcpy(out + from_first, second + (at + from_first - head_bytes), kStripe - from_first);
  };
  uint8_t stripe[kStripe];
  Stripes stripes;
  const size_t whole = (bytes - 1) / kStripe;
  size_t done = std::min(whole, head_bytes / kStripe);
  stripes.add(first, done);
  if (done < whole && head_bytes % kStripe) {
    gather(done * kStripe, stripe);
    stripes.add(stripe, 1);
    ++done;
  }
  if (done < whole) stripes.add(second + (done * kStripe - head_bytes), whole - done);
  gather(bytes - kStripe, stripe);
  stripes.end(stripe);
  stripes.digest(bytes, digest);
}

}  // namespace hic
