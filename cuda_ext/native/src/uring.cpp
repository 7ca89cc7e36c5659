// Slots by io_uring: one thread keeps many requests under way, and seals or judges pieces meanwhile.  By the system calls
// themselves, for the three that are needed do not make a library.
#include "capi/slots.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#include "slot_requests.h"

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>

namespace {

// Memory that the kernel shares with us.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping() {
    if (at_) munmap(at_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  // -> errno
  int map(int fd, off_t offset, size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (at == MAP_FAILED) return errno;
    at_ = at, bytes_ = bytes;
    return 0;
  }
  template <class T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(at_) + offset);
  }

 private:
  void* at_ = nullptr;
  size_t bytes_ = 0;
};

constexpr uint32_t kNone = ~0u;
constexpr int kPatience = 1000;  // tries at a kernel that is short of memory

}  // namespace

struct hic_uring {
  ~hic_uring() {
    if (fd >= 0) close(fd);
  }

  int open(uint32_t depth);
  void move(hic_slot_batch* batch);

 private:
  bool enter(uint32_t wait_for);
  void prepare(const hic_slot_batch& batch, uint32_t number);
  void take_back(hic_slot_batch* batch);
  uint32_t reap(hic_slot_batch* batch);

  int fd = -1;
  uint32_t depth_ = 0;
  Mapping sq_, cq_, sqe_;
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, sq_mask_ = 0;
  uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr, cq_mask_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;

  // Of the batch under way.
  std::unique_ptr<hic::SlotRequest[]> requests_;
  std::unique_ptr<uint32_t[]> idle_;  // numbers of requests that are free
  uint32_t idle_count_ = 0;
  uint32_t queued_ = 0;     // in the submission queue, not with the kernel yet
  uint32_t in_flight_ = 0;  // with the kernel
};

int hic_uring::open(uint32_t depth) {
  io_uring_params params{};
  fd = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
  if (fd < 0) return errno;
  size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  if (const int error = sq_.map(fd, IORING_OFF_SQ_RING, sq_bytes)) return error;
  if (const int error = cq_.map(fd, IORING_OFF_CQ_RING, cq_bytes)) return error;
  if (const int error = sqe_.map(fd, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe))) return error;
  sq_head_ = sq_.at<uint32_t>(params.sq_off.head);
  sq_tail_ = sq_.at<uint32_t>(params.sq_off.tail);
  sq_array_ = sq_.at<uint32_t>(params.sq_off.array);
  sq_mask_ = *sq_.at<uint32_t>(params.sq_off.ring_mask);
  cq_head_ = cq_.at<uint32_t>(params.cq_off.head);
  cq_tail_ = cq_.at<uint32_t>(params.cq_off.tail);
  cq_mask_ = *cq_.at<uint32_t>(params.cq_off.ring_mask);
  cqes_ = cq_.at<io_uring_cqe>(params.cq_off.cqes);
  sqes_ = sqe_.at<io_uring_sqe>(0);
  depth_ = params.sq_entries;
  requests_.reset(new (std::nothrow) hic::SlotRequest[depth_]);
  idle_.reset(new (std::nothrow) uint32_t[depth_]);
  if (!requests_ || !idle_) return ENOMEM;
  for (uint32_t i = 0; i < depth_; ++i) idle_[i] = i;
  idle_count_ = depth_;
  return 0;
}

// Put what is left of a request into the submission queue, which has a place for each.
void hic_uring::prepare(const hic_slot_batch& batch, uint32_t number) {
  const hic::SlotRequest& request = requests_[number];
  const uint32_t tail = *sq_tail_, at = tail & sq_mask_;
  io_uring_sqe& sqe = sqes_[at];
  std::memset(&sqe, 0, sizeof sqe);
  sqe.opcode = batch.writes ? IORING_OP_WRITEV : IORING_OP_READV;
  sqe.fd = batch.fd;
  sqe.off = request.offset;
  sqe.addr = reinterpret_cast<uint64_t>(request.run + request.part);
  sqe.len = request.parts - request.part;
  sqe.user_data = number;
  sq_array_[at] = at;
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++queued_;
}

