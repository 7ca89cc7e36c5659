// What the copy engines of a GPU do, done by a CPU.
#include <algorithm>
#include <memory>
#include <new>

#include "capi.h"
#include "error.h"
#include "runs.h"
#include "staging.h"

namespace {

using hic::fail;

constexpr uint64_t STAGING_BYTES = 4 << 20;  // or one page, where that is more

int by_staging(const hic_plan& plan, uint32_t threads) {
  hic::PageSpan page;
  int code = hic::page_span(plan, &page);
  if (code != HIC_OK) return code;
  const uint64_t bytes = std::max(STAGING_BYTES, page.bytes);
  // A multiple of the alignment, as aligned_alloc wants it; a cache line, which streamed stores want.
  const std::unique_ptr<void, decltype(&free)> buffer(aligned_alloc(64, (bytes + 63) / 64 * 64), &free);
  if (!buffer) throw std::bad_alloc();
  const hic::Staging staging(plan, page, reinterpret_cast<uint64_t>(buffer.get()), bytes);
  for (uint32_t first = 0; first < plan.page_count; first += staging.room()) {
    const uint32_t pages = std::min(staging.room(), plan.page_count - first);
    const hic_plan gather = staging.gather(first, pages);
    code = hic_copy_run(&gather, threads);
    if (code != HIC_OK) return code;
    const std::vector<hic_run> runs = staging.deliver(first, pages);
    code = hic_copy_runs(runs.data(), runs.size(), threads);
    if (code != HIC_OK) return code;
  }
  return HIC_OK;
}

}  // namespace

int hic_copy_by(const hic_plan* plan, int engine, int to_host, uint32_t threads) {
  try {
    switch (engine) {
      case HIC_ENGINE_KERNEL:
        return hic_copy_run(plan, threads);
      case HIC_ENGINE_DIRECT: {
        const std::vector<hic_run> runs = hic::merged_runs(*plan, to_host != 0);
        return hic_copy_runs(runs.data(), runs.size(), threads);
      }
      case HIC_ENGINE_STAGED:
        if (to_host == 0) return fail(HIC_INVALID, "the engine staged goes from the device to the host only");
        return by_staging(*plan, threads);
      default:
        return fail(HIC_INVALID, "engine %d", engine);
    }
  } catch (const std::bad_alloc&) {
    return fail(HIC_SYSTEM, "no memory for a copy of %u runs", plan->runs);
  }
}
