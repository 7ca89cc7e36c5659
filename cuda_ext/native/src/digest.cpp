// Checksums of objects and hashes of pages, for whole batches.
#include "capi/digest.h"

#include <cstring>
#include <vector>

#include "error.h"
#include "objects.h"
#include "sha256.h"
#include "xxh3.h"

namespace hic {
namespace {

constexpr uint8_t kMagic[8] = {'H', 'I', 'C', 'A', 'C', 'H', 'E', '\n'};
constexpr uint16_t kFormatVersion = 1;
constexpr size_t kVersionAt = 8, kNamespaceAt = 16, kHashAt = 32, kChunkAt = 64, kPayloadAt = 72, kFieldsEnd = 80;
constexpr size_t kNamespaceBytes = 16, kHashBytes = 32;
constexpr size_t kChecksumAt = kHeaderBytes - 16;

template <class Int>
void put(uint8_t* at, Int value) {
  for (size_t i = 0; i < sizeof value; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <class Int>
Int get(const uint8_t* at) {
  Int value = 0;
  for (size_t i = 0; i < sizeof value; ++i) value = static_cast<Int>(value | static_cast<Int>(at[i]) << (8 * i));
  return value;
}

void checksum(const uint8_t* object, uint64_t bytes, uint8_t out[16]) {
  xxh3_128(object, kChecksumAt, object + kHeaderBytes, bytes - kHeaderBytes, out);
}

}  // namespace

void seal(uint8_t* object, uint64_t bytes, const hic_names& names, uint64_t at) {
  const uint64_t page = at / names.chunk_count;
  memset(object, 0, kChecksumAt);
  memcpy(object, kMagic, sizeof kMagic);
  put(object + kVersionAt, kFormatVersion);
  memcpy(object + kNamespaceAt, names.namespace_digest, kNamespaceBytes);
  memcpy(object + kHashAt, names.page_hashes + kHashBytes * page, kHashBytes);
  put(object + kChunkAt, names.chunks[at % names.chunk_count]);
  put(object + kPayloadAt, bytes - kHeaderBytes);
  checksum(object, bytes, object + kChecksumAt);
}

uint8_t judge(const uint8_t* object, uint64_t bytes, const hic_names& names, uint64_t at) {
  if (bytes < kHeaderBytes) return HIC_VERDICT_CORRUPT;
  if (memcmp(object, kMagic, sizeof kMagic))
    return get<uint64_t>(object) == 0 ? HIC_VERDICT_EMPTY : HIC_VERDICT_CORRUPT;
  if (get<uint16_t>(object + kVersionAt) != kFormatVersion) return HIC_VERDICT_FOREIGN;
  if (get<uint64_t>(object + kPayloadAt) != bytes - kHeaderBytes) return HIC_VERDICT_CORRUPT;
  const uint64_t page = at / names.chunk_count;
  if (!names.unchecked || !names.unchecked[page]) {
    uint8_t found[16];
    checksum(object, bytes, found);
    if (memcmp(found, object + kChecksumAt, sizeof found)) return HIC_VERDICT_CORRUPT;
  }
  if (memcmp(object + kNamespaceAt, names.namespace_digest, kNamespaceBytes)) return HIC_VERDICT_FOREIGN;
  const bool asked_for = !memcmp(object + kHashAt, names.page_hashes + kHashBytes * page, kHashBytes) &&
                         get<uint64_t>(object + kChunkAt) == names.chunks[at % names.chunk_count];
  return asked_for ? HIC_VERDICT_OK : HIC_VERDICT_CORRUPT;
}

}  // namespace hic

int32_t hic_xxh3_128(const void* head, uint64_t head_bytes, const void* tail, uint64_t tail_bytes, uint8_t* digest) {
  if (head_bytes + tail_bytes < hic::kXxh3MinBytes)
    return hic::fail(HIC_INVALID, "%llu bytes: XXH3-128 is here for %zu and more",
                     static_cast<unsigned long long>(head_bytes + tail_bytes), hic::kXxh3MinBytes);
  hic::xxh3_128(head, head_bytes, tail, tail_bytes, digest);
  return HIC_OK;
}

int32_t hic_seal(uint64_t count, void* const* objects, const uint64_t* bytes, const hic_names* names) {
  for (uint64_t i = 0; i < count; ++i)
    if (bytes[i] < hic::kHeaderBytes)
      return hic::fail(HIC_INVALID, "object %llu has no room for a header", static_cast<unsigned long long>(i));
  for (uint64_t i = 0; i < count; ++i) hic::seal(static_cast<uint8_t*>(objects[i]), bytes[i], *names, i);
  return HIC_OK;
}

int32_t hic_verify(uint64_t count, const void* const* objects, const uint64_t* bytes, const hic_names* names,
                   uint8_t* verdicts) {
  for (uint64_t i = 0; i < count; ++i)
    verdicts[i] = hic::judge(static_cast<const uint8_t*>(objects[i]), bytes[i], *names, i);
  return HIC_OK;
}

int32_t hic_page_hashes(const uint8_t* parent, uint64_t parent_bytes, const int64_t* tokens, uint64_t pages,
                        uint64_t page_tokens, uint8_t* hashes) {
  constexpr int64_t kNarrowMax = 0xFFFFFFFF;
  if (parent_bytes != 0 && parent_bytes != 32) return hic::fail(HIC_INVALID, "a parent has 0 or 32 bytes");
  std::vector<uint8_t> units;
  try {
    units.resize(8 * page_tokens + 1);
  } catch (const std::bad_alloc&) {
    return hic::fail(HIC_INVALID, "no memory for a page of %llu tokens", static_cast<unsigned long long>(page_tokens));
  }
  for (uint64_t page = 0; page < pages; ++page, tokens += page_tokens) {
    bool wide = false;
    for (uint64_t i = 0; i < page_tokens; ++i) {
      int64_t token;
      memcpy(&token, tokens + i, sizeof token);  // a prompt in place need not be aligned
      wide |= token > kNarrowMax;
      hic::put(units.data() + 4 * i, static_cast<uint32_t>(token));
    }
    uint64_t unit_bytes = 4 * page_tokens;
    if (wide) {
      units[0] = 0xFF;
      memcpy(units.data() + 1, tokens, 8 * page_tokens);
      unit_bytes = 8 * page_tokens + 1;
    }
    hic::Sha256 sha;
    sha.add(parent, parent_bytes);
    sha.add(units.data(), unit_bytes);
    sha.digest(hashes + 32 * page);
    parent = hashes + 32 * page;
    parent_bytes = 32;
  }
  return HIC_OK;
}
