/* Copies on the CPU: plans run by memcpy, run lists, and the kernel's body on a simulated grid. */
#ifndef HICACHE_CAPI_COPY_H
#define HICACHE_CAPI_COPY_H

#include "../include/plan.h"

/* How a plan is executed: on a GPU by driver.h, on the CPU by hic_copy_by. */
enum hic_engine {
  HIC_ENGINE_KERNEL = 1, /* every run, in the plan's order; on a GPU, its SMs read or write host memory themselves */
  HIC_ENGINE_DIRECT = 2, /* merged runs, in the order of the host's addresses; on a GPU, by its copy engines */
  HIC_ENGINE_STAGED = 3, /* write-backs: pages are put together in a buffer on the device, and leave it one piece each */
};

/* One copy of contiguous bytes. */
struct hic_run {
  uint64_t source, target, bytes;
};

/* What a simulated grid has stored: one count for each unit of [base, base + units * unit_bytes). */
struct hic_stores {
  uint64_t base, units;
  uint64_t counts;      /* address of uint8_t[units]; saturates */
  uint64_t total;       /* stores, all lanes */
  uint64_t outside;     /* stores that hit no counted unit; they are counted, not made */
  uint64_t misaligned;  /* loads and stores at an address that no GPU takes; not made */
};

/* Whether the plan can be run at all: tables, extents, page ids below the limits, alignment of every address.  Costs
 * O(pages + pieces); whoever made the plan need not ask. */
HIC_API int hic_plan_check(const struct hic_plan *plan);

/* Move the bytes on this thread and threads - 1 more, each with a contiguous share of the runs.  0 threads is invalid. */
HIC_API int hic_copy_run(const struct hic_plan *plan, uint32_t threads);

/* The plan as single copies, neighbours on both sides joined (across pages, too), in order of the target's address if
 * by_target, else of the source's.  Writes at most `capacity` runs -> how many there are.  Call it with capacity 0 first,
 * or with plan->runs, which is always enough. */
HIC_API int64_t hic_copy_list(const struct hic_plan *plan, int by_target, struct hic_run *runs, uint64_t capacity);

/* What an engine does on a GPU, done on this thread and threads - 1 more: the same bytes in the same order.  `to_host`: the
 * target is host memory.  HIC_INVALID for a pair of engine and plan that does not work. */
HIC_API int hic_copy_by(const struct hic_plan *plan, int engine, int to_host, uint32_t threads);

/* memcpy for each run of a list, in order, cut evenly among threads. */
HIC_API int hic_copy_runs(const struct hic_run *runs, uint64_t count, uint32_t threads);

/* The kernel's own body for every thread of a grid of `blocks` x `block_threads`, `lanes` of them a worker, as the GPU would
 * run it but one thread after the other.  `stores` may be null; it counts what is stored where. */
HIC_API int hic_copy_grid(const struct hic_plan *plan, uint32_t blocks, uint32_t block_threads, uint32_t lanes,
                          struct hic_stores *stores);

#endif
