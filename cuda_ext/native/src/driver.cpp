// The GPU as a device of streams and marks.
#include "driver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "error.h"

using hic::fail;
using hic::cuda::Entered;
using hic::cuda::Handle;
using hic::cuda::NOT_READY;
using hic::cuda::Result;
using hic::cuda::SUCCESS;

namespace {

constexpr auto WATCH = std::chrono::seconds(1);             // how often a dead context is looked for
constexpr auto SPIN = std::chrono::microseconds(20);        // between asking and asking, after the last end
constexpr auto NAP = std::chrono::microseconds(50);

// Under the mutex.  Gives the event back to the pool with the last holder.
void let_go(hic_cuda* device, hic_cuda_mark* mark) {
  if (mark->holders.fetch_sub(1) != 1) return;
  if (mark->event != nullptr) device->free_events.push_back(mark->event);
  delete mark;
}

// Under the mutex.  The first to tell of an end is believed.
void end(hic_cuda_mark* mark, int code) {
  int open = 1;
  if (!mark->code.compare_exchange_strong(open, code)) return;
  if (mark->polled) --mark->device->polled;
  if (mark->tells) mark->tells->finish(mark->generation, code);
}

// On a thread of the driver: it may take the mutex, for that is never held across a call of the driver, and nothing else.
void end_by_host_function(void* argument) {
  hic_cuda_mark* mark = static_cast<hic_cuda_mark*>(argument);
  hic_cuda* device = mark->device;
  const std::lock_guard<std::mutex> hold(device->mutex);
  end(mark, 0);
  let_go(device, mark);
}

// Ends what has ended, oldest first in each stream -> whether anything has.  `ask`: also by asking the events.
bool sweep(hic_cuda* device, bool ask) {
  std::vector<std::pair<hic_cuda_stream*, hic_cuda_mark*>> heads;
  bool moved = false;
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    for (hic_cuda_stream* stream : device->streams) {
      while (!stream->open.empty() && stream->open.front()->code.load() != 1) {
        let_go(device, stream->open.front());
        stream->open.pop_front();
        moved = true;
      }
      if (ask && !stream->open.empty()) {
        stream->open.front()->holders.fetch_add(1);
        heads.emplace_back(stream, stream->open.front());
      }
    }
  }
  if (heads.empty()) return moved;
  const Entered entered(device);
  for (auto& [stream, mark] : heads) {
    const Result result = entered.code == HIC_OK ? device->api.cuEventQuery(mark->event) : SUCCESS;
    if (entered.code == HIC_OK && result != SUCCESS && result != NOT_READY) {
      hic::cuda::failed(device, "cuEventQuery", result);
      hic::cuda::lose(device, hic_last_error());  // whatever its number: an event that cannot be asked will never be seen to end
    }
    const std::lock_guard<std::mutex> hold(device->mutex);
    if (entered.code == HIC_OK && result == SUCCESS) {
      end(mark, 0);
      moved = true;
    }
    let_go(device, mark);
  }
  return moved;
}

void watch(hic_cuda* device) {
  auto last_end = std::chrono::steady_clock::now();
  const auto open = [device] {
    return std::any_of(device->streams.begin(), device->streams.end(), [](auto* stream) { return !stream->open.empty(); });
  };
  for (;;) {
    bool poll = false;
    {
      std::unique_lock<std::mutex> hold(device->mutex);
      device->work.wait(hold, [&] { return device->stopping || open(); });
      if (device->polled == 0) device->work.wait_for(hold, WATCH, [&] { return device->stopping || device->polled != 0; });
      if (device->stopping) return;
      poll = device->polled != 0;
    }
    bool moved = false;
    while (sweep(device, true)) moved = true;
    const auto now = std::chrono::steady_clock::now();
    if (moved) last_end = now;
    if (poll && now - last_end > SPIN) std::this_thread::sleep_for(NAP);
  }
}

int new_event(hic_cuda* device, Handle* event) {
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    if (!device->free_events.empty()) {
      *event = device->free_events.back();
      device->free_events.pop_back();
      return HIC_OK;
    }
  }
  HIC_TRY(device, cuEventCreate, (event, hic::cuda::EVENT_DISABLE_TIMING));
  return HIC_OK;
}

