// Streams: in-order queues with one thread each.
//
// All state of a stream lies under its lock.  The lock is let go while work runs and while anybody is told, for who is told may
// come back: an event may wake another stream, and a ring its loop.
#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>

#include "error.h"

namespace hic {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::chrono::steady_clock::time_point at(int64_t ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns));
}

// Wait until `over` -> whether it is; `timeout_ns` < 0: no limit.
template <class Over>
bool wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& guard, int64_t timeout_ns, Over over) {
  if (timeout_ns < 0) {
    changed.wait(guard, over);
    return true;
  }
  return changed.wait_until(guard, at(now_ns() + timeout_ns), over);
}

}  // namespace

// -- planned failures

void Faults::add(int32_t code, uint32_t works, uint32_t after, int32_t stream) {
  std::lock_guard<std::mutex> guard(lock_);
  faults_.push_back({code, works, after, stream});
}

int32_t Faults::take(int32_t stream) {
  std::lock_guard<std::mutex> guard(lock_);
  int32_t code = 0;
  for (Fault& fault : faults_) {
    if (fault.stream >= 0 && fault.stream != stream) continue;
    if (fault.after > 0) {
      --fault.after;
    } else if (code == 0) {
      --fault.works;
      code = fault.code;
    }
  }
  faults_.erase(std::remove_if(faults_.begin(), faults_.end(), [](const Fault& fault) { return fault.works == 0; }),
                faults_.end());
  return code;
}

// -- what others call

Stream::Stream(const char* name, int32_t number, std::shared_ptr<Faults> faults)
    : name_(std::string(name).substr(0, 15)), number_(number), faults_(std::move(faults)) {}

int64_t Stream::submit(const hic_op* ops, uint32_t count, hic_event* whole, uint64_t generation) {
  for (uint32_t i = 0; i < count; ++i) {
    const bool needs_event = ops[i].kind == HIC_OP_WAIT || ops[i].kind == HIC_OP_RECORD;
    if (ops[i].kind < HIC_OP_CALL || ops[i].kind > HIC_OP_RECORD || (needs_event && !ops[i].event) ||
        (ops[i].kind == HIC_OP_CALL && !ops[i].call))
      return fail(HIC_INVALID, "op %u of kind %d is not complete", i, ops[i].kind);
  }
  std::deque<Op> taken;
  for (uint32_t i = 0; i < count; ++i) {
    Op op;
    op.kind = ops[i].kind;
    op.first = i == 0;
    op.last = i + 1 == count;
    op.bytes = ops[i].bytes;
    op.call = ops[i].call;
    op.argument = ops[i].argument;
    op.free_argument = ops[i].release;
    op.event = EventHold(ops[i].event);
    op.generation = ops[i].generation;
    if (op.last) op.whole = EventHold(whole), op.whole_generation = generation;
    taken.push_back(std::move(op));
  }
  int32_t dropped;
  int64_t number;
  {
    Guard guard(lock_);
    if (stopping_) return fail(HIC_CLOSED, "stream %s is closed", name_.c_str());
    dropped = dropped_;
    if (dropped == 0 && !started_ && !begin_thread()) return fail(HIC_SYSTEM, "no thread for stream %s", name_.c_str());
    ops_ += count;
    number = static_cast<int64_t>(ops_);
    if (dropped == 0) {
      const bool idle = queue_.empty();  // else the thread works, or waits for something that this changes nothing about
      for (Op& op : taken) {
        submitted_ += op.is_work();
        queue_.push_back(std::move(op));
      }
      guard.unlock();
      if (idle) changed_.notify_all();
      return number;
    }
    pass(count);
  }
  for (Op& op : taken) {
    op.release();
    op.finish(dropped);
    op.finish_whole(dropped);
  }
  return number;
}

void Stream::speed(int64_t latency_ns, double ns_per_byte) {
  Guard guard(lock_);
  latency_ns_ = latency_ns;
  ns_per_byte_ = ns_per_byte;
}

