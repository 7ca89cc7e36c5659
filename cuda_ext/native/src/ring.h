// The ring of capi/ring.h, as the rest of the library holds it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "capi.h"

struct hic_ring {
  explicit hic_ring(uint32_t capacity);
  ~hic_ring();
  hic_ring(const hic_ring&) = delete;

  bool push(uint64_t ticket, int32_t code);
  uint32_t drain(hic_done* out, uint32_t room);
  void wake();

  void hold() { holders.fetch_add(1, std::memory_order_relaxed); }
  void let_go() {
    if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // A cell is free for the push at position p when its turn is p, and full when its turn is p + 1.
  struct Cell {
    std::atomic<uint64_t> turn;
    uint64_t ticket;
    int32_t code;
  };

  int fd = -1;
  const uint64_t mask;
  std::unique_ptr<Cell[]> cells;
  std::atomic<uint32_t> holders{1};
  alignas(64) std::atomic<uint64_t> head{0};
  alignas(64) std::atomic<uint32_t> armed{1};  // 1: whoever pushes next must wake the drainer
  std::atomic<uint64_t> wakes{0};
  std::atomic<uint64_t> refused{0};
  alignas(64) std::atomic<uint64_t> tail{0};  // written by the draining thread alone
};
