// Digests, batches of files and of slots, and first touch in one program, for sanitizers.  Its argument is an empty folder.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "capi.h"

namespace {

std::mt19937 chance(1);

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s; last error: %s\n", what, hic_last_error());
  std::exit(1);
}

// On the heap and of exactly this size, so that a byte beside it is found.
struct Bytes {
  explicit Bytes(uint64_t n) : data(new uint8_t[n]), n(n) {
    for (uint64_t i = 0; i < n; ++i) data[i] = static_cast<uint8_t>(chance());
  }
  std::unique_ptr<uint8_t[]> data;
  uint64_t n;
};

void try_digests() {
  for (int round = 0; round < 300; ++round) {
    const uint64_t n = 241 + chance() % 5000, cut = chance() % (n + 1);
    const Bytes whole(n), head(cut), tail(n - cut);
    std::memcpy(head.data.get(), whole.data.get(), cut);
    std::memcpy(tail.data.get(), whole.data.get() + cut, n - cut);
    uint8_t once[16], twice[16];
    require(!hic_xxh3_128(whole.data.get(), n, nullptr, 0, once), "one run");
    require(!hic_xxh3_128(head.data.get(), cut, tail.data.get(), n - cut, twice), "two runs");
    require(!std::memcmp(once, twice, 16), "a cut changes nothing");
    const uint64_t pages = chance() % 4, tokens = 1 + chance() % 70;
    const Bytes packed(8 * pages * tokens), hashes(32 * pages), parent(32);
    require(!hic_page_hashes(parent.data.get(), round % 2 ? 32 : 0, reinterpret_cast<const int64_t*>(packed.data.get()), pages,
                             tokens, hashes.data.get()),
            "page hashes");
  }
}

