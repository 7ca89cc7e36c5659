// A plan as a list of copies, for whatever moves contiguous bytes: memcpy, or a GPU's copy engines.
#pragma once

#include <algorithm>
#include <vector>

#include "capi.h"
#include "include/plan.h"

namespace hic {

// Calls visit(source, target) for runs [first, last) in the plan's order.  Addresses along the fastest level are counted up,
// so a run costs an addition, not five divisions.
template <typename Visit>
void for_each_run(const hic_plan& plan, uint64_t first, uint64_t last, const Visit& visit) {
  const hic_tables tables = hic_tables_of(plan);
  if (plan.levels == 0 || plan.level[plan.levels - 1].kind != HIC_AFFINE) {
    for (uint64_t run = first; run < last; ++run) {
      const hic_piece at = hic_locate(plan, tables, static_cast<uint32_t>(run));
      visit(at.source, at.target);
    }
    return;
  }
  const hic_level& fastest = plan.level[plan.levels - 1];
  while (first < last) {
    hic_piece at = hic_locate(plan, tables, static_cast<uint32_t>(first));
    const uint64_t row_end = std::min<uint64_t>(last, first - first % fastest.extent + fastest.extent);
    for (; first < row_end; ++first) {
      visit(at.source, at.target);
      at.source += static_cast<uint64_t>(fastest.source_stride);
      at.target += static_cast<uint64_t>(fastest.target_stride);
    }
  }
}

// Every run, neighbours on both sides joined, sorted by the address of one side: the host's, so that what crosses the bus
// comes in long stretches.
std::vector<hic_run> merged_runs(const hic_plan& plan, bool by_target);

}  // namespace hic
