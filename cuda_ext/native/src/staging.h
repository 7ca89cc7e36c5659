// Write-backs by way of a buffer: pages are put together there as they lie on the host, and taken over one piece each.
#pragma once

#include <cstdint>
#include <vector>

#include "include/plan.h"
#include "runs.h"

namespace hic {

// Where the bytes of one page lie on the target side.
struct PageSpan {
  uint64_t first = 0;   // of page 0
  uint64_t bytes = 0;
  uint64_t stride = 0;  // from page to page
};

// HIC_INVALID if a page is more than one stretch of bytes there, or not all of it is copied.
int page_span(const hic_plan& plan, PageSpan* page);

// A buffer cut into pages.  Plan and buffer must outlive it, and it what `gather` returns.
class Staging {
 public:
  // `buffer`: room for a page at least.
  Staging(const hic_plan& plan, const PageSpan& page, uint64_t buffer, uint64_t buffer_bytes);
  // Pages that fit in.
  uint32_t room() const { return static_cast<uint32_t>(places_.size()); }
  // Fills the buffer with pages [first, first + pages) of the plan.
  hic_plan gather(uint32_t first, uint32_t pages) const;
  // What takes them to their places, sorted by these.
  std::vector<hic_run> deliver(uint32_t first, uint32_t pages) const;

 private:
  const hic_plan& plan_;
  const PageSpan page_;
  const uint64_t buffer_;
  std::vector<hic_piece> pieces_;
  std::vector<uint32_t> places_;
};

}  // namespace hic
