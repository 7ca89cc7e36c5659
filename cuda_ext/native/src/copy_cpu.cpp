// Plans run on the CPU: by memcpy, for use, and by the kernel's own body on a simulated grid, for tests.
#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "capi.h"
#include "error.h"
#include "include/copy.h"
#include "runs.h"
#include "stream_copy.h"

namespace {

using hic::fail;

// Calls share(first, last) with an even part of [0, count) on each of `threads` threads, this one among them.
template <typename Share>
int in_shares(uint64_t count, uint32_t threads, const Share& share) {
  if (threads == 0) return fail(HIC_INVALID, "a copy needs one thread at least");
  const uint64_t parts = std::min<uint64_t>(threads, std::max<uint64_t>(count, 1));
  std::vector<std::thread> others;
  uint64_t started = 1;
  try {
    others.reserve(parts - 1);
    for (; started < parts; ++started)
      others.emplace_back(share, count * started / parts, count * (started + 1) / parts);
  } catch (const std::exception&) {
    // No thread to be had: what is left of the work stays here.
  }
  share(uint64_t{0}, count / parts);
  if (started < parts) share(count * started / parts, count);
  for (std::thread& other : others) other.join();
  return HIC_OK;
}

// One run of a length that the compiler knows: a few instructions, where a call of memcpy costs as much as the copy.
template <uint32_t BYTES>
void run_fixed(const hic_plan& plan, uint64_t first, uint64_t last) {
  hic::for_each_run(plan, first, last, [](uint64_t source, uint64_t target) {
    memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), BYTES);
  });
}

void run_cached(const hic_plan& plan, uint64_t first, uint64_t last) {
  switch (plan.run_bytes) {
    case 1: return run_fixed<1>(plan, first, last);
    case 2: return run_fixed<2>(plan, first, last);
    case 4: return run_fixed<4>(plan, first, last);
    case 8: return run_fixed<8>(plan, first, last);
    case 16: return run_fixed<16>(plan, first, last);
    default:
      hic::for_each_run(plan, first, last, [&plan](uint64_t source, uint64_t target) {
        memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), plan.run_bytes);
      });
  }
}

// A copy larger than a core's own cache leaves nothing useful in it, so its stores go past it.
constexpr uint64_t STREAMED_BYTES = 1 << 20;

void run_share(const hic_plan& plan, uint64_t first, uint64_t last) {
  if (hic::can_stream(plan) && uint64_t{plan.runs} * plan.run_bytes >= STREAMED_BYTES)
    hic::run_streamed(plan, first, last);
  else
    run_cached(plan, first, last);
}

// The lanes' memory on the CPU: counts stores, and makes no access that a GPU would fault on.
struct Counted {
  hic_stores* stores;

  template <typename Unit>
  bool aligned(const Unit* at) const {
    if (reinterpret_cast<uint64_t>(at) % sizeof(Unit) == 0) return true;
    ++stores->misaligned;
    return false;
  }
  template <typename Unit>
  Unit load(const Unit* from) const {
    return aligned(from) ? *from : Unit{};
  }
  template <typename Unit>
  void store(Unit* to, Unit value) const {
    ++stores->total;
    if (!aligned(to)) return;
    const uint64_t at = (reinterpret_cast<uint64_t>(to) - stores->base) / sizeof(Unit);
    if (reinterpret_cast<uint64_t>(to) < stores->base || at >= stores->units) {
      ++stores->outside;
      return;
    }
    uint8_t& count = reinterpret_cast<uint8_t*>(stores->counts)[at];
    if (count < 255) ++count;
    *to = value;
  }
};

template <typename Memory>
void run_grid(const hic_plan& plan, uint32_t blocks, uint32_t threads, uint32_t lanes, const Memory& memory) {
  const hic_tables tables = hic_tables_of(plan);
  for (uint32_t block = 0; block < blocks; ++block)
    for (uint32_t thread = 0; thread < threads; ++thread)
      hic_thread(plan, tables, memory, block, blocks, thread, threads, lanes);
}

constexpr uint32_t MOST_RUN_BYTES = uint32_t{1} << 31;
constexpr uint64_t MOST_CHUNKS = uint64_t{1} << 31;  // see hic_lane_of

int check_pages(const char* side, const uint32_t* pages, uint32_t count, uint32_t limit) {
  for (uint32_t i = 0; i < count; ++i)
    if (pages[i] >= limit) return fail(HIC_INVALID, "%s page %u of a pool of %u", side, pages[i], limit);
  return HIC_OK;
}

}  // namespace