// Entered.  Mark the end of what the stream has been given; *out holds one reference.
int mark_end(hic_cuda_stream* stream, int32_t notice, hic_event* event, uint64_t generation, hic_cuda_mark** out) {
  hic_cuda* device = stream->device;
  auto mark = std::make_unique<hic_cuda_mark>();
  mark->device = device;
  mark->tells = hic::EventHold(event);
  mark->generation = generation;
  int code = new_event(device, &mark->event);
  if (code != HIC_OK) return code;
  const bool by_host_function = event != nullptr && notice == HIC_NOTICE_HOST_FUNCTION;
  mark->polled = event != nullptr && !by_host_function;
  const auto record = [&]() -> int {
    HIC_TRY(device, cuEventRecord, (mark->event, stream->handle));
    if (by_host_function) HIC_TRY(device, cuStreamWaitEvent, (device->side, mark->event, 0));
    return HIC_OK;
  };
  code = record();
  if (code != HIC_OK) {
    const std::lock_guard<std::mutex> hold(device->mutex);
    device->free_events.push_back(mark->event);
    return code;
  }
  hic_cuda_mark* kept = mark.release();
  kept->holders = by_host_function ? 3 : 2;  // the caller, the stream's list, the host function
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    stream->open.push_back(kept);
    if (kept->polled) ++device->polled;
    if (device->lost.load() != 0) end(kept, HIC_CUDA_LOST);  // lost meanwhile, by another thread
  }
  device->work.notify_all();
  if (by_host_function) {
    // Listed before: where this fails, the watchdog still sees the end.
    const Result result = device->api.cuLaunchHostFunc(device->side, end_by_host_function, kept);
    if (result != SUCCESS) {
      code = hic::cuda::failed(device, "cuLaunchHostFunc", result);
      const std::lock_guard<std::mutex> hold(device->mutex);
      let_go(device, kept);  // the host function's
      if (code == HIC_CUDA_LOST) {
        let_go(device, kept);  // the caller's
        return code;
      }
    }
  }
  *out = kept;
  return HIC_OK;
}

}  // namespace

namespace hic::cuda {

Entered::Entered(hic_cuda* device) : device_(device) {
  if (device->lost.load() != 0) {
    code = fail(HIC_CUDA_LOST, "%s", device->lost_text);
    return;
  }
  const Result result = device->api.cuCtxPushCurrent_v2(device->context);
  if (result != SUCCESS) {
    code = failed(device, "cuCtxPushCurrent", result);
    return;
  }
  // Calls like cuEventQuery would break a capture that another thread of the engine has begun in global mode.
  device->api.cuThreadExchangeStreamCaptureMode(&mode_);
}

Entered::~Entered() {
  if (code != HIC_OK) return;
  device_->api.cuThreadExchangeStreamCaptureMode(&mode_);
  Handle popped = nullptr;
  device_->api.cuCtxPopCurrent_v2(&popped);
}

int failed(hic_cuda* device, const char* call, Result result) {
  const int code = device->api.fail(call, result);
  if (code == HIC_CUDA_LOST) lose(device, hic_last_error());
  return code;
}

void lose(hic_cuda* device, const char* text) {
  const std::lock_guard<std::mutex> hold(device->mutex);
  if (device->lost.load() != 0) return;
  strncpy(device->lost_text, text, sizeof device->lost_text - 1);
  device->lost.store(1);
  for (hic_cuda_stream* stream : device->streams)
    for (hic_cuda_mark* mark : stream->open) end(mark, HIC_CUDA_LOST);
}

}  // namespace hic::cuda

int hic_cuda_open(const char* path, int32_t ordinal, hic_cuda** out) {
  auto device = std::make_unique<hic_cuda>();
  hic_cuda* d = device.get();
  d->ordinal = ordinal;
  const int code = d->api.open(path);
  if (code != HIC_OK) return code;
  HIC_TRY(d, cuDeviceGet, (&d->id, ordinal));
  HIC_TRY(d, cuDevicePrimaryCtxRetain, (&d->context, d->id));
  const auto enter = [d]() -> int {
    const Entered entered(d);
    if (entered.code != HIC_OK) return entered.code;
    HIC_TRY(d, cuCtxGetStreamPriorityRange, (&d->priority_low, &d->priority_high));
    HIC_TRY(d, cuStreamCreateWithPriority, (&d->side, hic::cuda::STREAM_NON_BLOCKING, d->priority_high));
    return HIC_OK;
  };
  const int entered = enter();
  if (entered != HIC_OK) {
    d->api.cuDevicePrimaryCtxRelease_v2(d->id);
    return entered;
  }
  try {
    d->watcher = std::thread(watch, d);
  } catch (const std::exception& error) {
    d->api.cuDevicePrimaryCtxRelease_v2(d->id);
    return fail(HIC_SYSTEM, "no thread for the watchdog: %s", error.what());
  }
  *out = device.release();
  return HIC_OK;
}

