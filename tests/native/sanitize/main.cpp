// Copies, streams, events and the ring in one program, for sanitizers: they see more in it than in a library inside Python.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "capi.h"
#include "include/copy.h"

namespace {

std::mt19937 chance(1);

uint32_t between(uint32_t low, uint32_t high) { return low + chance() % (high - low + 1); }

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s; last error: %s\n", what, hic_last_error());
  std::exit(1);
}

// Memory of exactly the size that a copy may touch, so that a byte beside it is found.
struct Block {
  explicit Block(uint64_t bytes) : data(new (std::align_val_t(64)) uint8_t[bytes]), bytes(bytes) {
    for (uint64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(chance());
  }
  ~Block() { operator delete[](data, std::align_val_t(64)); }
  Block(const Block&) = delete;
  uint64_t address() const { return reinterpret_cast<uint64_t>(data); }
  uint8_t* data;
  uint64_t bytes;
};

std::vector<uint32_t> some_of(uint32_t pool, uint32_t count) {
  std::vector<uint32_t> all(pool);
  for (uint32_t i = 0; i < pool; ++i) all[i] = i;
  std::shuffle(all.begin(), all.end(), chance);
  all.resize(count);
  return all;
}

// Pages between one block for each piece, [page, token, head, item], and one block of slots in one of four orders.
struct Problem {
  Problem(bool to_host, uint32_t item, uint32_t page_tokens) : to_host(to_host) {
    pieces = between(1, 5), tokens = between(1, page_tokens), heads = between(1, 3), pages = between(1, 6);
    const uint32_t pool = pages + between(0, 3), slots = pages + between(0, 3);
    const int64_t row = int64_t{heads} * item, page = tokens * row, order = between(0, 3);
    for (uint32_t i = 0; i < pieces; ++i) device.push_back(std::make_unique<Block>(pool * page));
    const int64_t slot = pieces * page + (order == 3 ? 0 : 64);
    host = std::make_unique<Block>(order == 3 ? slots * pieces * page : slots * slot);
    int64_t to_piece = page, to_token = row, to_head = item, to_page = slot;
    if (order == 1) to_piece = row, to_token = pieces * row;                                              // tokens first
    if (order == 2) to_piece = item, to_token = int64_t{pieces} * item, to_head = tokens * to_token;      // heads first
    if (order == 3) to_piece = slots * page, to_page = page;                                              // layers first
    on_device = some_of(pool, pages), on_host = some_of(slots, pages);
    for (uint32_t i = 0; i < pieces; ++i) {
      const uint64_t there = host->address() + i * to_piece;
      table.push_back(to_host ? hic_piece{device[i]->address(), there} : hic_piece{there, device[i]->address()});
    }
    plan = {};
    plan.pieces = reinterpret_cast<uint64_t>(table.data());
    plan.source_pages = reinterpret_cast<uint64_t>((to_host ? on_device : on_host).data());
    plan.target_pages = reinterpret_cast<uint64_t>((to_host ? on_host : on_device).data());
    plan.piece_count = pieces, plan.page_count = pages;
    plan.source_limit = to_host ? pool : slots, plan.target_limit = to_host ? slots : pool;
    level(HIC_PAGE, pages, page, to_page);
    level(HIC_PIECE, pieces, 0, 0);
    plan.run_bytes = item;
    if (to_head == item && to_token == row) {
      plan.run_bytes = static_cast<uint32_t>(page);
    } else if (to_head == item) {
      plan.run_bytes = static_cast<uint32_t>(row);
      level(HIC_AFFINE, tokens, row, to_token);
    } else {
      level(HIC_AFFINE, heads, item, to_head);
      level(HIC_AFFINE, tokens, row, to_token);
    }
    plan.runs = 1;
    for (uint32_t i = 0; i < plan.levels; ++i) plan.runs *= plan.level[i].extent;
    plan.unit_bytes = 16;
    while (item % plan.unit_bytes != 0) plan.unit_bytes /= 2;
    if (order == 3 || order == 0) {  // runs of whole pages: as wide as they allow
      plan.unit_bytes = 16;
      while (page % plan.unit_bytes != 0) plan.unit_bytes /= 2;
    }
    require(hic_plan_check(&plan) == HIC_OK, "the plan is refused");
    before = snapshot();
    for (uint32_t i = 0; i < pages; ++i)
      for (uint32_t p = 0; p < pieces; ++p)
        for (uint32_t t = 0; t < tokens; ++t)
          for (uint32_t h = 0; h < heads; ++h) {
            uint8_t* here = device[p]->data + on_device[i] * page + t * row + h * item;
            uint8_t* there = host->data + on_host[i] * to_page + p * to_piece + t * to_token + h * to_head;
            std::memcpy(to_host ? there : here, to_host ? here : there, item);
          }
    after = snapshot();
    reset();
  }