// Hand over what is queued, and wait for so many completions -> whether the kernel takes requests.
bool hic_uring::enter(uint32_t wait_for) {
  for (int tries = 0;;) {
    const uint32_t flags = wait_for ? IORING_ENTER_GETEVENTS : 0;
    const long n = syscall(__NR_io_uring_enter, fd, queued_, wait_for, flags, nullptr, 0);
    if (n >= 0) {
      queued_ -= static_cast<uint32_t>(n);
      in_flight_ += static_cast<uint32_t>(n);
      return true;
    }
    if (errno == EINTR) continue;
    if ((errno != EAGAIN && errno != EBUSY) || ++tries > kPatience) return false;
    if (in_flight_) return true;  // it is short of room until some have ended
    sched_yield();
  }
}

// The kernel takes no more: move what it has not got ourselves.
void hic_uring::take_back(hic_slot_batch* batch) {
  const uint32_t head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
  for (uint32_t at = head; at != *sq_tail_; ++at) {
    const auto number = static_cast<uint32_t>(sqes_[at & sq_mask_].user_data);
    hic::SlotRequest& request = requests_[number];
    if (const int error = hic::move_slots(*batch, &request))
      hic::note_error(batch, error);
    else if (!batch->writes)
      hic::judge_slots(*batch, request.first, request.end);
    idle_[idle_count_++] = number;
  }
  __atomic_store_n(sq_tail_, head, __ATOMIC_RELEASE);
  queued_ = 0;
}

// What has ended -> how many.
uint32_t hic_uring::reap(hic_slot_batch* batch) {
  uint32_t head = *cq_head_, ended = 0;
  const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
  for (; head != tail; ++head) {
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    const auto number = static_cast<uint32_t>(cqe.user_data);
    const int result = cqe.res;
    hic::SlotRequest& request = requests_[number];
    --in_flight_, ++ended;
    if (result > 0) request.moved(static_cast<uint64_t>(result));
    const bool again = result == -EAGAIN || result == -EINTR;
    if (again || (result > 0 && request.left > 0)) {
      prepare(*batch, number);
      continue;
    }
    if (result <= 0 && request.left > 0)
      hic::note_error(batch, result ? -result : EIO);
    else if (!batch->writes)
      hic::judge_slots(*batch, request.first, request.end);  // others are under way meanwhile
    idle_[idle_count_++] = number;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  }
  __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  return ended;
}

void hic_uring::move(hic_slot_batch* batch) {
  hic::SlotRequests requests(*batch);
  for (bool more = true;;) {
    while (more && idle_count_ > 0) {
      const uint32_t number = idle_[idle_count_ - 1];
      hic::SlotRequest& request = requests_[number];
      more = !hic::has_failed(*batch) && requests.next(&request);
      if (!more) break;
      --idle_count_;
      if (batch->writes) hic::seal_slots(*batch, request.first, request.end);
      prepare(*batch, number);
      // The disk begins with this one while the next is sealed.
      if (batch->writes && batch->names && !enter(0)) take_back(batch);
    }
    if (queued_ == 0 && in_flight_ == 0) return;
    if (reap(batch) == 0 && !enter(1)) {
      take_back(batch);
      sched_yield();  // nobody else may have the memory before what is under way has ended
    }
  }
}

hic_uring* hic_uring_open(uint32_t depth, int32_t* error) {
  std::unique_ptr<hic_uring> made(new (std::nothrow) hic_uring);
  *error = made ? made->open(depth) : ENOMEM;
  return *error ? nullptr : made.release();
}

int32_t hic_uring_move(hic_uring* uring, hic_slot_batch* batch) {
  if (const int32_t wrong = hic::check_slots(*batch)) return wrong;
  uring->move(batch);
  return HIC_OK;
}

void hic_uring_close(hic_uring* uring) { delete uring; }

#else  // a kernel, or headers, of before 2019

struct hic_uring {};

hic_uring* hic_uring_open(uint32_t, int32_t* error) {
  *error = ENOSYS;
  return nullptr;
}

int32_t hic_uring_move(hic_uring*, hic_slot_batch* batch) { return hic_slots_move(batch); }

void hic_uring_close(hic_uring*) {}

#endif
