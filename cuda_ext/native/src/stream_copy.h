// Copies too large for the caches: sources are fetched ahead of use, targets are written past the caches.
#pragma once

#include <algorithm>

#include "include/plan.h"
#include "runs.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hic {

#if defined(__SSE2__)

constexpr uint32_t LINE_BYTES = 64;
// Chosen by measurement, for runs of 256 bytes to 128 KiB: less does not hide a scattered source, more gains nothing.
constexpr uint32_t AHEAD_BYTES = 2048;
constexpr uint32_t AHEAD_RUNS = 4;

inline void fetch(uint64_t address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0); }

// Whole lines, or each store would cost a read of the line that it does not fill.
inline bool can_stream(const hic_plan& plan) {
  return plan.unit_bytes == 16 && plan.run_bytes % LINE_BYTES == 0;
}

inline void stream_run(uint64_t source, uint64_t target, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += LINE_BYTES) {
    fetch(source + at + AHEAD_BYTES);  // past the end as well: that is where the next run often begins, and never a fault
    const __m128i* from = reinterpret_cast<const __m128i*>(source + at);
    __m128i* to = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_load_si128(from), b = _mm_load_si128(from + 1);
    const __m128i c = _mm_load_si128(from + 2), d = _mm_load_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

// Runs [first, last) of a plan that can_stream.
inline void run_streamed(const hic_plan& plan, uint64_t first, uint64_t last) {
  const uint32_t bytes = plan.run_bytes, ahead = std::min(bytes, AHEAD_BYTES);
  hic_piece waiting[AHEAD_RUNS];  // located, their first bytes on the way
  uint64_t seen = 0;
  for_each_run(plan, first, last, [&](uint64_t source, uint64_t target) {
    for (uint32_t at = 0; at < ahead; at += LINE_BYTES) fetch(source + at);
    hic_piece& place = waiting[seen % AHEAD_RUNS];
    if (seen >= AHEAD_RUNS) stream_run(place.source, place.target, bytes);
    place = {source, target};
    ++seen;
  });
  for (uint64_t left = seen - std::min<uint64_t>(seen, AHEAD_RUNS); left < seen; ++left)
    stream_run(waiting[left % AHEAD_RUNS].source, waiting[left % AHEAD_RUNS].target, bytes);
  _mm_sfence();  // whoever is told that the copy has ended sees all of it
}

#else

inline bool can_stream(const hic_plan&) { return false; }
inline void run_streamed(const hic_plan&, uint64_t, uint64_t) {}

#endif

}  // namespace hic
