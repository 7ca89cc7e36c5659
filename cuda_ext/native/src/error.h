// The text behind an error code: one buffer a thread.
#pragma once

#include "capi.h"

namespace hic {

// Keep the text for hic_last_error() and give the code back: `return fail(HIC_INVALID, "...")`.  printf's format.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// HIC_SYSTEM, with the text of errno behind `what`.
int fail_errno(const char* what);

}  // namespace hic
