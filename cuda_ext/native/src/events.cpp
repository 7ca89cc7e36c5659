// Events.  The lock of an event is held for a few instructions only, and never while somebody is told.
#include "events.h"

#include <chrono>
#include <new>
#include <utility>

#include "error.h"

namespace {

void tell(hic_event::Subscription& subscription, int32_t code) {
  if (subscription.ring) {
    subscription.ring->push(subscription.ticket, code);  // never full: whoever subscribes bounds what is in flight
    subscription.ring->let_go();
  }
  if (subscription.waiter) subscription.waiter->wake();
}

}  // namespace

hic_event::~hic_event() {
  for (Subscription& subscription : subscriptions)
    if (subscription.ring) subscription.ring->let_go();
}

bool hic_event::finish(uint64_t generation, int32_t with) {
  std::vector<Subscription> due;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (done.load(std::memory_order_relaxed) >= generation) return false;
    code.store(with, std::memory_order_relaxed);
    done.store(generation, std::memory_order_release);
    if (!subscriptions.empty()) {
      std::vector<Subscription> later;
      for (Subscription& subscription : subscriptions)
        (subscription.generation <= generation ? due : later).push_back(std::move(subscription));
      subscriptions.swap(later);
    }
    // Under the lock: the last waiter may let go of the event as soon as it can return.
    changed.notify_all();
  }
  for (Subscription& subscription : due) tell(subscription, with);
  return true;
}

bool hic_event::wait(uint64_t generation, int64_t timeout_ns) {
  if (ended(generation)) return true;
  std::unique_lock<std::mutex> guard(lock);
  const auto over = [&] { return ended(generation); };
  if (timeout_ns < 0) {
    changed.wait(guard, over);
    return true;
  }
  return changed.wait_for(guard, std::chrono::nanoseconds(timeout_ns), over);
}

void hic_event::subscribe(Subscription subscription) {
  if (subscription.ring) subscription.ring->hold();
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!ended(subscription.generation)) {
      subscriptions.push_back(std::move(subscription));
      return;
    }
  }
  tell(subscription, code.load(std::memory_order_relaxed));
}

int32_t hic_event_new(uint32_t count, hic_event** out) {
  for (uint32_t i = 0; i < count; ++i) {
    out[i] = new (std::nothrow) hic_event();
    if (out[i] == nullptr) {
      while (i > 0) out[--i]->let_go();
      return hic::fail(HIC_SYSTEM, "no memory for %u events", count);
    }
  }
  return HIC_OK;
}

int32_t hic_event_query(hic_event* event, uint64_t generation) { return event->ended(generation); }

int32_t hic_event_code(hic_event* event) { return event->code.load(std::memory_order_acquire); }

int32_t hic_event_wait(hic_event* event, uint64_t generation, int64_t timeout_ns) {
  return event->wait(generation, timeout_ns);
}

int32_t hic_event_finish(hic_event* event, uint64_t generation, int32_t code) { return event->finish(generation, code); }

int32_t hic_event_subscribe(hic_event* event, uint64_t generation, hic_ring* ring, uint64_t ticket) {
  event->subscribe({generation, ring, ticket, nullptr});
  return HIC_OK;
}

void hic_event_release(hic_event* event) { event->let_go(); }