void Stream::gate_shut(hic_event* reached, uint64_t generation) {
  Guard guard(lock_);
  permits_ = 0;
  reached_ = EventHold(reached);
  reached_generation_ = generation;
  reached_told_ = false;
  changed_.notify_all();  // work may stand there already
}

int32_t Stream::gate_allow(uint32_t works, hic_event* fresh, uint64_t generation) {
  Guard guard(lock_);
  if (permits_ < 0) return fail(HIC_INVALID, "the gate is open");
  permits_ += works;
  changed_.notify_all();
  if (!reached_told_) return 0;
  reached_ = EventHold(fresh);
  reached_generation_ = generation;
  reached_told_ = false;
  return 1;
}

void Stream::gate_open() {
  Guard guard(lock_);
  permits_ = -1;
  changed_.notify_all();
}

int32_t Stream::next(int64_t timeout_ns, uint64_t* argument) {
  Guard guard(lock_);
  wait_for(changed_, guard, timeout_ns, [&] { return external_ == External::offered || exited_; });
  if (external_ == External::offered) {
    external_ = External::taken;
    *argument = external_argument_;
    return 1;
  }
  return exited_ ? static_cast<int32_t>(HIC_CLOSED) : 0;
}

void Stream::end(int32_t code) {
  Guard guard(lock_);
  if (external_ != External::taken) return;
  external_ = External::ended;
  external_code_ = code;
  changed_.notify_all();
}

void Stream::finish() {
  Guard guard(lock_);
  stopping_ = true;
  if (!started_) exited_ = true;
  changed_.notify_all();
}

bool Stream::join(int64_t timeout_ns) {
  Guard guard(lock_);
  return wait_for(changed_, guard, timeout_ns, [&] { return exited_; });
}

void Stream::drop(int32_t code) {
  std::deque<Op> dropped;
  Op running;
  bool has_running;
  {
    Guard guard(lock_);
    if (dropped_ == 0) dropped_ = code;
    dropped.swap(queue_);
    has_running = has_running_;
    has_running_ = false;
    if (has_running) {
      // The thread still works on it: it keeps the argument, the waiters are told here.
      running.event = EventHold(running_.event);
      running.generation = running_.generation;
      running.whole = EventHold(running_.whole);
      running.whole_generation = running_.whole_generation;
      running.kind = running_.kind;
    }
    const uint64_t open = has_running + std::count_if(dropped.begin(), dropped.end(),
                                                      [](const Op& op) { return op.kind != HIC_OP_WAIT; });
    failed_ += open;
    drops_ += open;
    pass(dropped.size());
    subscribed_ = false;
    changed_.notify_all();
  }
  if (has_running) {
    running.finish(code);
    running.finish_whole(code);
  }
  for (Op& op : dropped) {
    op.release();
    op.finish(code);
    op.finish_whole(code);
  }
}

void Stream::break_off(int32_t code) {
  Guard guard(lock_);
  broken_ = code;
  changed_.notify_all();
}

void Stream::count(hic_stream_counts* out) {
  Guard guard(lock_);
  *out = {submitted_, finished_, failed_, drops_, moved_bytes_, passed_, began_ns_ ? now_ns() - began_ns_ : 0,
          exited_ || !started_, broken_, calling_, 0};
}

std::string Stream::error() {
  Guard guard(lock_);
  return error_;
}

void Stream::wake() {
  Guard guard(lock_);
  changed_.notify_all();
}

// -- the thread

