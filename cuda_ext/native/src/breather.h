// For threads that move bytes for long.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace hic {

// Lets others have the processor once in a while, the event loop above all.  The kernel would: at its next tick, which on servers is
// 4 ms away, and 4 ms more for each thread of ours that has been waiting for longer.
class Breather {
 public:
  Breather() : since_ns_(now_ns()) {}
  // Between two pages: nothing is held by anybody who gives way here.
  void step() {
    if (now_ns() - since_ns_ < kStretchNs) return;
    sched_yield();
    since_ns_ = now_ns();
  }

 private:
  static constexpr int64_t kStretchNs = 250'000;
  static int64_t now_ns() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
  }
  int64_t since_ns_;
};

}  // namespace hic
