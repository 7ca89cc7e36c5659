// TEST ONLY: a libcuda that runs on the CPU.  Streams are threads, "device memory" is whatever tests declare to be, kernels are
// the copy kernel's own body.  It is as unkind as CUDA may be: a source that may be read in any order is read at once, a call
// without a context fails, an address that no GPU could reach kills the context.  It knows what we believe of CUDA, no more.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "include/copy.h"

#define CU extern "C" __attribute__((visibility("default")))
typedef int Result;
typedef unsigned long long Address;

namespace {

struct Event {
  uint64_t recorded = 0, ended = 0;
};
struct Stream {
  std::deque<std::function<void()>> work;
  bool closing = false, capturing = false, gated = false;
  int priority = 0;
  std::thread thread;
};

// Never destroyed: threads of devices that were lost still wait here when the process ends.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
auto& faults = *new std::map<std::string, std::pair<int, int>>;  // call -> (calls until it fails, result)
auto& calls = *new std::map<std::string, int64_t>;
auto& live = *new std::map<std::string, int64_t>;
auto& ranges = *new std::map<uint64_t, uint64_t>;  // begin -> end of all that a GPU could reach
auto& functions = *new std::map<void*, const char*>;
auto& streams = *new std::vector<Stream*>;
int version = 13000, dead = 0, shift = 0;
bool hold_host_functions = false, captured_elsewhere = false;
thread_local std::vector<void*> contexts;
thread_local int capture_mode = 0;  // global
int context_object, module_object;

// Counts the call -> the result it is to fail with.
Result begin(const char* name, bool needs_context = true) {
  ++calls[name];
  const auto fault = faults.find(name);
  if (fault != faults.end() && --fault->second.first == 0) {
    const int result = fault->second.second;
    faults.erase(fault);
    return result;
  }
  if (dead != 0) return dead;
  return needs_context && contexts.empty() ? 201 : 0;
}
#define BEGIN(...)                                  \
  std::unique_lock<std::mutex> hold(lock);          \
  if (const Result result = begin(__VA_ARGS__)) return result

bool unsafe_now() { return captured_elsewhere && capture_mode != 2; }

void run(Stream* stream) {
  std::unique_lock<std::mutex> hold(lock);
  for (;;) {
    changed.wait(hold, [&] { return stream->closing || (!stream->work.empty() && !stream->gated && dead == 0); });
    if (stream->work.empty() || dead != 0) return;
    const std::function<void()> next = std::move(stream->work.front());
    stream->work.pop_front();
    hold.unlock();
    next();
    hold.lock();
    changed.notify_all();
  }
}

void put(Stream* stream, std::function<void()> work) {
  stream->work.push_back(std::move(work));
  changed.notify_all();
}

// Whether one range holds all of it: no copy crosses the border of two registrations.
bool reachable(uint64_t begin, uint64_t bytes) {
  for (auto range = ranges.begin(); range != ranges.end() && range->first <= begin; ++range)
    if (begin + bytes <= range->second) return true;
  return false;
}

void kill(int result) {
  dead = result;
  for (Stream* stream : streams) stream->work.clear();
  changed.notify_all();
}

Result enqueue_copy(Stream* stream, Address target, Address source, size_t bytes, bool any_order) {
  if (!reachable(target, bytes) || !reachable(source, bytes)) return 1;
  void* to = reinterpret_cast<void*>(target);
  if (any_order) {
    std::vector<char> early(reinterpret_cast<const char*>(source), reinterpret_cast<const char*>(source) + bytes);
    put(stream, [to, early = std::move(early)] { memcpy(to, early.data(), early.size()); });
  } else {
    put(stream, [=] { memcpy(to, reinterpret_cast<const void*>(source), bytes); });
  }
  return 0;
}

struct Attributes {
  int order, hints[4];
  unsigned flags;
};

Result batch(Address* targets, Address* sources, size_t* sizes, size_t count, Attributes* attributes, size_t* firsts,
             size_t number, Stream* stream) {
  if (count == 0 || number != 1 || firsts[0] != 0 || stream == nullptr) return 1;
  if (attributes->order != 1 && attributes->order != 3) return 1;
  for (size_t i = 0; i < count; ++i) {
    const Result result = enqueue_copy(stream, targets[i], sources[i], sizes[i], attributes->order == 3);
    if (result != 0) return result;
  }
  return 0;
}

Result batch_12080(Address* targets, Address* sources, size_t* sizes, size_t count, Attributes* attributes, size_t* firsts,
                   size_t number, size_t* failed_at, Stream* stream) {
  BEGIN("cuMemcpyBatchAsync");
  *failed_at = SIZE_MAX;
  return batch(targets, sources, sizes, count, attributes, firsts, number, stream);
}
Result batch_13000(Address* targets, Address* sources, size_t* sizes, size_t count, Attributes* attributes, size_t* firsts,
                   size_t number, Stream* stream) {
  BEGIN("cuMemcpyBatchAsync");
  return batch(targets, sources, sizes, count, attributes, firsts, number, stream);
}

// The kernel on its grid; an address that is neither on the device nor registered kills the context.
template <int PAGES>
void launch(const hic_inline_plan<PAGES>& inlined, uint32_t blocks, uint32_t block_threads, uint32_t lanes) {
  const hic_tables tables = hic_tables_of(inlined);
  {
    const std::lock_guard<std::mutex> hold(lock);
    for (uint32_t run = 0; run < inlined.plan.runs; ++run) {
      const hic_piece at = hic_locate(inlined.plan, tables, run);
      const bool aligned = (at.source | at.target) % inlined.plan.unit_bytes == 0;
      const uint64_t bytes = inlined.plan.run_bytes;
      if (!aligned) return kill(716);
      if (!reachable(at.source, bytes) || !reachable(at.target, bytes)) return kill(700);
    }
  }
  for (uint32_t block = 0; block < blocks; ++block)
    for (uint32_t thread = 0; thread < block_threads; ++thread)
      hic_thread(inlined.plan, tables, hic_memory(), block, blocks, thread, block_threads, lanes);
}

}  // namespace

