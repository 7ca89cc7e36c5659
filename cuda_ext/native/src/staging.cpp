#include "staging.h"

#include <algorithm>

#include "error.h"

namespace hic {

int page_span(const hic_plan& plan, PageSpan* page) {
  const hic_tables tables = hic_tables_of(plan);
  uint64_t low = UINT64_MAX, high = 0;
  for (uint32_t i = 0; i < plan.piece_count; ++i) {
    low = std::min(low, tables.pieces[i].target);
    high = std::max(high, tables.pieces[i].target);
  }
  uint64_t end = high + plan.run_bytes;
  for (uint32_t i = 0; i < plan.levels; ++i) {
    const hic_level& level = plan.level[i];
    if (level.kind == HIC_AFFINE) {
      if (level.target_stride < 0) return fail(HIC_INVALID, "the engine staged takes no negative strides");
      end += static_cast<uint64_t>(level.target_stride) * (level.extent - 1);
    }
    if (level.kind == HIC_PAGE) page->stride = static_cast<uint64_t>(level.target_stride);
  }
  page->first = low;
  page->bytes = end - low;
  const uint64_t moved = static_cast<uint64_t>(plan.runs / plan.page_count) * plan.run_bytes;
  if (moved != page->bytes)
    return fail(HIC_INVALID, "the engine staged copies whole pages: this is %llu bytes of a stretch of %llu",
                static_cast<unsigned long long>(moved), static_cast<unsigned long long>(page->bytes));
  return HIC_OK;
}

Staging::Staging(const hic_plan& plan, const PageSpan& page, uint64_t buffer, uint64_t buffer_bytes)
    : plan_(plan), page_(page), buffer_(buffer) {
  const hic_tables tables = hic_tables_of(plan);
  pieces_.assign(tables.pieces, tables.pieces + plan.piece_count);
  for (hic_piece& piece : pieces_) piece.target = buffer + (piece.target - page.first);
  places_.resize(std::min<uint64_t>(buffer_bytes / page.bytes, plan.page_count));
  for (uint32_t i = 0; i < room(); ++i) places_[i] = i;
}

hic_plan Staging::gather(uint32_t first, uint32_t pages) const {
  hic_plan part = part_of(plan_, first, pages, 0, plan_.piece_count);
  part.pieces = reinterpret_cast<uint64_t>(pieces_.data());
  part.target_pages = reinterpret_cast<uint64_t>(places_.data());
  part.target_limit = room();
  for (uint32_t i = 0; i < part.levels; ++i)
    if (part.level[i].kind == HIC_PAGE) part.level[i].target_stride = static_cast<int64_t>(page_.bytes);
  return part;
}

std::vector<hic_run> Staging::deliver(uint32_t first, uint32_t pages) const {
  const hic_tables tables = hic_tables_of(plan_);
  std::vector<hic_run> runs;
  runs.reserve(pages);
  for (uint32_t i = 0; i < pages; ++i)
    runs.push_back(
        {buffer_ + i * page_.bytes, page_.first + tables.target_pages[first + i] * page_.stride, page_.bytes});
  std::sort(runs.begin(), runs.end(), [](const hic_run& a, const hic_run& b) { return a.target < b.target; });
  return runs;
}

}  // namespace hic
