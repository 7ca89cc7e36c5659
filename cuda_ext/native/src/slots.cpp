// Slots, one request after the other: a thread each.
#include "capi/slots.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "breather.h"
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

#ifndef SYS_cachestat
#define SYS_cachestat 451  // Linux 6.5, on every machine
#endif

// What the page cache has of a part of a file, in pages, of how many -> errno.  A read "without waiting" cannot be had instead:
// where it finds nothing it starts to read ahead, and the disk is read twice.
struct Cached {
  uint64_t found = 0, all = 0;

  int look(int fd, uint64_t offset, uint64_t bytes) {
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t range[2] = {offset, bytes};
    uint64_t counts[5];  // in the cache, dirty, being written, evicted, recently evicted
    if (syscall(SYS_cachestat, fd, range, counts, 0)) return errno;
    found = counts[0];
    all = bytes ? (offset + bytes - 1) / page - offset / page + 1 : 0;
    return 0;
  }
};

// Of a request what the page cache has, in one call if that is all of it -> errno.  Others may push it out meanwhile; then the
// kernel waits for the disk after all.
int read_cached(const hic_slot_batch& batch, SlotRequest* request) {
  Cached cached;
  if (const int error = cached.look(batch.fd, request->offset, request->left)) return error;
  const int none = HIC_NOT_CACHED;
  std::memset(batch.verdicts + request->first, cached.found ? 0 : none, request->end - request->first);
  if (cached.found == cached.all) {
    if (const int error = move_slots(batch, request)) return error;
    judge_slots(batch, request->first, request->end);  // while it is in the processor's cache
    return 0;
  }
  for (uint64_t i = request->first; cached.found && i < request->end; ++i) {
    Cached piece;
    if (const int error = piece.look(batch.fd, batch.offsets[i], batch.bytes[i])) return error;
    if (piece.found < piece.all) {
      batch.verdicts[i] = HIC_NOT_CACHED;
      continue;
    }
    SlotRequest one;
    one.offset = batch.offsets[i], one.left = batch.bytes[i];
    one.part = 0, one.parts = 1;
    one.run[0] = {batch.buffers[i], batch.bytes[i]};
    if (const int error = move_slots(batch, &one)) return error;
    judge_slots(batch, i, i + 1);
  }
  return 0;
}

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
  hic::Breather breather;
  uint64_t ours = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
  for (uint64_t number = 0; requests.next(&request); ++number) {
    if (number != ours) continue;  // another thread's
    if (hic::has_failed(*batch)) break;
    if (batch->writes) hic::seal_slots(*batch, request.first, request.end);
    const int error = batch->from_cache ? hic::read_cached(*batch, &request)
                      : batch->memory   ? hic::copy_slots(*batch, request)
                                        : hic::move_slots(*batch, &request);
    if (error) {
      hic::note_error(batch, error);
      break;
    }
    if (!batch->writes && !batch->from_cache) hic::judge_slots(*batch, request.first, request.end);  // while it is in the cache
    ours = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
    breather.step();
  }
  return HIC_OK;
}

int32_t hic_slots_write_out(int32_t fd, uint64_t offset) {
  return sync_file_range(fd, static_cast<off64_t>(offset), 0, SYNC_FILE_RANGE_WRITE) ? errno : 0;
}