bool Stream::begin_thread() {
  try {
    std::thread([self = shared_from_this()] {
      pthread_setname_np(pthread_self(), self->name_.c_str());
      self->main();
    }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  return started_ = true;
}

void Stream::main() {
  Guard guard(lock_);
  for (;;) {
    if (queue_.empty()) {
      if (stopping_) break;
      changed_.wait(guard);
    } else if (broken_ != 0) {
      changed_.wait(guard);
    } else if (queue_.front().kind == HIC_OP_WAIT) {
      if (!pass_event(guard)) continue;
      pass(1);
      queue_.pop_front();
      subscribed_ = false;
    } else if (!queue_.front().is_work() || pass_gate(guard)) {
      run(guard);
    }
  }
  exited_ = true;
  changed_.notify_all();
}

// Ops are over.  Those behind the op that runs count when it is over too: whoever frees memory goes by the number.
void Stream::pass(uint64_t ops) { (busy_ ? passed_later_ : passed_) += ops; }

// -> false if the lock was let go meanwhile: look again.
bool Stream::pass_event(Guard& guard) {
  Op& op = queue_.front();
  if (op.event->ended(op.generation)) return true;
  if (subscribed_) {
    changed_.wait(guard);
    return false;
  }
  subscribed_ = true;
  const EventHold event(op.event);
  const uint64_t generation = op.generation;
  guard.unlock();
  event->subscribe({generation, nullptr, 0, shared_from_this()});
  guard.lock();
  return false;
}

bool Stream::pass_gate(Guard& guard) {
  if (permits_ < 0) return true;
  if (permits_ > 0) {
    --permits_;
    return true;
  }
  if (reached_told_) {
    changed_.wait(guard);
    return false;
  }
  reached_told_ = true;
  const EventHold reached(reached_);
  const uint64_t generation = reached_generation_;
  guard.unlock();
  if (reached) reached->finish(generation, 0);
  guard.lock();
  return false;
}

void Stream::run(Guard& guard) {
  running_ = std::move(queue_.front());
  queue_.pop_front();
  has_running_ = busy_ = true;
  if (running_.first) first_code_ = 0;
  Op& op = running_;
  int32_t code = first_code_;  // a record inside a submission that has failed tells so as well
  if (op.is_work()) {
    code = work(guard, op);
    if (code != 0 && first_code_ == 0) first_code_ = code;
  }
  const bool told = !has_running_;  // dropped meanwhile
  has_running_ = false;
  if (!told && op.is_work()) {
    (code == 0 ? finished_ : failed_) += 1;
    if (code == 0) moved_bytes_ += op.bytes;
  }
  std::vector<std::pair<EventHold, uint64_t>> failed;
  if (!told && code != 0 && !op.last)
    for (const Op& later : queue_) {
      if (later.event && later.kind != HIC_OP_WAIT) failed.emplace_back(EventHold(later.event), later.generation);
      if (later.last) break;
    }
  busy_ = false;
  pass(1 + passed_later_);
  passed_later_ = 0;
  Op over = std::move(running_);
  const int32_t whole = first_code_ != 0 ? first_code_ : code;
  guard.unlock();
  over.release();
  if (!told) {
    over.finish(code);
    for (auto& [event, generation] : failed) event->finish(generation, code);
    over.finish_whole(whole);
  }
  guard.lock();
}

// With the lock let go while it runs -> its code.
int32_t Stream::work(Guard& guard, Op& op) {
  const int64_t began = now_ns();
  began_ns_ = began;
  const int64_t lasts_ns = latency_ns_ + static_cast<int64_t>(static_cast<double>(op.bytes) * ns_per_byte_);
  const uint64_t argument = op.argument;
  const auto call = op.call;
  calling_ = op.kind == HIC_OP_CALL;
  guard.unlock();
  int32_t code = faults_->take(number_);
  const bool planned = code != 0;
  std::string text;
  if (!planned && op.kind == HIC_OP_CALL) {
    code = call(reinterpret_cast<void*>(argument));
    if (code > 0) code = 0;
    if (code < 0) text = hic_last_error();
  }
  guard.lock();
  calling_ = false;
  if (!planned && op.kind == HIC_OP_EXTERNAL) code = external(guard, argument);
  if (!text.empty()) error_ = text;
  if (!planned && lasts_ns > 0) changed_.wait_until(guard, at(began + lasts_ns), [&] { return dropped_ != 0; });
  began_ns_ = 0;
  return code;
}

int32_t Stream::external(Guard& guard, uint64_t argument) {
  external_argument_ = argument;
  external_ = External::offered;
  changed_.notify_all();
  changed_.wait(guard, [&] {
    return external_ == External::ended || (dropped_ != 0 && external_ == External::offered);
  });
  const int32_t code = external_ == External::ended ? external_code_ : dropped_;
  external_ = External::none;
  return code;
}

}  // namespace hic
