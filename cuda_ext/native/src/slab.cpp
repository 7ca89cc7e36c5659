// Lookups in the table of a slab store.
#include "capi/slab.h"

#include <cstring>

#include "error.h"
#include "xxh3.h"

namespace {

constexpr uint64_t kEntryBytes = 256, kPerBucket = 8, kNone = ~UINT64_C(0);
constexpr uint32_t kReady = 2;
constexpr size_t kKeyBytesAt = 48, kKeyAt = 49, kMaxKeyBytes = kEntryBytes - kKeyAt;

struct Head {
  uint32_t state, generation;
  uint64_t length, used, checksum;
};

// Whether the entry is about this key, and whole.
bool holds(const uint8_t* entry, const Head& head, const uint8_t* key, uint64_t bytes) {
  return head.state == kReady && entry[kKeyBytesAt] == bytes && !std::memcmp(entry + kKeyAt, key, bytes) &&
         head.checksum == hic::xxh3_64(key, bytes, static_cast<uint64_t>(head.generation) << 32 ^ head.length);
}

}  // namespace

int32_t hic_slab_find(const uint8_t* entries, uint64_t slots, const uint64_t* hints, uint64_t buckets, uint64_t count,
                      const uint8_t* keys, const uint64_t* lengths, const uint64_t* digests, uint64_t* found) {
  for (uint64_t i = 0; i < count; keys += lengths[i], ++i) {
    if (lengths[i] == 0 || lengths[i] > kMaxKeyBytes) return hic::fail(HIC_INVALID, "a key has %llu bytes",
                                                                       static_cast<unsigned long long>(lengths[i]));
    const uint64_t halves[2] = {digests[2 * i], digests[2 * i + 1]};
    const uint64_t tag = (halves[0] ^ halves[1]) >> 32;
    found[i] = kNone, found[count + i] = found[2 * count + i] = 0;
    for (uint64_t at = 0; at < 2 * kPerBucket && found[i] == kNone; ++at) {
      const uint64_t hint = hints[halves[at / kPerBucket] % buckets * kPerBucket + at % kPerBucket];
      const uint64_t slot = (hint & 0xFFFFFFFF) - 1;
      if (hint >> 32 != tag || slot >= slots) continue;  // a hint of none is slot 0 - 1
      uint8_t entry[kEntryBytes];
      std::memcpy(entry, entries + slot * kEntryBytes, kEntryBytes);  // others may change it
      Head head;
      std::memcpy(&head, entry, sizeof head);
      if (!holds(entry, head, keys, lengths[i])) continue;
      found[i] = slot;
      found[count + i] = head.length;
      std::memcpy(&found[2 * count + i], entry, 8);
    }
  }
  return HIC_OK;
}
