#include "sha256.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

#if HIC_ISA >= 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace hic {
namespace {

constexpr size_t kBlock = 64;

alignas(64) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

using Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

inline uint32_t rotated(uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

void compress_plain(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks; --blocks, data += kBlock) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 | uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t low = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t high = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if HIC_ISA >= 1
// The instructions keep the state as (a, b, e, f) and (c, d, g, h), and take four rounds at a time.
__attribute__((target("sha,sse4.1"))) void compress_sha(uint32_t* state, const uint8_t* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1), efgh = _mm_shuffle_epi32(hgfe, 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; blocks; --blocks, data += kBlock) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (int i = 0; i < 4; ++i)
      words[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i keyed =
          _mm_add_epi32(words[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0E));
      if (i < 12) {  // the words of round i + 16, in the place of those just used
        const __m128i later = words[(i + 3) % 4], middle = words[(i + 2) % 4];
        __m128i next = _mm_sha256msg1_epu32(words[i % 4], words[(i + 1) % 4]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(later, middle, 4));
        words[i % 4] = _mm_sha256msg2_epu32(next, later);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

Compress choose() {
  unsigned a, b, c, d;
  const bool has_sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
  return has_sha && __builtin_cpu_supports("sse4.1") ? compress_sha : compress_plain;
}
#else
Compress choose() { return compress_plain; }
#endif

void compress(uint32_t* state, const uint8_t* data, size_t blocks) {
  static const Compress chosen = choose();
  chosen(state, data, blocks);
}

}  // namespace

void Sha256::add(const void* data, size_t bytes) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  const size_t held = bytes_ % kBlock;
  bytes_ += bytes;
  if (held) {
    const size_t now = std::min(bytes, kBlock - held);
    memcpy(buffer_ + held, at, now);
    if (held + now < kBlock) return;
    compress(state_, buffer_, 1);
    at += now;
    bytes -= now;
  }
  compress(state_, at, bytes / kBlock);
  if (bytes % kBlock) memcpy(buffer_, at + bytes / kBlock * kBlock, bytes % kBlock);
}

void Sha256::digest(uint8_t out[32]) {
  const uint64_t bits = 8 * bytes_;
  const size_t held = bytes_ % kBlock;
  uint8_t end[2 * kBlock] = {};
  memcpy(end, buffer_, held);
  end[held] = 0x80;
  const size_t blocks = held < kBlock - 8 ? 1 : 2;
  for (size_t at = 0; at < 8; ++at) end[blocks * kBlock - 1 - at] = static_cast<uint8_t>(bits >> (8 * at));
  compress(state_, end, blocks);
  for (size_t word = 0; word < 8; ++word)
    for (size_t at = 0; at < 4; ++at) out[4 * word + at] = static_cast<uint8_t>(state_[word] >> (24 - 8 * at));
}

}  // namespace hic
