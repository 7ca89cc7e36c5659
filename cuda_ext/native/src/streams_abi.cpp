// The C ABI of streams: handles around hic::Stream, and the host functions that come with them.
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "capi.h"
#include "error.h"
#include "stream.h"

struct hic_stream {
  std::shared_ptr<hic::Stream> stream;
};

struct hic_faults {
  std::shared_ptr<hic::Faults> faults;
};

hic_faults* hic_faults_new() { return new (std::nothrow) hic_faults{std::make_shared<hic::Faults>()}; }

void hic_faults_add(hic_faults* faults, int32_t code, uint32_t works, uint32_t after, int32_t stream) {
  faults->faults->add(code, works, after, stream);
}

void hic_faults_release(hic_faults* faults) { delete faults; }

int32_t hic_stream_new(const char* name, int32_t number, hic_faults* faults, hic_stream** out) {
  *out = new (std::nothrow) hic_stream{std::make_shared<hic::Stream>(name, number, faults->faults)};
  return *out ? HIC_OK : hic::fail(HIC_SYSTEM, "no memory for a stream");
}

int64_t hic_stream_submit(hic_stream* stream, const hic_op* ops, uint32_t count, hic_event* whole,
                          uint64_t generation) {
  return stream->stream->submit(ops, count, whole, generation);
}

void hic_stream_speed(hic_stream* stream, int64_t latency_ns, double ns_per_byte) {
  stream->stream->speed(latency_ns, ns_per_byte);
}

void hic_stream_gate_shut(hic_stream* stream, hic_event* reached, uint64_t generation) {
  stream->stream->gate_shut(reached, generation);
}

int32_t hic_stream_gate_allow(hic_stream* stream, uint32_t works, hic_event* fresh, uint64_t generation) {
  return stream->stream->gate_allow(works, fresh, generation);
}

void hic_stream_gate_open(hic_stream* stream) { stream->stream->gate_open(); }

int32_t hic_stream_next(hic_stream* stream, int64_t timeout_ns, uint64_t* argument) {
  const auto held = stream->stream;  // the handle may be released while somebody waits
  return held->next(timeout_ns, argument);
}

void hic_stream_end(hic_stream* stream, int32_t code) { stream->stream->end(code); }

void hic_stream_finish(hic_stream* stream) { stream->stream->finish(); }

int32_t hic_stream_join(hic_stream* stream, int64_t timeout_ns) {
  return stream->stream->join(timeout_ns) ? static_cast<int32_t>(HIC_OK)
                                          : hic::fail(HIC_TIMEOUT, "the stream's thread still runs");
}

void hic_stream_drop(hic_stream* stream, int32_t code) { stream->stream->drop(code); }

void hic_stream_break(hic_stream* stream, int32_t code) { stream->stream->break_off(code); }

void hic_stream_count(hic_stream* stream, hic_stream_counts* out) { stream->stream->count(out); }

void hic_stream_error(hic_stream* stream, char* out, uint32_t room) {
  const std::string text = stream->stream->error();
  strncpy(out, text.c_str(), room - 1);
  out[room - 1] = 0;
}

void hic_stream_release(hic_stream* stream) {
  stream->stream->finish();
  stream->stream->drop(HIC_CLOSED);
  delete stream;
}

int32_t hic_call_nap(void* argument) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(reinterpret_cast<uint64_t>(argument)));
  return HIC_OK;
}

int32_t hic_call_copies(void* argument) {
  const auto* copies = static_cast<const hic_copies*>(argument);
  const auto* plans = reinterpret_cast<const hic_plan*>(copies->plans);
  for (uint32_t i = 0; i < copies->count; ++i)
    if (const int code = hic_copy_by(&plans[i], copies->engine, copies->to_host, copies->threads); code < 0) return code;
  return HIC_OK;
}

int32_t hic_call_stamp(void* argument) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<int64_t*>(argument) = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  return HIC_OK;
}
