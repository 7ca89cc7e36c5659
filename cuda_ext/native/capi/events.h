/* Events: "this has ended".  One event serves many endings, one after the other: each has a generation, and the caller counts
 * them up.  An event whose generation n has ended has ended every generation before n too. */
#ifndef HICACHE_CAPI_EVENTS_H
#define HICACHE_CAPI_EVENTS_H

struct hic_event;

/* `count` events at once; none has ended generation 1 yet. */
HIC_API int32_t hic_event_new(uint32_t count, struct hic_event **out);
/* 1 if the generation has ended, else 0.  Never blocks. */
HIC_API int32_t hic_event_query(struct hic_event *event, uint64_t generation);
/* The code with which the newest generation ended: 0, or why it failed. */
HIC_API int32_t hic_event_code(struct hic_event *event);
/* Blocks -> 1 if the generation has ended, 0 after `timeout_ns` (< 0: no limit). */
HIC_API int32_t hic_event_wait(struct hic_event *event, uint64_t generation, int64_t timeout_ns);
/* End a generation -> 1 if this call did, 0 if it had ended before.  Any thread, a driver's as well: short, never blocks. */
HIC_API int32_t hic_event_finish(struct hic_event *event, uint64_t generation, int32_t code);
/* Have `ticket` pushed into `ring` when the generation ends: now if it has.  The ring must have room for it then. */
HIC_API int32_t hic_event_subscribe(struct hic_event *event, uint64_t generation, struct hic_ring *ring, uint64_t ticket);
/* Let go of it.  Streams that still hold it keep it alive. */
HIC_API void hic_event_release(struct hic_event *event);

#endif
