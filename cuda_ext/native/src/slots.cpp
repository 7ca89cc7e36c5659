#include <cerrno>
#include <cstring>
#include <unistd.h>

#include "capi.h"

int32_t hic_slots_move(int32_t fd, int32_t writes, uint64_t count, void* const* buffers, const uint64_t* bytes,
                       const uint64_t* offsets) {
  for (uint64_t i = 0; i < count; ++i) {
    char* at = static_cast<char*>(buffers[i]);
    uint64_t left = bytes[i];
    auto offset = static_cast<off_t>(offsets[i]);
    while (left > 0) {
      const ssize_t n = writes ? pwrite(fd, at, left, offset) : pread(fd, at, left, offset);
      if (n < 0) {
        if (errno == EINTR) continue;
        return errno;
      }
      if (n == 0) return EIO;
      at += n;
      left -= static_cast<uint64_t>(n);
      offset += n;
    }
  }
  return 0;
}

void hic_slots_copy(uint64_t count, void* const* to, const void* const* from, const uint64_t* bytes) {
  for (uint64_t i = 0; i < count; ++i) std::memcpy(to[i], from[i], bytes[i]);
}