int hic_plan_check(const hic_plan* plan) {
  const uint32_t unit = plan->unit_bytes;
  if (unit == 0 || unit > 16 || (unit & (unit - 1)) != 0) return fail(HIC_INVALID, "units of %u bytes", unit);
  if (plan->run_bytes == 0 || plan->run_bytes % unit != 0 || plan->run_bytes > MOST_RUN_BYTES)
    return fail(HIC_INVALID, "runs of %u bytes in units of %u", plan->run_bytes, unit);
  if (plan->levels == 0 || plan->levels > HIC_LEVELS)
    return fail(HIC_INVALID, "%u levels, not 1 to %d", plan->levels, HIC_LEVELS);
  uint64_t runs = 1;
  uint32_t piece_levels = 0;
  for (uint32_t i = 0; i < plan->levels; ++i) {
    const hic_level& level = plan->level[i];
    runs *= level.extent;
    if (level.extent == 0 || runs >= MOST_CHUNKS) return fail(HIC_INVALID, "no runs, or too many of them");
    if (level.kind == HIC_PIECE) {
      ++piece_levels;
      if (level.extent != plan->piece_count) return fail(HIC_INVALID, "%u pieces, %u in the table", level.extent, plan->piece_count);
    } else if (level.kind == HIC_PAGE) {
      if (level.extent != plan->page_count) return fail(HIC_INVALID, "%u pages, %u in the table", level.extent, plan->page_count);
    } else if (level.kind != HIC_AFFINE) {
      return fail(HIC_INVALID, "a level of kind %u", level.kind);
    }
    if (level.source_stride % unit != 0 || level.target_stride % unit != 0)
      return fail(HIC_INVALID, "strides of %lld and %lld bytes in units of %u", static_cast<long long>(level.source_stride),
                  static_cast<long long>(level.target_stride), unit);
  }
  if (piece_levels != 1) return fail(HIC_INVALID, "%u levels of pieces, not 1", piece_levels);
  if (runs * hic_chunks_a_run(*plan) >= MOST_CHUNKS)
    return fail(HIC_INVALID, "too many bytes for one plan");
  if (plan->runs != runs) return fail(HIC_INVALID, "%u runs stated, %llu by extents", plan->runs, static_cast<unsigned long long>(runs));
  const hic_tables tables = hic_tables_of(*plan);
  for (uint32_t i = 0; i < plan->piece_count; ++i)
    if (tables.pieces[i].source % unit != 0 || tables.pieces[i].target % unit != 0)
      return fail(HIC_INVALID, "piece %u begins off its units of %u bytes", i, unit);
  const int code = check_pages("source", tables.source_pages, plan->page_count, plan->source_limit);
  return code != HIC_OK ? code : check_pages("target", tables.target_pages, plan->page_count, plan->target_limit);
}

int hic_copy_run(const hic_plan* plan, uint32_t threads) {
  return in_shares(plan->runs, threads, [plan](uint64_t first, uint64_t last) { run_share(*plan, first, last); });
}

int64_t hic_copy_list(const hic_plan* plan, int by_target, hic_run* runs, uint64_t capacity) {
  try {
    const std::vector<hic_run> list = hic::merged_runs(*plan, by_target != 0);
    std::copy_n(list.begin(), std::min<uint64_t>(capacity, list.size()), runs);
    return static_cast<int64_t>(list.size());
  } catch (const std::bad_alloc&) {
    return fail(HIC_SYSTEM, "no memory for a list of %u runs", plan->runs);
  }
}

int hic_copy_runs(const hic_run* runs, uint64_t count, uint32_t threads) {
  return in_shares(count, threads, [runs](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i)
      memcpy(reinterpret_cast<void*>(runs[i].target), reinterpret_cast<const void*>(runs[i].source), runs[i].bytes);
  });
}

int hic_copy_grid(const hic_plan* plan, uint32_t blocks, uint32_t block_threads, uint32_t lanes, hic_stores* stores) {
  if (lanes == 0 || block_threads == 0 || block_threads > 1024 || block_threads % lanes != 0)
    return fail(HIC_INVALID, "%u lanes in a block of %u threads", lanes, block_threads);
  if (stores == nullptr)
    run_grid(*plan, blocks, block_threads, lanes, hic_memory());
  else
    run_grid(*plan, blocks, block_threads, lanes, Counted{stores});
  return HIC_OK;
}
