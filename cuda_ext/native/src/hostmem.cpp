// First touch of host memory, and the node that it is taken from.
#include "capi/hostmem.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "error.h"

namespace {

constexpr uint64_t kPiece = UINT64_C(4) << 20;  // between two looks at whether to stop: a millisecond or two
constexpr int kPopulateWrite = 23;              // MADV_POPULATE_WRITE, Linux 5.14; older headers have no name for it
constexpr int kBind = 2;                        // MPOL_BIND of linux/mempolicy.h
constexpr uint32_t kMostNodes = 1024;

// One byte of each page is written with the value that it has, also if somebody else writes it at this moment.
void touch_pages(uint8_t* start, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t at = 0; at < bytes; at += page) __atomic_fetch_or(start + at, 0, __ATOMIC_RELAXED);
}

}  // namespace

struct hic_touching {
  static constexpr uint64_t kNothing = UINT64_MAX;

  uint8_t* const start;
  const uint64_t bytes;
  std::atomic<uint64_t> done{0};
  std::mutex mutex;
  std::condition_variable moved;
  // All below under the mutex.
  bool stop = false;
  int error = 0;
  uint64_t next = 0;
  unsigned running = 0;
  std::vector<uint64_t> at;  // where each thread's piece begins
  std::vector<std::thread> threads;

  hic_touching(void* address, uint64_t n) : start(static_cast<uint8_t*>(address)), bytes(n) {}

  void work(size_t self) {
    for (;;) {
      uint64_t here = 0;
      {
        const std::lock_guard<std::mutex> hold(mutex);
        at[self] = kNothing;
        if (stop || next >= bytes) {
          --running;
          moved.notify_all();
          return;
        }
        here = at[self] = next;
        next += std::min(kPiece, bytes - next);
        moved.notify_all();
      }
      const uint64_t now = std::min(kPiece, bytes - here);
      if (populate(start + here, now)) {
        done += now;
        continue;
      }
      const int refused = errno;
      const std::lock_guard<std::mutex> hold(mutex);
      error = refused;
      stop = true;
      --running;  // and its piece stays where it is: nothing behind it counts as reached
      moved.notify_all();
      return;
    }
  }

  // Under the mutex: all before it has been touched.
  uint64_t reached() const { return std::min(next, *std::min_element(at.begin(), at.end())); }

 private:
  bool populate(uint8_t* from, uint64_t n) {
    if (!madvise(from, n, kPopulateWrite)) return true;
    if (errno != EINVAL && errno != EAGAIN && errno != EINTR) return false;
    touch_pages(from, n);  // an older kernel
    return true;
  }
};

int32_t hic_bind_memory(void* address, uint64_t bytes, uint32_t node) {
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  if (node >= kMostNodes) return hic::fail(HIC_INVALID, "there is no NUMA node %u", node);
#ifdef SYS_mbind
  unsigned long nodes[kMostNodes / kBits] = {};
  nodes[node / kBits] = 1UL << (node % kBits);
  if (!syscall(SYS_mbind, address, bytes, kBind, nodes, static_cast<unsigned long>(kMostNodes), 0U)) return HIC_OK;
#else
  (void)address, (void)bytes;
  errno = ENOSYS;
#endif
  return hic::fail_errno("mbind");
}

hic_touching* hic_touch_start(void* address, uint64_t bytes, uint32_t threads) {
  auto* touching = new (std::nothrow) hic_touching(address, bytes);
  if (!touching) {
    hic::fail(HIC_SYSTEM, "no memory for %u threads", threads);
    return nullptr;
  }
  try {
    touching->threads.reserve(threads);
    touching->at.assign(std::max(threads, 1U), hic_touching::kNothing);
    for (uint32_t i = 0; i < threads; ++i) {
      {
        const std::lock_guard<std::mutex> hold(touching->mutex);
        ++touching->running;
      }
      touching->threads.emplace_back([touching, i] { touching->work(i); });
    }
  } catch (const std::exception& error) {  // fewer threads than asked for will do, none will not
    const std::lock_guard<std::mutex> hold(touching->mutex);
    --touching->running;
    if (touching->threads.empty()) hic::fail(HIC_SYSTEM, "no thread: %s", error.what());
  }
  if (touching->threads.empty() && threads) {
    delete touching;
    return nullptr;
  }
  return touching;
}

uint64_t hic_touch_done(const hic_touching* touching) { return touching->done; }

int32_t hic_touch_reach(hic_touching* touching, uint64_t bytes, uint32_t timeout_ms) {
  std::unique_lock<std::mutex> hold(touching->mutex);
  const uint64_t end = std::min(bytes, touching->bytes);
  const auto over = [touching, end] { return touching->running == 0 || touching->reached() >= end; };
  if (!touching->moved.wait_for(hold, std::chrono::milliseconds(timeout_ms), over))
    return hic::fail(HIC_TIMEOUT, "%llu of %llu bytes are touched", static_cast<unsigned long long>(touching->done),
                     static_cast<unsigned long long>(touching->bytes));
  if (touching->reached() >= end || !touching->error) return HIC_OK;
  errno = touching->error;
  return hic::fail_errno("first touch");
}

void hic_touch_stop(hic_touching* touching) {
  {
    const std::lock_guard<std::mutex> hold(touching->mutex);
    touching->stop = true;
  }
  for (std::thread& thread : touching->threads) thread.join();
  delete touching;
}