// -- what tests do to it --------------------------------------------------------------------------------------------------------

// Forget everything but what runs; `driver_version` as cuDriverGetVersion tells it.
CU void stub_reset(int driver_version) {
  const std::lock_guard<std::mutex> hold(lock);
  faults.clear(), calls.clear(), live.clear(), ranges.clear();
  version = driver_version, dead = 0, shift = 0, hold_host_functions = false, captured_elsewhere = false;
}
// The nth call of that name from now on fails.
CU void stub_fail(const char* name, int nth, int result) {
  const std::lock_guard<std::mutex> hold(lock);
  faults[name] = {nth, result};
}
// The context dies: all calls fail, nothing runs any more, host functions least of all.
CU void stub_kill(int result) {
  const std::lock_guard<std::mutex> hold(lock);
  kill(result);
}
CU int64_t stub_calls(const char* name) {
  const std::lock_guard<std::mutex> hold(lock);
  return calls[name];
}
// Objects that were made and not given back: stream, event, module, memory, registration, context.
CU int64_t stub_live(const char* kind) {
  const std::lock_guard<std::mutex> hold(lock);
  return live[kind];
}
CU void stub_device_memory(uint64_t address, uint64_t bytes) {
  const std::lock_guard<std::mutex> hold(lock);
  ranges[address] = address + bytes;
}
// All memory is the device's, for tests that look at other things.
CU void stub_everywhere() {
  const std::lock_guard<std::mutex> hold(lock);
  ranges[0] = UINT64_MAX;
}
// Host memory has addresses of its own on the device, as on some systems.
CU void stub_shift(int on) {
  const std::lock_guard<std::mutex> hold(lock);
  shift = on;
}
CU void stub_gate(Stream* stream, int shut) {
  const std::lock_guard<std::mutex> hold(lock);
  stream->gated = shut != 0;
  changed.notify_all();
}
CU void stub_lose_host_functions(int on) {
  const std::lock_guard<std::mutex> hold(lock);
  hold_host_functions = on != 0;
}
CU void stub_capture(Stream* stream, int on) {
  const std::lock_guard<std::mutex> hold(lock);
  stream->capturing = on != 0;
}
// Some thread of the engine captures in global mode: calls that capture forbids fail on threads that keep to its rules.
CU void stub_capture_elsewhere(int on) {
  const std::lock_guard<std::mutex> hold(lock);
  captured_elsewhere = on != 0;
}
CU int stub_priority(Stream* stream) { return stream->priority; }
CU int stub_contexts() { return static_cast<int>(contexts.size()); }
// An engine's kernel: fills memory in stream order.
CU void stub_fill(Stream* stream, uint64_t address, int value, uint64_t bytes) {
  const std::lock_guard<std::mutex> hold(lock);
  put(stream, [=] { memset(reinterpret_cast<void*>(address), value, bytes); });
}
// An engine's kernel that reads: copies in stream order.
CU void stub_copy(Stream* stream, uint64_t target, uint64_t source, uint64_t bytes) {
  const std::lock_guard<std::mutex> hold(lock);
  put(stream, [=] { memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); });
}
// Blocks until the stream is idle.
CU void stub_synchronize(Stream* stream) {
  bool over = false;
  std::unique_lock<std::mutex> hold(lock);
  put(stream, [&] {
    const std::lock_guard<std::mutex> inside(lock);
    over = true;
    changed.notify_all();
  });
  changed.wait(hold, [&] { return over; });
}

