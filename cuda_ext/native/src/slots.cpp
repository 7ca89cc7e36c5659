// Slots, one request after the other: a thread each.
#include "capi/slots.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"
#include "objects.h"
#include "slot_requests.h"

namespace hic {

void SlotRequest::moved(uint64_t bytes) {
  offset += bytes;
  left -= bytes;
  while (bytes > 0) {
    iovec& now = run[part];
    if (bytes < now.iov_len) {
      now.iov_base = static_cast<char*>(now.iov_base) + bytes;
      now.iov_len -= bytes;
      return;
    }
    bytes -= now.iov_len;
    ++part;
  }
}

bool SlotRequests::next(SlotRequest* request) {
  if (at_ == batch_.count) return false;
  request->first = at_;
  request->offset = batch_.offsets[at_];
  request->left = 0;
  request->part = request->parts = 0;
  do {
    const uint64_t bytes = batch_.bytes[at_];
    char* buffer = static_cast<char*>(batch_.buffers[at_]);
    iovec* last = request->parts ? &request->run[request->parts - 1] : nullptr;
    if (last && static_cast<char*>(last->iov_base) + last->iov_len == buffer) {
      last->iov_len += bytes;
    } else {
      if (request->parts == SlotRequest::kMaxParts) break;
      request->run[request->parts++] = {buffer, bytes};
    }
    request->left += bytes;
    ++at_;
  } while (at_ < batch_.count && batch_.offsets[at_] == request->offset + request->left &&
           request->left + batch_.bytes[at_] <= batch_.request_bytes);
  request->end = at_;
  return true;
}

int32_t check_slots(const hic_slot_batch& batch) {
  for (uint64_t i = 0; batch.names && batch.writes && i < batch.count; ++i)
    if (batch.bytes[i] < kHeaderBytes)
      return fail(HIC_INVALID, "object %llu has no room for a header", static_cast<unsigned long long>(i));
  return HIC_OK;
}

void seal_slots(const hic_slot_batch& batch, uint64_t first, uint64_t end) {
  for (uint64_t i = first; batch.names && i < end; ++i)
    seal(static_cast<uint8_t*>(batch.buffers[i]), batch.bytes[i], *batch.names, batch.numbers[i]);
}

void judge_slots(const hic_slot_batch& batch, uint64_t first, uint64_t end) {
  for (uint64_t i = first; batch.names && i < end; ++i)
    batch.verdicts[i] =
        judge(static_cast<const uint8_t*>(batch.buffers[i]), batch.bytes[i], *batch.names, batch.numbers[i]);
}

int move_slots(const hic_slot_batch& batch, SlotRequest* request) {
  while (request->left > 0) {
    const iovec* run = request->run + request->part;
    const int parts = static_cast<int>(request->parts - request->part);
    const auto offset = static_cast<off_t>(request->offset);
    const ssize_t n = batch.writes ? pwritev(batch.fd, run, parts, offset) : preadv(batch.fd, run, parts, offset);
    if (n < 0 && errno != EINTR) return errno;
    if (n == 0) return EIO;
    if (n > 0) request->moved(static_cast<uint64_t>(n));
  }
  return 0;
}

void note_error(hic_slot_batch* batch, int error) {
  int32_t none = 0;
  __atomic_compare_exchange_n(&batch->error, &none, error, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

bool has_failed(const hic_slot_batch& batch) { return __atomic_load_n(&batch.error, __ATOMIC_RELAXED) != 0; }

namespace {

int copy_slots(const hic_slot_batch& batch, const SlotRequest& request) {
  for (uint64_t i = request.first; i < request.end; ++i) {
    char* slot = static_cast<char*>(batch.memory) + batch.offsets[i];
    std::memcpy(batch.writes ? slot : batch.buffers[i], batch.writes ? batch.buffers[i] : slot, batch.bytes[i]);
  }
  return 0;
}

}  // namespace
}  // namespace hic

int32_t hic_slots_move(hic_slot_batch* batch) {
  if (const int32_t wrong = hic::check_slots(*batch)) return wrong;
  hic::SlotRequests requests(*batch);
  hic::SlotRequest request;
  uint64_t ours = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
  for (uint64_t number = 0; requests.next(&request); ++number) {
    if (number != ours) continue;  // another thread's
    if (hic::has_failed(*batch)) break;
    if (batch->writes) hic::seal_slots(*batch, request.first, request.end);
    const int error = batch->memory ? hic::copy_slots(*batch, request) : hic::move_slots(*batch, &request);
    if (error) {
      hic::note_error(batch, error);
      break;
    }
    if (!batch->writes) hic::judge_slots(*batch, request.first, request.end);  // while it is in the processor's cache
    ours = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
  }
  return HIC_OK;
}
