/* Slots of one file: a batch a call, so that the interpreter is left once.  Any thread may call; several may at once. */
#ifndef HICACHE_CAPI_SLOTS_H
#define HICACHE_CAPI_SLOTS_H

/* Read (`writes` 0) or write whole buffers at their offsets of `fd`, one after the other -> 0, or the errno of the first that
 * failed; then later ones have not been touched.  EIO: the file ends before a buffer is full. */
HIC_API int32_t hic_slots_move(int32_t fd, int32_t writes, uint64_t count, void *const *buffers, const uint64_t *bytes,
                               const uint64_t *offsets);

/* Copy memory to memory, as many runs. */
HIC_API void hic_slots_copy(uint64_t count, void *const *to, const void *const *from, const uint64_t *bytes);

#endif
