/* A ring of tickets: many threads push, one drains; one eventfd wakes the one that drains, once for many pushes. */
#ifndef HICACHE_CAPI_RING_H
#define HICACHE_CAPI_RING_H

struct hic_ring;

/* What came out of a ring: a ticket as it was pushed, and 0 or the code of its failure. */
struct hic_done {
  uint64_t ticket;
  int32_t code;
  int32_t unused;
};

struct hic_ring_counts {
  uint64_t pushed;
  uint64_t drained;
  uint64_t wakes;   /* writes to the eventfd: far fewer than pushes under load */
  uint64_t refused; /* pushes into a full ring; the caller bounds what is in flight, so there are none */
};

/* `capacity` is rounded up to a power of two.  HIC_SYSTEM where there are no descriptors left. */
HIC_API int32_t hic_ring_new(uint32_t capacity, struct hic_ring **out);
/* Readable while the ring holds something.  Owned by the ring, closed when the last holder lets go of it. */
HIC_API int32_t hic_ring_fd(struct hic_ring *ring);
/* Any thread.  HIC_INVALID if the ring is full: the ticket is lost then. */
HIC_API int32_t hic_ring_push(struct hic_ring *ring, uint64_t ticket, int32_t code);
/* One thread at a time.  Takes up to `room` tickets, in the order in which they were pushed -> how many.  What does not fit
 * stays, and the descriptor stays readable. */
HIC_API int32_t hic_ring_drain(struct hic_ring *ring, struct hic_done *out, uint32_t room);
/* Blocks the draining thread -> 1 if there is something to drain, 0 after `timeout_ns` (< 0: no limit). */
HIC_API int32_t hic_ring_wait(struct hic_ring *ring, int64_t timeout_ns);
/* Make a `hic_ring_wait` return, with nothing to drain.  Any thread. */
HIC_API void hic_ring_poke(struct hic_ring *ring);
HIC_API void hic_ring_count(struct hic_ring *ring, struct hic_ring_counts *out);
/* Let go of it.  Subscriptions of events hold it too, so a late push still finds a ring, and its descriptor no stranger. */
HIC_API void hic_ring_release(struct hic_ring *ring);

#endif
