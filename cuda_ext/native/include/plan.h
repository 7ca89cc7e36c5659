/* A copy of KV pages as one affine address scheme, read by g++, nvcc and NVRTC alike (no CUDA headers).
 *
 * address(kv, layer, page, token, head) = piece[layer, kv] + page id * page stride + token * token stride + head * head stride
 *
 * on both sides.  Whoever makes a plan (hicache_actors.transfer.affine) has merged all axes that lie back to back on both
 * sides into the run, so what is left of the five axes are at most HIC_LEVELS nested loops around one run of bytes. */
#ifndef HICACHE_PLAN_H
#define HICACHE_PLAN_H

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

#define HIC_LEVELS 5

enum hic_level_kind {
  HIC_AFFINE = 0, /* index * stride */
  HIC_PAGE = 1,   /* page id of the index * stride */
  HIC_PIECE = 2,  /* where the index's K or V of one layer begins; no stride */
};

/* One loop.  Strides are in bytes. */
struct hic_level {
  uint32_t extent, kind;
  int64_t source_stride, target_stride;
};

/* Where page 0 of one layer's K or V (or, merged, of several) begins on each side. */
struct hic_piece {
  uint64_t source, target;
};

/* Levels go from the slowest to the fastest; those from `levels` on are not read.  The tables stay the caller's, and must
 * live until the copy has ended. */
struct hic_plan {
  uint64_t pieces;                     /* address of struct hic_piece[piece_count] */
  uint64_t source_pages, target_pages; /* addresses of uint32_t[page_count]: page ids */
  uint32_t piece_count, page_count;
  uint32_t source_limit, target_limit; /* pages of each pool: ids are below */
  uint32_t run_bytes;                  /* contiguous on both sides */
  uint32_t unit_bytes;                 /* 1, 2, 4, 8 or 16: divides the run and every address */
  uint32_t levels;
  uint32_t runs;                       /* product of the extents */
  struct hic_level level[HIC_LEVELS];
};

#ifdef __cplusplus

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define HIC_BOTH __host__ __device__ __forceinline__
#define HIC_UNROLLED _Pragma("unroll")
#else
#define HIC_BOTH inline
#define HIC_UNROLLED
#endif

/* The tables of a plan, wherever they are: behind its addresses, or inside a kernel's parameters. */
struct hic_tables {
  const hic_piece *pieces;
  const uint32_t *source_pages, *target_pages;
};

HIC_BOTH hic_tables hic_tables_of(const hic_plan &plan) {
  return {reinterpret_cast<const hic_piece *>(plan.pieces), reinterpret_cast<const uint32_t *>(plan.source_pages),
          reinterpret_cast<const uint32_t *>(plan.target_pages)};
}

/* Source and target address of run number `run`, 0 <= run < plan.runs. */
HIC_BOTH hic_piece hic_locate(const hic_plan &plan, const hic_tables &tables, uint32_t run) {
  hic_piece at = {0, 0};
  HIC_UNROLLED
  for (int i = HIC_LEVELS - 1; i >= 0; --i) {
    if (i < static_cast<int>(plan.levels)) {
      const hic_level &level = plan.level[i];
      const uint32_t index = run % level.extent;
      run /= level.extent;
      if (level.kind == HIC_PIECE) {
        at.source += tables.pieces[index].source;
        at.target += tables.pieces[index].target;
      } else if (level.kind == HIC_PAGE) {
        at.source += static_cast<uint64_t>(level.source_stride * tables.source_pages[index]);
        at.target += static_cast<uint64_t>(level.target_stride * tables.target_pages[index]);
      } else {
        at.source += static_cast<uint64_t>(level.source_stride * index);
        at.target += static_cast<uint64_t>(level.target_stride * index);
      }
    }
  }
  return at;
}

#endif /* __cplusplus */
#endif