  void level(uint32_t kind, uint32_t extent, int64_t on_device_stride, int64_t on_host_stride) {
    const hic_level made = {extent, kind, to_host ? on_device_stride : on_host_stride,
                            to_host ? on_host_stride : on_device_stride};
    plan.level[plan.levels++] = made;
  }

  template <typename Visit>
  void blocks(const Visit& visit) {
    for (auto& block : device) visit(*block);
    visit(*host);
  }
  std::vector<uint8_t> snapshot() {
    std::vector<uint8_t> all;
    blocks([&](Block& block) { all.insert(all.end(), block.data, block.data + block.bytes); });
    return all;
  }
  void reset() {
    uint64_t at = 0;
    blocks([&](Block& block) {
      std::memcpy(block.data, before.data() + at, block.bytes);
      at += block.bytes;
    });
  }
  void expect(int64_t code, const char* way) {
    require(code >= 0, way);
    require(snapshot() == after, way);
    reset();
  }

  bool to_host;
  uint32_t pieces, tokens, heads, pages;
  std::vector<std::unique_ptr<Block>> device;
  std::unique_ptr<Block> host;
  std::vector<uint32_t> on_device, on_host;
  std::vector<hic_piece> table;
  hic_plan plan;
  std::vector<uint8_t> before, after;
};

void copies() {
  const uint32_t items[] = {1, 2, 3, 4, 8, 24, 48, 64, 80, 256, 8192};
  for (uint32_t round = 0; round < 400; ++round) {
    const uint32_t item = items[round % 11];
    Problem problem(round % 2 == 0, item, item >= 256 ? 9 : 5);
    const hic_plan& plan = problem.plan;
    problem.expect(hic_copy_run(&plan, 1 + round % 3), "run");
    const uint32_t lanes = 1u << between(0, 5);
    problem.expect(hic_copy_grid(&plan, between(1, 3), lanes * between(1, 4), lanes, nullptr), "grid");
    problem.expect(hic_copy_by(&plan, HIC_ENGINE_DIRECT, problem.to_host, 2), "direct");
    std::vector<hic_run> list(plan.runs);
    const int64_t count = hic_copy_list(&plan, round % 4 < 2, list.data(), list.size());
    problem.expect(hic_copy_runs(list.data(), static_cast<uint64_t>(count), 2), "list");
    if (hic_copy_by(&plan, HIC_ENGINE_STAGED, problem.to_host, 1) == HIC_OK) problem.expect(HIC_OK, "staged");
  }
}

// Two streams that wait for each other, whose ends come through a ring, while gates, speeds and failures change.
void streams() {
  constexpr int ROUNDS = 600;
  hic_faults* faults = hic_faults_new();
  hic_stream *loads = nullptr, *saves = nullptr;
  hic_ring* ring = nullptr;
  hic_event* ends = nullptr;
  require(hic_stream_new("loads", 0, faults, &loads) == HIC_OK, "a stream");
  require(hic_stream_new("saves", 1, faults, &saves) == HIC_OK, "a stream");
  require(hic_ring_new(2 * ROUNDS, &ring) == HIC_OK, "a ring");
  require(hic_event_new(1, &ends) == HIC_OK, "an event");
  Problem problem(true, 64, 5);
  hic_copies work = {reinterpret_cast<uint64_t>(&problem.plan), 1, 1, HIC_ENGINE_KERNEL, 0};
  std::vector<hic_event*> events;
  for (int i = 0; i < ROUNDS; ++i) {
    hic_event* event = nullptr;
    require(hic_event_new(1, &event) == HIC_OK, "an event");
    events.push_back(event);
  }
  std::thread operators([&] {
    for (int i = 0; i < 60; ++i) {
      hic_stream_gate_shut(loads, ends, static_cast<uint64_t>(i) + 1);
      hic_faults_add(faults, 7, 1, 3, i % 2);
      hic_event_wait(ends, static_cast<uint64_t>(i) + 1, 1'000'000);
      hic_stream_speed(loads, i % 3 == 0 ? 20'000 : 0, 0.0);
      hic_stream_gate_open(loads);
      hic_stream_counts counts;
      hic_stream_count(saves, &counts);
    }
    hic_stream_gate_open(loads);
  });
  std::thread drains([&] {
    std::vector<bool> seen(ROUNDS);
    hic_done done[64];
    for (int got = 0; got < ROUNDS;) {
      hic_ring_wait(ring, 50'000'000);
      const int32_t count = hic_ring_drain(ring, done, 64);
      require(count >= 0, "drain");
      for (int32_t i = 0; i < count; ++i) {
        require(!seen[done[i].ticket], "a ticket came twice");
        require(done[i].code == 0 || done[i].code == 7, "a ticket with a code of its own");
        seen[done[i].ticket] = true;
      }
      got += count;
    }
  });
  for (int i = 0; i < ROUNDS; ++i) {
    require(hic_event_subscribe(events[i], 1, ring, static_cast<uint64_t>(i)) >= 0, "subscribe");
    hic_stream* first = i % 2 ? loads : saves;
    hic_stream* second = i % 2 ? saves : loads;
    hic_op copy = {}, wait = {};
    copy.kind = HIC_OP_CALL, copy.bytes = 64, copy.call = hic_call_copies;
    copy.argument = reinterpret_cast<uint64_t>(&work);
    if (i % 2) {  // the same target: two streams may not write it at once
      copy.kind = HIC_OP_RECORD, copy.call = nullptr, copy.argument = 0, copy.bytes = 0;
    }
    copy.event = events[i], copy.generation = 1;
    require(hic_stream_submit(first, &copy, 1, nullptr, 0) >= 0, "submit");
    wait.kind = HIC_OP_WAIT, wait.event = events[i], wait.generation = 1;
    require(hic_stream_submit(second, &wait, 1, nullptr, 0) >= 0, "submit");
  }
  operators.join();
  drains.join();
  for (hic_stream* stream : {loads, saves}) {
    hic_stream_finish(stream);
    require(hic_stream_join(stream, 60'000'000'000) == HIC_OK, "join");
    hic_stream_release(stream);
  }
  for (hic_event* event : events) hic_event_release(event);
  hic_event_release(ends);
  hic_ring_release(ring);
  hic_faults_release(faults);
}

// Streams that are dropped with work in them, from another thread.
void drops() {
  for (int round = 0; round < 20; ++round) {
    hic_faults* faults = hic_faults_new();
    hic_stream* stream = nullptr;
    hic_event* end = nullptr;
    require(hic_stream_new("dropped", 0, faults, &stream) == HIC_OK, "a stream");
    require(hic_event_new(1, &end) == HIC_OK, "an event");
    hic_op nap = {};
    nap.kind = HIC_OP_CALL, nap.call = hic_call_nap, nap.argument = 100'000;
    for (int i = 0; i < 20; ++i) require(hic_stream_submit(stream, &nap, 1, nullptr, 0) >= 0, "submit");
    hic_op record = {};
    record.kind = HIC_OP_RECORD, record.event = end, record.generation = 1;
    require(hic_stream_submit(stream, &record, 1, nullptr, 0) >= 0, "submit");
    std::thread dropper([&] { hic_stream_drop(stream, 9); });
    require(hic_event_wait(end, 1, 60'000'000'000) == 1, "a dropped event never ends");
    dropper.join();
    hic_stream_finish(stream);
    require(hic_stream_join(stream, 60'000'000'000) == HIC_OK, "join");
    hic_stream_release(stream);
    hic_event_release(end);
    hic_faults_release(faults);
  }
}

}  // namespace

int main() {
  copies();
  streams();
  drops();
  std::puts("all well");
  return 0;
}
