// The event of capi/events.h, as streams hold it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "capi.h"
#include "ring.h"

namespace hic {

// What a stream that waits for an event hands to it.
struct Wakeable {
  virtual ~Wakeable() = default;
  virtual void wake() = 0;
};

}  // namespace hic

struct hic_event {
  // One who wants to know: a ring (held until then), or a stream.
  struct Subscription {
    uint64_t generation;
    hic_ring* ring;
    uint64_t ticket;
    std::shared_ptr<hic::Wakeable> waiter;
  };

  ~hic_event();
  bool ended(uint64_t generation) const { return done.load(std::memory_order_acquire) >= generation; }
  bool finish(uint64_t generation, int32_t code);
  bool wait(uint64_t generation, int64_t timeout_ns);
  // Tells at once, on this thread, if the generation has ended.
  void subscribe(Subscription subscription);

  void hold() { holders.fetch_add(1, std::memory_order_relaxed); }
  void let_go() {
    if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  std::atomic<uint64_t> done{0};  // the newest generation that has ended
  std::atomic<int32_t> code{0};   // written before `done`
  std::atomic<uint32_t> holders{1};
  std::mutex lock;
  std::condition_variable changed;
  std::vector<Subscription> subscriptions;
};

namespace hic {

// A counted hold on an event, or none.
class EventHold {
 public:
  EventHold() = default;
  explicit EventHold(hic_event* event) : event_(event) {
    if (event_) event_->hold();
  }
  EventHold(EventHold&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  EventHold& operator=(EventHold&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  EventHold(const EventHold& other) : EventHold(other.event_) {}
  EventHold& operator=(const EventHold&) = delete;
  ~EventHold() {
    if (event_) event_->let_go();
  }
  hic_event* operator->() const { return event_; }
  explicit operator bool() const { return event_ != nullptr; }

 private:
  hic_event* event_ = nullptr;
};

}  // namespace hic