// -- the driver -----------------------------------------------------------------------------------------------------------------

CU Result cuInit(unsigned) {
  BEGIN("cuInit", false);
  return 0;
}
CU Result cuDriverGetVersion(int* out) {
  BEGIN("cuDriverGetVersion", false);
  *out = version;
  return 0;
}
CU Result cuDeviceGet(int* device, int ordinal) {
  BEGIN("cuDeviceGet", false);
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
CU Result cuDeviceGetName(char* name, int room, int) {
  BEGIN("cuDeviceGetName", false);
  strncpy(name, "CPU posing as a GPU", static_cast<size_t>(room));
  return 0;
}
CU Result cuDeviceGetPCIBusId(char* name, int room, int) {
  BEGIN("cuDeviceGetPCIBusId", false);
  strncpy(name, "0000:00:00.0", static_cast<size_t>(room));
  return 0;
}
CU Result cuDeviceGetAttribute(int* value, int attribute, int) {
  BEGIN("cuDeviceGetAttribute", false);
  *value = attribute == 16 ? 1 : attribute == 75 ? 9 : 0;
  return 0;
}
CU Result cuDevicePrimaryCtxRetain(void** context, int) {
  BEGIN("cuDevicePrimaryCtxRetain", false);
  *context = &context_object;
  ++live["context"];
  return 0;
}
CU Result cuDevicePrimaryCtxRelease_v2(int) {
  BEGIN("cuDevicePrimaryCtxRelease", false);
  --live["context"];
  return 0;
}
CU Result cuCtxPushCurrent_v2(void* context) {
  BEGIN("cuCtxPushCurrent", false);
  contexts.push_back(context);
  return 0;
}
CU Result cuCtxPopCurrent_v2(void** context) {
  const std::lock_guard<std::mutex> hold(lock);
  if (contexts.empty()) return 201;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
CU Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return 0;
}
CU Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
CU Result cuStreamCreateWithPriority(Stream** out, unsigned flags, int priority) {
  BEGIN("cuStreamCreate");
  if (flags != 1) return 1;  // a stream that waits for the default stream
  Stream* stream = new Stream;
  stream->priority = priority;
  stream->thread = std::thread(run, stream);
  streams.push_back(stream);
  *out = stream;
  ++live["stream"];
  return 0;
}
CU Result cuStreamDestroy_v2(Stream* stream) {
  {
    BEGIN("cuStreamDestroy");
    stream->closing = true;
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    --live["stream"];
    changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return 0;
}
CU Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  BEGIN("cuStreamWaitEvent");
  const uint64_t wanted = event->recorded;
  put(stream, [event, wanted] {
    std::unique_lock<std::mutex> inside(lock);
    changed.wait(inside, [&] { return event->ended >= wanted || dead != 0; });
  });
  return 0;
}
CU Result cuStreamIsCapturing(Stream* stream, int* status) {
  BEGIN("cuStreamIsCapturing");
  *status = stream->capturing ? 1 : 0;
  return 0;
}
CU Result cuEventCreate(Event** out, unsigned) {
  BEGIN("cuEventCreate");
  *out = new Event;
  ++live["event"];
  return 0;
}
CU Result cuEventDestroy_v2(Event* event) {
  BEGIN("cuEventDestroy");
  delete event;
  --live["event"];
  return 0;
}
CU Result cuEventRecord(Event* event, Stream* stream) {
  BEGIN("cuEventRecord");
  const uint64_t number = ++event->recorded;
  put(stream, [event, number] {
    const std::lock_guard<std::mutex> inside(lock);
    event->ended = number;
    changed.notify_all();
  });
  return 0;
}
CU Result cuEventQuery(Event* event) {
  BEGIN("cuEventQuery");
  if (unsafe_now()) return 906;
  return event->ended == event->recorded ? 0 : 600;
}
CU Result cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* argument) {
  BEGIN("cuLaunchHostFunc");
  put(stream, [function, argument] {
    {
      const std::lock_guard<std::mutex> inside(lock);
      if (dead != 0 || hold_host_functions) return;
    }
    function(argument);
  });
  return 0;
}
CU Result cuMemcpyAsync(Address target, Address source, size_t bytes, Stream* stream) {
  BEGIN("cuMemcpyAsync");
  return enqueue_copy(stream, target, source, bytes, false);
}
CU Result cuMemAlloc_v2(Address* out, size_t bytes) {
  BEGIN("cuMemAlloc");
  if (unsafe_now()) return 906;
  *out = reinterpret_cast<Address>(aligned_alloc(256, (bytes + 255) / 256 * 256));
  ranges[*out] = *out + bytes;
  ++live["memory"];
  return 0;
}
CU Result cuMemFree_v2(Address address) {
  BEGIN("cuMemFree");
  ranges.erase(address);
  free(reinterpret_cast<void*>(address));
  --live["memory"];
  return 0;
}
CU Result cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  BEGIN("cuMemHostRegister");
  if (flags != 3) return 1;
  const uint64_t begin = reinterpret_cast<uint64_t>(address);
  if (ranges.count(0) == 0)
    for (const auto& [other, end] : ranges)
      if (begin < end && other < begin + bytes) return 712;
  ranges[begin] = begin + bytes;
  ++live["registration"];
  return 0;
}
CU Result cuMemHostUnregister(void* address) {
  BEGIN("cuMemHostUnregister");
  if (ranges.erase(reinterpret_cast<uint64_t>(address)) == 0) return 713;
  --live["registration"];
  return 0;
}
CU Result cuMemHostGetDevicePointer_v2(Address* out, void* address, unsigned) {
  BEGIN("cuMemHostGetDevicePointer");
  *out = reinterpret_cast<Address>(address) + static_cast<Address>(shift);
  return 0;
}
CU Result cuModuleLoadData(void** module, const void* image) {
  BEGIN("cuModuleLoadData");
  if (image == nullptr) return 200;
  *module = &module_object;
  ++live["module"];
  return 0;
}
CU Result cuModuleUnload(void*) {
  BEGIN("cuModuleUnload");
  --live["module"];
  return 0;
}
CU Result cuModuleGetFunction(void** function, void*, const char* name) {
  BEGIN("cuModuleGetFunction");
  static int few, many;
  if (strcmp(name, "hic_copy_few") != 0 && strcmp(name, "hic_copy_many") != 0) return 500;
  *function = strcmp(name, "hic_copy_few") == 0 ? &few : &many;
  functions[*function] = *function == &few ? "few" : "many";
  return 0;
}
CU Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                         unsigned shared, Stream* stream, void** arguments, void** extra) {
  BEGIN("cuLaunchKernel");
  if (gx == 0 || gy != 1 || gz != 1 || bx == 0 || bx > 1024 || by != 1 || bz != 1 || shared != 0 || extra != nullptr) return 1;
  const uint32_t lanes = *static_cast<const uint32_t*>(arguments[1]);
  if (strcmp(functions[function], "few") == 0) {
    const auto plan = *static_cast<const hic_inline_plan<HIC_FEW_PAGES>*>(arguments[0]);
    put(stream, [=] { launch(plan, gx, bx, lanes); });
  } else {
    const auto plan = *static_cast<const hic_inline_plan<HIC_MANY_PAGES>*>(arguments[0]);
    put(stream, [=] { launch(plan, gx, bx, lanes); });
  }
  return 0;
}
CU Result cuGetErrorName(Result result, const char** name) {
  static const std::map<int, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {101, "CUDA_ERROR_INVALID_DEVICE"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}};
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? 1 : 0;
}
CU Result cuGetErrorString(Result result, const char** text) {
  *text = result == 700 ? "an illegal memory access was encountered" : nullptr;
  return *text == nullptr ? 1 : 0;
}
CU Result cuGetProcAddress_v2(const char* name, void** out, int asked, uint64_t, int* status) {
  BEGIN("cuGetProcAddress", false);
  *out = nullptr;
  *status = 1;  // not found
  if (strcmp(name, "cuMemcpyBatchAsync") != 0 || version < 12080 || asked < 12080) return 0;
  *status = 0;
  *out = version >= 13000 && asked >= 13000 ? reinterpret_cast<void*>(batch_13000) : reinterpret_cast<void*>(batch_12080);
  return 0;
}
