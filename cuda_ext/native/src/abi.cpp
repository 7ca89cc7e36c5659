// What the loader asks first: the version of the ABI and the size of each struct in it.
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "capi.h"
#include "error.h"

namespace {

thread_local char last_error[512];

#define HIC_SIZE(type) {#type, sizeof(struct type)}
const hic_size sizes[] = {
    HIC_SIZE(hic_size),   HIC_SIZE(hic_done),          HIC_SIZE(hic_ring_counts),
    HIC_SIZE(hic_op),     HIC_SIZE(hic_copies),        HIC_SIZE(hic_stream_counts),
    HIC_SIZE(hic_names),
    HIC_SIZE(hic_identity),
    HIC_SIZE(hic_places),
    HIC_SIZE(hic_reads),
    HIC_SIZE(hic_lookups),
    HIC_SIZE(hic_writes),
    HIC_SIZE(hic_slot_batch),
    HIC_SIZE(hic_level),
    HIC_SIZE(hic_piece),
    HIC_SIZE(hic_plan),
    HIC_SIZE(hic_run),
    HIC_SIZE(hic_stores),
    HIC_SIZE(hic_cuda_facts),
    HIC_SIZE(hic_cuda_how),
};

}  // namespace

namespace hic {

int fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return code;
}

int fail_errno(const char* what) {
  char text[128];
  // GNU's strerror_r: the text may lie outside the buffer.
  return fail(HIC_SYSTEM, "%s: %s", what, strerror_r(errno, text, sizeof text));
}

}  // namespace hic

uint32_t hicache_abi() { return HICACHE_ABI_VERSION; }

const hic_size* hic_sizes(uint32_t* count) {
  *count = sizeof sizes / sizeof sizes[0];
  return sizes;
}

const char* hic_last_error() { return last_error; }
