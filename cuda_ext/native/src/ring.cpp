// Bounded ring, many producers, one consumer.  Each cell says whose turn it is, so producers only meet at `head`.
//
// A wake-up costs a system call, so a producer makes it only when it finds the ring armed, and disarms it; the consumer drains,
// arms, and looks once more.  Both sides change `armed` by read-modify-write: whichever comes second sees what the first did
// before, so either the consumer's second look finds the ticket, or its producer finds the ring armed.
#include "ring.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "error.h"

namespace {

uint64_t round_up(uint32_t capacity) {
  uint64_t size = 1;
  while (size < capacity) size <<= 1;
  return size;
}

}  // namespace

hic_ring::hic_ring(uint32_t capacity) : mask(round_up(capacity) - 1), cells(new Cell[mask + 1]) {
  for (uint64_t i = 0; i <= mask; ++i) cells[i].turn.store(i, std::memory_order_relaxed);
  fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
}

hic_ring::~hic_ring() {
  if (fd >= 0) close(fd);
}

void hic_ring::wake() {
  wakes.fetch_add(1, std::memory_order_relaxed);
  const uint64_t one = 1;
  // EAGAIN would mean 2^64 - 2 wake-ups unread: the descriptor is readable then, which is all that is wanted.
  while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

bool hic_ring::push(uint64_t ticket, int32_t code) {
  uint64_t position = head.load(std::memory_order_relaxed);
  Cell* cell;
  for (;;) {
    cell = &cells[position & mask];
    const int64_t ahead = static_cast<int64_t>(cell->turn.load(std::memory_order_acquire) - position);
    if (ahead == 0) {
      if (head.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) break;
    } else if (ahead < 0) {
      refused.fetch_add(1, std::memory_order_relaxed);
      return false;
    } else {
      position = head.load(std::memory_order_relaxed);
    }
  }
  cell->ticket = ticket;
  cell->code = code;
  cell->turn.store(position + 1, std::memory_order_release);
  if (armed.exchange(0, std::memory_order_acq_rel)) wake();
  return true;
}

uint32_t hic_ring::drain(hic_done* out, uint32_t room) {
  uint64_t count;
  while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {
  }
  uint32_t taken = 0;
  uint64_t position = tail.load(std::memory_order_relaxed);
  for (int look = 0; look < 2; ++look) {
    while (taken < room) {
      Cell& cell = cells[position & mask];
      if (cell.turn.load(std::memory_order_acquire) != position + 1) break;
      out[taken++] = {cell.ticket, cell.code, 0};
      cell.turn.store(position + mask + 1, std::memory_order_release);
      ++position;
    }
    if (look == 0) armed.exchange(1, std::memory_order_acq_rel);
  }
  tail.store(position, std::memory_order_relaxed);
  // No room left: perhaps no more tickets either, but the next drain must come to see.
  if (taken == room && armed.exchange(0, std::memory_order_acq_rel)) wake();
  return taken;
}

int32_t hic_ring_new(uint32_t capacity, hic_ring** out) {
  if (capacity == 0 || capacity > (1u << 24)) return hic::fail(HIC_INVALID, "a ring of %u tickets", capacity);
  hic_ring* ring = new (std::nothrow) hic_ring(capacity);
  if (ring == nullptr) return hic::fail(HIC_SYSTEM, "no memory for a ring of %u tickets", capacity);
  if (ring->fd < 0) {
    const int code = hic::fail_errno("eventfd");
    delete ring;
    return code;
  }
  *out = ring;
  return HIC_OK;
}

int32_t hic_ring_fd(hic_ring* ring) { return ring->fd; }

int32_t hic_ring_push(hic_ring* ring, uint64_t ticket, int32_t code) {
  return ring->push(ticket, code) ? HIC_OK : hic::fail(HIC_INVALID, "the ring is full");
}

int32_t hic_ring_drain(hic_ring* ring, hic_done* out, uint32_t room) {
  return static_cast<int32_t>(ring->drain(out, room));
}

int32_t hic_ring_wait(hic_ring* ring, int64_t timeout_ns) {
  pollfd asked = {ring->fd, POLLIN, 0};
  timespec limit = {static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
  const int ready = ppoll(&asked, 1, timeout_ns < 0 ? nullptr : &limit, nullptr);
  if (ready < 0 && errno != EINTR) return hic::fail_errno("ppoll");
  return ready > 0;
}

void hic_ring_poke(hic_ring* ring) { ring->wake(); }

void hic_ring_count(hic_ring* ring, hic_ring_counts* out) {
  out->pushed = ring->head.load();
  out->drained = ring->tail.load();
  out->wakes = ring->wakes.load();
  out->refused = ring->refused.load();
}

void hic_ring_release(hic_ring* ring) { ring->let_go(); }
