// What the parts of the CUDA glue share: device, streams, marks, and how they are entered.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "capi.h"
#include "cuda_api.h"
#include "events.h"

struct hic_cuda_mark {
  hic_cuda* device = nullptr;
  hic::cuda::Handle event = nullptr;
  hic::EventHold tells;          // or none
  uint64_t generation = 0;
  bool polled = false;
  std::atomic<int> code{1};      // 1: open; then 0 or HIC_CUDA_LOST, once and for all
  std::atomic<int> holders{0};   // the caller, the stream's list, a host function that is to come
};

struct hic_cuda_stream {
  hic_cuda* device = nullptr;
  hic::cuda::Handle handle = nullptr;
  hic::cuda::Address staging = 0;  // a buffer of staging_bytes on the GPU; only this stream's work touches it
  uint64_t staging_bytes = 0;
  bool sources_lie_still = true;  // until it writes the host, or waits for what may: one thread at a time asks and says so
  std::deque<hic_cuda_mark*> open;  // under the device's mutex, oldest first
};

struct hic_cuda {
  hic::cuda::Api api;
  hic::cuda::Device id = 0;
  hic::cuda::Handle context = nullptr, side = nullptr, module = nullptr, few = nullptr, many = nullptr;
  bool retained = false;
  int32_t ordinal = 0, priority_low = 0, priority_high = 0;
  std::atomic<int> batch_works{1};
  std::atomic<int> address_same{1};
  std::atomic<uint64_t> batch_calls{0}, single_calls{0}, launches{0}, registered_bytes{0};
  std::atomic<int> lost{0};
  char lost_text[512] = "";  // written before `lost`

  // Never held across a call of the driver: host functions take it.
  std::mutex mutex;
  std::condition_variable work;              // for the thread
  std::vector<hic_cuda_stream*> streams;
  std::vector<hic::cuda::Handle> free_events;
  std::map<uint64_t, uint64_t> registered;   // begin -> end
  uint32_t polled = 0;                       // open marks that nothing but asking tells of
  bool stopping = false;
  std::thread watcher;                       // asks marks, and looks after those that it need not ask
};

namespace hic::cuda {

// In the device's context and free of capture rules, until the end of the scope.  The context is pushed, not set: torch takes
// the current context for the device that its thread works on.
class Entered {
 public:
  explicit Entered(hic_cuda* device);
  ~Entered();
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  int code = HIC_OK;  // look at it first

 private:
  hic_cuda* device_;
  int mode_ = CAPTURE_RELAXED;
};

// The failing call's text and code; a fatal one loses the device.
int failed(hic_cuda* device, const char* call, Result result);
void lose(hic_cuda* device, const char* text);

// The call, or out of the function with its failure.
#define HIC_TRY(device, call, arguments)                                             \
  do {                                                                           \
    const Result try_result = (device)->api.call arguments;                      \
    if (try_result != SUCCESS) return hic::cuda::failed(device, #call, try_result); \
  } while (0)

// driver_copy.cpp: submit the copy, without a mark.
int copy(hic_cuda_stream* stream, const hic_plan& plan, const hic_cuda_how& how);

}  // namespace hic::cuda
