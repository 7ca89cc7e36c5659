// A batch of slots as the requests that move it.
#pragma once

#include <sys/uio.h>

#include "capi/slots.h"

namespace hic {

// Pieces [first, end) of a batch, neighbours in the file.
struct SlotRequest {
  static constexpr uint32_t kMaxParts = 256;  // buffers that are neighbours in memory are one

  uint64_t first, end;
  uint64_t offset, left;  // in bytes; what has been moved is behind them
  uint32_t part, parts;
  iovec run[kMaxParts];

  void moved(uint64_t bytes);
};

// Goes through a batch.
class SlotRequests {
 public:
  explicit SlotRequests(const hic_slot_batch& batch) : batch_(batch) {}
  // -> whether there was one more.
  bool next(SlotRequest* request);

 private:
  const hic_slot_batch& batch_;
  uint64_t at_ = 0;
};

// HIC_OK, or why this batch cannot be moved.
int32_t check_slots(const hic_slot_batch& batch);
// Before a write, after a read: what the content needs.
void seal_slots(const hic_slot_batch& batch, uint64_t first, uint64_t end);
void judge_slots(const hic_slot_batch& batch, uint64_t first, uint64_t end);
// One request to its end -> errno.
int move_slots(const hic_slot_batch& batch, SlotRequest* request);
// Only the first error is kept.
void note_error(hic_slot_batch* batch, int error);
bool has_failed(const hic_slot_batch& batch);

}  // namespace hic
