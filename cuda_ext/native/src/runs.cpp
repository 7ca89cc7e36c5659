#include <algorithm>

#include "runs.h"

namespace hic {

std::vector<hic_run> merged_runs(const hic_plan& plan, bool by_target) {
  std::vector<hic_run> runs;
  runs.reserve(plan.runs);
  for_each_run(plan, 0, plan.runs, [&](uint64_t source, uint64_t target) { runs.push_back({source, target, plan.run_bytes}); });
  const auto before = [by_target](const hic_run& a, const hic_run& b) {
    return by_target ? a.target < b.target : a.source < b.source;
  };
  if (!std::is_sorted(runs.begin(), runs.end(), before)) std::sort(runs.begin(), runs.end(), before);
  size_t kept = 0;
  for (const hic_run& run : runs) {
    if (kept != 0) {
      hic_run& last = runs[kept - 1];
      if (last.source + last.bytes == run.source && last.target + last.bytes == run.target) {
        last.bytes += run.bytes;
        continue;
      }
    }
    runs[kept++] = run;
  }
  runs.resize(kept);
  return runs;
}

}  // namespace hic
