// A plan as a list of copies, for whatever moves contiguous bytes: memcpy, or a GPU's copy engines.
#pragma once

#include <algorithm>
#include <vector>

#include "capi.h"
#include "include/plan.h"

namespace hic {

// Calls visit(source, target) for runs [first, last) in the plan's order.  Only the start of each row, the fastest level, is
// located, so that a run costs an addition or a look into a table, not five divisions.
template <typename Visit>
void for_each_run(const hic_plan& plan, uint64_t first, uint64_t last, const Visit& visit) {
  const hic_tables tables = hic_tables_of(plan);
  const hic_level& fastest = plan.level[plan.levels - 1];
  hic_plan rows = plan;  // the loops around the fastest
  --rows.levels;
  while (first < last) {
    const hic_piece at = hic_locate(rows, tables, static_cast<uint32_t>(first / fastest.extent));
    uint32_t index = static_cast<uint32_t>(first % fastest.extent);
    const uint32_t end = static_cast<uint32_t>(std::min<uint64_t>(fastest.extent, index + last - first));
    first += end - index;
    if (fastest.kind == HIC_PIECE) {
      for (; index < end; ++index)
        visit(at.source + tables.pieces[index].source, at.target + tables.pieces[index].target);
    } else if (fastest.kind == HIC_PAGE) {
      for (; index < end; ++index)
        visit(at.source + static_cast<uint64_t>(fastest.source_stride * tables.source_pages[index]),
              at.target + static_cast<uint64_t>(fastest.target_stride * tables.target_pages[index]));
    } else {
      for (; index < end; ++index)
        visit(at.source + static_cast<uint64_t>(fastest.source_stride * index),
              at.target + static_cast<uint64_t>(fastest.target_stride * index));
    }
  }
}

// Some of the pages and some of the pieces of a plan, as a plan.
inline hic_plan part_of(const hic_plan& plan, uint32_t first_page, uint32_t pages, uint32_t first_piece, uint32_t pieces) {
  hic_plan part = plan;
  part.source_pages += first_page * sizeof(uint32_t);
  part.target_pages += first_page * sizeof(uint32_t);
  part.pieces += first_piece * sizeof(hic_piece);
  part.page_count = pages;
  part.piece_count = pieces;
  part.runs = 1;
  for (uint32_t i = 0; i < part.levels; ++i) {
    if (part.level[i].kind == HIC_PAGE) part.level[i].extent = pages;
    if (part.level[i].kind == HIC_PIECE) part.level[i].extent = pieces;
    part.runs *= part.level[i].extent;
  }
  return part;
}

// Every run, neighbours on both sides joined, sorted by the address of one side: the host's, so that what crosses the bus
// comes in long stretches.
std::vector<hic_run> merged_runs(const hic_plan& plan, bool by_target);

}  // namespace hic
