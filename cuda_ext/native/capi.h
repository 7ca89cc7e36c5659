/* The C ABI of the native library, and all of it: plain structs, fixed-width integers, no C++ and no Python across it.
 *
 * Every call that can fail returns a code, 0 or more for success; hic_last_error() then says why, in words, for the
 * calling thread.  Nothing throws.  Nothing calls Python. */
#ifndef HICACHE_CAPI_H
#define HICACHE_CAPI_H

#include <stdint.h>

#ifdef __cplusplus
#define HIC_API extern "C" __attribute__((visibility("default")))
#else
#define HIC_API
#endif

/* Raised with every change to a struct or a signature below: cuda_ext/native/structs.py states the same number. */
#define HICACHE_ABI_VERSION 2

enum hic_code {
  HIC_OK = 0,
  HIC_INVALID = -1, /* an argument no caller of ours passes */
  HIC_SYSTEM = -2,  /* the operating system refused: hic_last_error() carries errno's text */
  HIC_CLOSED = -3,  /* the stream or ring takes no more */
  HIC_TIMEOUT = -4, /* not yet, within the time given */
};

/* The size of one struct that crosses the ABI, as the compiler laid it out. */
struct hic_size {
  const char *name;
  uint64_t bytes;
};

HIC_API uint32_t hicache_abi(void);
/* All structs below -> the table, of *count rows, static. */
HIC_API const struct hic_size *hic_sizes(uint32_t *count);
/* Why the last call of this thread failed; "" if none has.  Valid until this thread's next failing call. */
HIC_API const char *hic_last_error(void);

#include "capi/ring.h"
#include "capi/events.h"
#include "capi/streams.h"

#include "capi/copy.h"
#include "capi/digest.h"
#include "capi/files.h"
#include "capi/hostmem.h"
#include "capi/slab.h"
#include "capi/slots.h"
#include "capi/driver.h"

#endif
