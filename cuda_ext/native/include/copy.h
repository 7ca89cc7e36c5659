/* The body of the copy kernel, once: nvcc and NVRTC make the kernels at the end of it, g++ the twin that runs on the CPU.
 *
 * A worker is a group of `lanes` threads that copies whole runs, run after run; hic_lane is all that one thread does. */
#ifndef HICACHE_COPY_H
#define HICACHE_COPY_H

#include "plan.h"

struct alignas(16) hic_vector {
  uint32_t x, y, z, w;
};

/* How a thread reads and writes.  The data is used once: it shall not push anything out of L1. */
struct hic_memory {
  template <typename Unit>
  HIC_BOTH Unit load(const Unit *from) const {
    return *from;
  }
  template <typename Unit>
  HIC_BOTH void store(Unit *to, Unit value) const {
    *to = value;
  }
#if defined(__CUDA_ARCH__)
  __device__ __forceinline__ hic_vector load(const hic_vector *from) const {
    hic_vector v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
  }
  __device__ __forceinline__ void store(hic_vector *to, hic_vector v) const {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
#endif
};

/* Long runs are cut, or a few of them would keep few workers busy. */
#define HIC_CHUNK_BYTES 16384

HIC_BOTH uint32_t hic_chunks_a_run(const hic_plan &plan) {
  return (plan.run_bytes + HIC_CHUNK_BYTES - 1) / HIC_CHUNK_BYTES;
}

/* The chunks of this worker, this lane's share of each.  Loads of HIC_UNROLL units are in flight before the first store. */
#define HIC_UNROLL 4
template <typename Unit, typename Memory>
HIC_BOTH void hic_lane_of(const hic_plan &plan, const hic_tables &tables, const Memory &memory, uint32_t worker,
                          uint32_t workers, uint32_t lane, uint32_t lanes) {
  const uint32_t chunks_a_run = hic_chunks_a_run(plan);
  const uint32_t chunks = plan.runs * chunks_a_run; /* below 2^31, so that the next line cannot overflow */
  for (uint32_t chunk = worker; chunk < chunks; chunk += workers) {
    const uint32_t run = chunk / chunks_a_run, skip = chunk % chunks_a_run * HIC_CHUNK_BYTES;
    const uint32_t left = plan.run_bytes - skip;
    const uint32_t units = (left < HIC_CHUNK_BYTES ? left : HIC_CHUNK_BYTES) / static_cast<uint32_t>(sizeof(Unit));
    const hic_piece at = hic_locate(plan, tables, run);
    const Unit *source = reinterpret_cast<const Unit *>(at.source + skip);
    Unit *target = reinterpret_cast<Unit *>(at.target + skip);
    uint32_t unit = lane;
    for (; unit + (HIC_UNROLL - 1) * lanes < units; unit += HIC_UNROLL * lanes) {
      Unit held[HIC_UNROLL];
      HIC_UNROLLED
      for (int i = 0; i < HIC_UNROLL; ++i) held[i] = memory.load(source + unit + i * lanes);
      HIC_UNROLLED
      for (int i = 0; i < HIC_UNROLL; ++i) memory.store(target + unit + i * lanes, held[i]);
    }
    for (; unit < units; unit += lanes) memory.store(target + unit, memory.load(source + unit));
  }
}

template <typename Memory>
HIC_BOTH void hic_lane(const hic_plan &plan, const hic_tables &tables, const Memory &memory, uint32_t worker,
                       uint32_t workers, uint32_t lane, uint32_t lanes) {
  switch (plan.unit_bytes) {
    case 16: return hic_lane_of<hic_vector>(plan, tables, memory, worker, workers, lane, lanes);
    case 8: return hic_lane_of<uint64_t>(plan, tables, memory, worker, workers, lane, lanes);
    case 4: return hic_lane_of<uint32_t>(plan, tables, memory, worker, workers, lane, lanes);
    case 2: return hic_lane_of<uint16_t>(plan, tables, memory, worker, workers, lane, lanes);
    default: return hic_lane_of<uint8_t>(plan, tables, memory, worker, workers, lane, lanes);
  }
}

/* One thread of a 1-dimensional grid.  `lanes` divides the threads of a block. */
template <typename Memory>
HIC_BOTH void hic_thread(const hic_plan &plan, const hic_tables &tables, const Memory &memory, uint32_t block,
                         uint32_t blocks, uint32_t thread, uint32_t threads, uint32_t lanes) {
  const uint32_t workers_a_block = threads / lanes;
  hic_lane(plan, tables, memory, block * workers_a_block + thread / lanes, blocks * workers_a_block, thread % lanes,
           lanes);
}

/* A plan with its tables inside, so that a launch leaves nothing behind that must live on, and page ids cost no round trip
 * to the host.  Kernel parameters may take 32,764 bytes (sm_70 and newer); what does not fit is cut into several launches. */
#define HIC_INLINE_PIECES 192
#define HIC_FEW_PAGES 256
#define HIC_MANY_PAGES 3600
template <int PAGES>
struct hic_inline_plan {
  hic_plan plan;
  hic_piece pieces[HIC_INLINE_PIECES];
  uint32_t source_pages[PAGES], target_pages[PAGES];
};

template <int PAGES>
HIC_BOTH hic_tables hic_tables_of(const hic_inline_plan<PAGES> &inlined) {
  return {inlined.pieces, inlined.source_pages, inlined.target_pages};
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
extern "C" __global__ void __launch_bounds__(1024, 1)
    hic_copy_few(const __grid_constant__ hic_inline_plan<HIC_FEW_PAGES> inlined, uint32_t lanes) {
  hic_thread(inlined.plan, hic_tables_of(inlined), hic_memory(), blockIdx.x, gridDim.x, threadIdx.x, blockDim.x, lanes);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    hic_copy_many(const __grid_constant__ hic_inline_plan<HIC_MANY_PAGES> inlined, uint32_t lanes) {
  hic_thread(inlined.plan, hic_tables_of(inlined), hic_memory(), blockIdx.x, gridDim.x, threadIdx.x, blockDim.x, lanes);
}
#endif
#endif