void by_threads(const std::function<void()>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

void try_files(const std::string& folder) {
  constexpr uint64_t kCount = 40, kChunks = 2;
  std::string keys;
  std::vector<Bytes> objects, back;
  std::vector<uint64_t> bytes, numbers;
  for (uint64_t i = 0; i < kCount; ++i) {
    if (i) keys.push_back(0);
    keys += "object" + std::to_string(i);
    bytes.push_back(4096 + chance() % 9000);
    objects.emplace_back(bytes.back());
    back.emplace_back(bytes.back());
    numbers.push_back(i);
  }
  std::vector<const char*> paths(kCount);
  std::vector<uint8_t> shards(kCount);
  const Bytes memory(kCount * (folder.size() + HIC_PATH_BYTES) + keys.size());
  hic_places places{kCount, keys.data(), keys.size(), folder.c_str(), 2, reinterpret_cast<char*>(memory.data.get()), paths.data(),
                    shards.data()};
  require(hic_files_place(&places) == kCount, "all have a place");
  mkdir((folder + "/00").c_str(), 0700), mkdir((folder + "/01").c_str(), 0700);
  std::vector<void*> from, to;
  for (uint64_t i = 0; i < kCount; ++i) {
    from.push_back(objects[i].data.get()), to.push_back(back[i].data.get());
  }
  const Bytes digest(16), hashes(32 * kCount / kChunks);
  const uint64_t chunks[kChunks] = {7, 1};
  const hic_names names{digest.data.get(), hashes.data.get(), chunks, kChunks, nullptr};
  std::vector<int32_t> written(kCount, HIC_WRITE_SKIPPED), errors(kCount);
  hic_writes writes{kCount, 0, paths.data(), ".tmp", 5, from.data(), bytes.data(), &names, numbers.data(),
                    written.data(), errors.data(), 0, 0};
  by_threads([&] { require(!hic_files_write(&writes), "write"); });
  for (const int32_t outcome : written) require(outcome == HIC_WRITE_WRITTEN, "all are written");
  std::vector<int64_t> lengths(kCount);
  std::vector<hic_identity> identities(kCount);
  std::vector<uint8_t> verdicts(kCount);
  hic_reads reads{kCount, 0, paths.data(), to.data(), bytes.data(), 0, &names, lengths.data(), identities.data(),
                  errors.data(), verdicts.data()};
  by_threads([&] { require(!hic_files_read(&reads), "read"); });
  for (uint64_t i = 0; i < kCount; ++i) {
    require(lengths[i] == static_cast<int64_t>(bytes[i]) && verdicts[i] == HIC_VERDICT_OK, "all are read and right");
    require(!std::memcmp(from[i], to[i], bytes[i]), "and the same");
  }
  hic_lookups lookups{kCount, 0, paths.data(), kCount, 0, 0};
  by_threads([&] { require(!hic_files_look_up(&lookups), "look up"); });
  require(lookups.leading == kCount && !lookups.error, "all are there");
  require(!unlink(paths[35]) && !unlink(paths[3]), "two go");
  lookups = {kCount, 0, paths.data(), kCount, 0, 0};
  by_threads([&] { require(!hic_files_look_up(&lookups), "look up again"); });
  require(lookups.leading == 3 && !lookups.error, "the first that is missing ends it");
}

// Many small pieces, some of them neighbours, in three threads or by one queue; what is written is read, sealed and judged.
void try_slots(const std::string& path, hic_uring* uring) {
  constexpr uint64_t kCount = 150, kBytes = 4096 + 512;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  require(fd >= 0, "the file of slots");
  std::vector<Bytes> objects, back;
  std::vector<void*> from, to;
  std::vector<uint64_t> bytes(kCount, kBytes), offsets, numbers;
  for (uint64_t i = 0; i < kCount; ++i) {
    objects.emplace_back(kBytes), back.emplace_back(kBytes);
    from.push_back(objects.back().data.get()), to.push_back(back.back().data.get());
    offsets.push_back(i ? offsets.back() + kBytes * (1 + chance() % 2) : 0);
    numbers.push_back(kCount - 1 - i);
  }
  const Bytes digest(16), hashes(32 * kCount);
  const uint64_t chunk = 3;
  const hic_names names{digest.data.get(), hashes.data.get(), &chunk, 1, nullptr};
  std::vector<uint8_t> verdicts(kCount, HIC_VERDICT_EMPTY);
  for (const bool writes : {true, false}) {
    hic_slot_batch batch{kCount, 0, writes ? from.data() : to.data(), bytes.data(), offsets.data(), nullptr, &names,
                         numbers.data(), verdicts.data(), 4 * kBytes, fd, writes, 0, 0};
    if (uring)
      require(!hic_uring_move(uring, &batch), "move by queue");
    else
      by_threads([&] { require(!hic_slots_move(&batch), "move by threads"); });
    require(!batch.error, "no request failed");
  }
  for (uint64_t i = 0; i < kCount; ++i)
    require(verdicts[i] == HIC_VERDICT_OK && !std::memcmp(from[i], to[i], kBytes), "all are read and right");
  hic_slot_batch cached{kCount, 0, to.data(), bytes.data(), offsets.data(), nullptr, &names,
                        numbers.data(), verdicts.data(), 4 * kBytes, fd, 0, 0, 1};
  by_threads([&] { require(!hic_slots_move(&cached), "read what is in the page cache"); });
  require(!cached.error || cached.error == ENOSYS || cached.error == EPERM, "if the kernel tells");
  for (uint64_t i = 0; !cached.error && i < kCount; ++i)
    require(verdicts[i] == HIC_VERDICT_OK || verdicts[i] == HIC_NOT_CACHED, "right, or left out");
  require(!hic_slots_write_out(fd, 4096), "begin to write out");
  require(!ftruncate(fd, static_cast<off_t>(offsets[kCount / 2])), "cut off");
  hic_slot_batch batch{kCount, 0, to.data(), bytes.data(), offsets.data(), nullptr, nullptr,
                       nullptr, nullptr, 4 * kBytes, fd, 0, 0, 0};
  require(!(uring ? hic_uring_move(uring, &batch) : hic_slots_move(&batch)) && batch.error == EIO, "the end of the file");
  close(fd);
}

void try_touching() {
  constexpr uint64_t kBytes = 48 << 20;
  for (const bool to_the_end : {true, false}) {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "mmap");
    hic_touching* touching = hic_touch_start(memory, kBytes, 3);
    require(touching, "start");
    if (to_the_end) {
      while (hic_touch_reach(touching, kBytes, 5) == HIC_TIMEOUT) require(hic_touch_done(touching) <= kBytes, "progress");
      require(hic_touch_done(touching) == kBytes, "all of it");
    }
    hic_touch_stop(touching);
    munmap(memory, kBytes);
  }
}

}  // namespace

int main(int, char** arguments) {
  try_digests();
  try_files(arguments[1]);
  try_slots(std::string(arguments[1]) + "/slots", nullptr);
  int32_t error;
  hic_uring* uring = hic_uring_open(8, &error);
  for (int round = 0; uring && round < 10; ++round) try_slots(std::string(arguments[1]) + "/slots", uring);
  if (uring) hic_uring_close(uring);
  try_touching();
  std::puts("all well");
}
