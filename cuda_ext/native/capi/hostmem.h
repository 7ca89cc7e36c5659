/* Host memory: where it lies, and its first touch. */
#ifndef HICACHE_CAPI_HOSTMEM_H
#define HICACHE_CAPI_HOSTMEM_H

#include "capi.h"

/* Take pages of [address, address + bytes) from one NUMA node alone, from their first touch on.  `address` is a page's. */
HIC_API int32_t hic_bind_memory(void *address, uint64_t bytes, uint32_t node);

/* Threads that touch memory for the first time, so that nobody who fills it waits for the kernel to clear it. */
struct hic_touching;

/* Begin to touch [address, address + bytes) with `threads` threads, from the front.  What stands there stays, and others may
 * write meanwhile.  NULL: hic_last_error() says why.  The memory stays mapped until hic_touch_stop() has returned. */
HIC_API struct hic_touching *hic_touch_start(void *address, uint64_t bytes, uint32_t threads);
/* Bytes touched so far.  Any thread. */
HIC_API uint64_t hic_touch_done(const struct hic_touching *touching);
/* Wait until the first `bytes` bytes have been touched, or the threads have ended: 0, or HIC_SYSTEM with errno's text if the
 * kernel refused before that.  HIC_TIMEOUT after timeout_ms.  Any thread. */
HIC_API int32_t hic_touch_reach(struct hic_touching *touching, uint64_t bytes, uint32_t timeout_ms);
/* Stop touching and free it.  Returns when no thread touches any more: after a few MiB each. */
HIC_API void hic_touch_stop(struct hic_touching *touching);

#endif