int hic_cuda_close(hic_cuda* device) {
  while (sweep(device, device->lost.load() == 0)) {
  }
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    if (!device->streams.empty()) return fail(HIC_TIMEOUT, "%zu streams are open", device->streams.size());
    device->stopping = true;
  }
  device->work.notify_all();
  device->watcher.join();
  if (device->lost.load() != 0) return HIC_OK;  // nothing can be given back to a dead context, and host functions may hold marks
  {
    const Entered entered(device);
    if (entered.code != HIC_OK) return entered.code;
    if (device->module != nullptr) device->api.cuModuleUnload(device->module);
    for (Handle event : device->free_events) device->api.cuEventDestroy_v2(event);
    device->api.cuStreamDestroy_v2(device->side);
  }
  device->api.cuDevicePrimaryCtxRelease_v2(device->id);
  delete device;
  return HIC_OK;
}

int hic_cuda_lost(hic_cuda* device) { return device->lost.load() == 0 ? HIC_OK : fail(HIC_CUDA_LOST, "%s", device->lost_text); }

int hic_cuda_stream_open(hic_cuda* device, int32_t urgent, hic_cuda_stream** out) {
  const Entered entered(device);
  if (entered.code != HIC_OK) return entered.code;
  auto stream = std::make_unique<hic_cuda_stream>();
  stream->device = device;
  const int priority = urgent != 0 ? device->priority_high : device->priority_low;
  HIC_TRY(device, cuStreamCreateWithPriority, (&stream->handle, hic::cuda::STREAM_NON_BLOCKING, priority));
  const std::lock_guard<std::mutex> hold(device->mutex);
  device->streams.push_back(stream.get());
  *out = stream.release();
  return HIC_OK;
}

int hic_cuda_stream_close(hic_cuda_stream* stream) {
  hic_cuda* device = stream->device;
  while (sweep(device, device->lost.load() == 0)) {
  }
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    while (!stream->open.empty() && stream->open.front()->code.load() != 1) {
      let_go(device, stream->open.front());
      stream->open.pop_front();
    }
    if (!stream->open.empty()) return fail(HIC_TIMEOUT, "%zu operations are open", stream->open.size());
    device->streams.erase(std::find(device->streams.begin(), device->streams.end(), stream));
  }
  const Entered entered(device);
  if (entered.code == HIC_OK) {
    if (stream->staging != 0) device->api.cuMemFree_v2(stream->staging);
    device->api.cuStreamDestroy_v2(stream->handle);
  }
  delete stream;
  return HIC_OK;
}

int hic_cuda_submit(hic_cuda_stream* stream, const hic_plan* plans, uint32_t count, const hic_cuda_how* how, hic_event* event,
                    uint64_t generation, hic_cuda_mark** mark) {
  const Entered entered(stream->device);
  int code = entered.code;
  for (uint32_t i = 0; i < count && code == HIC_OK; ++i) code = hic::cuda::copy(stream, plans[i], *how);
  return code == HIC_OK ? mark_end(stream, how->notice, event, generation, mark) : code;
}

int hic_cuda_order(hic_cuda_stream* stream, hic_cuda_mark* mark) {
  return hic_cuda_order_event(stream, reinterpret_cast<uint64_t>(mark->event));
}

int hic_cuda_order_event(hic_cuda_stream* stream, uint64_t event) {
  const Entered entered(stream->device);
  if (entered.code != HIC_OK) return entered.code;
  stream->sources_lie_still = false;
  HIC_TRY(stream->device, cuStreamWaitEvent, (stream->handle, reinterpret_cast<Handle>(event), 0));
  return HIC_OK;
}

int hic_cuda_order_foreign(hic_cuda* device, uint64_t stream, hic_cuda_mark* mark) {
  const Entered entered(device);
  if (entered.code != HIC_OK) return entered.code;
  const Handle handle = reinterpret_cast<Handle>(stream);
  int capturing = 0;
  HIC_TRY(device, cuStreamIsCapturing, (handle, &capturing));
  if (capturing != 0) return fail(HIC_INVALID, "the stream is being captured in a graph");
  if (mark != nullptr) HIC_TRY(device, cuStreamWaitEvent, (handle, mark->event, 0));
  return HIC_OK;
}

int hic_cuda_mark_query(hic_cuda_mark* mark) {
  hic_cuda* device = mark->device;
  const int known = mark->code.load();
  if (known != 1) return known == 0 ? 1 : hic_cuda_lost(device);
  const Entered entered(device);
  if (entered.code != HIC_OK) return entered.code;
  const Result result = device->api.cuEventQuery(mark->event);
  if (result == NOT_READY) return 0;
  return result == SUCCESS ? 1 : hic::cuda::failed(device, "cuEventQuery", result);
}

void hic_cuda_mark_free(hic_cuda_mark* mark) {
  hic_cuda* device = mark->device;
  const std::lock_guard<std::mutex> hold(device->mutex);
  let_go(device, mark);
}
