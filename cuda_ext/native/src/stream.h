// A stream of the CPU device, and the failures planned for all streams of one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "capi.h"
#include "events.h"

namespace hic {

class Faults {
 public:
  void add(int32_t code, uint32_t works, uint32_t after, int32_t stream);
  // The code with which the work that begins now on `stream` shall fail; 0: it shall not.
  int32_t take(int32_t stream);

 private:
  struct Fault {
    int32_t code;
    uint32_t works, after;
    int32_t stream;
  };
  std::mutex lock_;
  std::vector<Fault> faults_;
};

// One op as the queue holds it.
struct Op {
  int32_t kind = HIC_OP_RECORD;
  bool first = true, last = true;  // of its submission
  uint64_t bytes = 0;
  int32_t (*call)(void*) = nullptr;
  uint64_t argument = 0;
  void (*free_argument)(void*) = nullptr;
  EventHold event, whole;
  uint64_t generation = 0, whole_generation = 0;

  bool is_work() const { return kind == HIC_OP_CALL || kind == HIC_OP_EXTERNAL; }
  void release() {
    if (free_argument) free_argument(reinterpret_cast<void*>(argument));
    free_argument = nullptr;
  }
  // Tell all who wait for this op, not those who wait for the submission.
  void finish(int32_t code) {
    if (event && kind != HIC_OP_WAIT) event->finish(generation, code);
  }
  void finish_whole(int32_t code) {
    if (whole) whole->finish(whole_generation, code);
  }
};

// Held by the handle, by its thread, and by the events that its thread waits for.
class Stream : public Wakeable, public std::enable_shared_from_this<Stream> {
 public:
  Stream(const char* name, int32_t number, std::shared_ptr<Faults> faults);

  int64_t submit(const hic_op* ops, uint32_t count, hic_event* whole, uint64_t generation);
  void speed(int64_t latency_ns, double ns_per_byte);
  void gate_shut(hic_event* reached, uint64_t generation);
  int32_t gate_allow(uint32_t works, hic_event* fresh, uint64_t generation);
  void gate_open();
  int32_t next(int64_t timeout_ns, uint64_t* argument);
  void end(int32_t code);
  void finish();
  bool join(int64_t timeout_ns);
  void drop(int32_t code);
  void break_off(int32_t code);
  void count(hic_stream_counts* out);
  std::string error();
  void wake() override;

 private:
  using Guard = std::unique_lock<std::mutex>;
  enum class External { none, offered, taken, ended };

  void main();
  void pass(uint64_t ops);
  bool pass_event(Guard& guard);
  bool pass_gate(Guard& guard);
  void run(Guard& guard);
  int32_t work(Guard& guard, Op& op);
  int32_t external(Guard& guard, uint64_t argument);
  bool begin_thread();

  const std::string name_;
  const int32_t number_;
  const std::shared_ptr<Faults> faults_;

  std::mutex lock_;
  std::condition_variable changed_;  // for the thread, and for those who wait for it
  std::deque<Op> queue_;
  Op running_;
  bool has_running_ = false;  // false also when the running op was dropped: it has been told of then
  bool busy_ = false;         // the thread is inside an op, dropped or not
  bool calling_ = false;      // and that is a CALL
  uint64_t passed_later_ = 0;
  int32_t first_code_ = 0;    // of the submission that runs
  bool subscribed_ = false;   // to the event that the first op waits for
  bool started_ = false, stopping_ = false, exited_ = false;
  int32_t dropped_ = 0, broken_ = 0;

  int64_t permits_ = -1;  // -1: the gate is open
  EventHold reached_;
  uint64_t reached_generation_ = 0;
  bool reached_told_ = false;

  External external_ = External::none;
  uint64_t external_argument_ = 0;
  int32_t external_code_ = 0;

  int64_t latency_ns_ = 0;
  double ns_per_byte_ = 0;
  int64_t began_ns_ = 0;  // of the work that runs; 0 if none does
  std::string error_;
  uint64_t ops_ = 0, passed_ = 0, submitted_ = 0, finished_ = 0, failed_ = 0, drops_ = 0, moved_bytes_ = 0;
};

}  // namespace hic
