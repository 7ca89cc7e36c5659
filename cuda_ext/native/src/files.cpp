// Batches of whole files.
#include "capi/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "breather.h"
#include "error.h"
#include "objects.h"
#include "xxh32.h"

namespace {

// Without O_NONBLOCK somebody's pipe under the name of an object would block us for ever.
constexpr int kRead = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
constexpr int kCreate = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;

class File {
 public:
  File(int folder, const char* path, int flags, mode_t mode = 0) {
    do fd_ = openat(folder, path, flags, mode);
    while (fd_ < 0 && errno == EINTR);
  }
  ~File() { shut(); }
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  explicit operator bool() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  // -> whether the system has nothing to complain about; a second call does nothing.
  bool shut() {
    const int fd = fd_;
    fd_ = -1;
    return fd < 0 || close(fd) == 0 || errno == EINTR;
  }

 private:
  int fd_;
};

// The folder that a batch's paths have in common, opened once: to look a file up from there takes half the time that it takes from
// the root of all.  Where it cannot be opened, and for batches too small to gain, paths are taken as they are.
class Common {
 public:
  Common(const char* const* paths, uint64_t count) {
    if (count < kWorthOpening) return;
    size_t same = strlen(paths[0]);
    for (uint64_t i = 1; i < count && same; ++i) {
      size_t at = 0;
      while (at < same && paths[i][at] == paths[0][at]) ++at;
      same = at;
    }
    while (same && paths[0][same - 1] != '/') --same;
    if (same < 2) return;
    opened_.emplace(AT_FDCWD, std::string(paths[0], same).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*opened_) skipped_ = same;
  }
  int fd() const { return skipped_ ? opened_->fd() : AT_FDCWD; }
  const char* operator()(const char* path) const { return path + skipped_; }

 private:
  static constexpr uint64_t kWorthOpening = 8;
  std::optional<File> opened_;
  size_t skipped_ = 0;
};

int64_t mtime_ns(const struct stat& found) { return found.st_mtim.tv_sec * INT64_C(1000000000) + found.st_mtim.tv_nsec; }

constexpr uint64_t kLookups = 32;  // that a thread takes at once

uint64_t take(uint64_t* counter, uint64_t many) { return __atomic_fetch_add(counter, many, __ATOMIC_RELAXED); }
uint64_t next(uint64_t* counter) { return take(counter, 1); }

// Number i is not there.
void end_at(hic_lookups& batch, uint64_t i, int32_t error) {
  while (__atomic_exchange_n(&batch.lock, 1, __ATOMIC_ACQUIRE)) std::this_thread::yield();
  if (i < batch.leading) {
    batch.error = error;
    __atomic_store_n(&batch.leading, i, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&batch.lock, 0, __ATOMIC_RELEASE);
}

// Open a file to be read, without writing down when that was: our own order of use is that of mtimes, and the first read of a new file
// would cost an update of its inode.  Only the owner of a file may do so.
File open_to_read(int folder, const char* path) {
#ifdef O_NOATIME
  File file(folder, path, kRead | O_NOATIME);
  if (file || errno != EPERM) return file;
#endif
  return File(folder, path, kRead);
}

// -> the bytes read, or a hic_read_outcome; FAILED leaves errno.
int64_t read_one(const hic_reads& batch, const Common& folder, uint64_t i) {
  const File file = open_to_read(folder.fd(), folder(batch.paths[i]));
  if (!file)  // a link or a socket is not ours
    return errno == ENOENT || errno == ELOOP || errno == ENXIO ? HIC_READ_MISSING : HIC_READ_FAILED;
  struct stat found;
  if (fstat(file.fd(), &found)) return HIC_READ_FAILED;
  if (!S_ISREG(found.st_mode)) return HIC_READ_MISSING;
  hic_identity& identity = batch.identities[i];
  identity = {mtime_ns(found), found.st_ino};
  const uint64_t wanted = batch.bytes[i];
  if (static_cast<uint64_t>(found.st_size) != wanted) return HIC_READ_TORN;
  uint8_t* buffer = static_cast<uint8_t*>(batch.buffers[i]);
  for (uint64_t done = 0; done < wanted;) {
    const ssize_t now = read(file.fd(), buffer + done, wanted - done);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return HIC_READ_FAILED;
    if (now == 0) return HIC_READ_TORN;  // cut off while we read
    done += static_cast<uint64_t>(now);
  }
  // Whoever may read a file need not be allowed to touch it.
  if (identity.mtime_ns < batch.touch_before_ns && !futimens(file.fd(), nullptr) && !fstat(file.fd(), &found))
    identity = {mtime_ns(found), found.st_ino};
  return static_cast<int64_t>(wanted);
}

// As `rename`, but EEXIST if something has the name; EINVAL, ENOSYS or ENOTSUP where that cannot be had.
int rename_new(int folder, const char* from, const char* to) {
#ifdef RENAME_NOREPLACE
  return renameat2(folder, from, folder, to, RENAME_NOREPLACE);
#else
  (void)folder, (void)from, (void)to;
  errno = ENOSYS;
  return -1;
#endif
}

// A write of a mebibyte takes as long as the event loop should ever wait.
constexpr uint64_t kPieceBytes = 256 << 10;

bool fill(const File& file, const void* buffer, uint64_t bytes, hic::Breather& breather) {
  const uint8_t* at = static_cast<const uint8_t*>(buffer);
  do {
    const ssize_t now = write(file.fd(), at, std::min(bytes, kPieceBytes));
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return false;
    at += now;
    bytes -= static_cast<uint64_t>(now);
    breather.step();
  } while (bytes);
  return true;
}

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EROFS; }

// How a file gets a name that has been made without one: by its descriptor (older kernels let only root do that), by what /proc
// calls it, or not at all.
enum class Naming { kDescriptor, kProc, kNone };

std::atomic<Naming> best_naming{Naming::kDescriptor};

// As `link`; errno is EEXIST if something has the name.
bool give_name(const File& file, int folder, const char* path) {
  if (best_naming == Naming::kDescriptor) {
    if (!linkat(file.fd(), "", folder, path, AT_EMPTY_PATH)) return true;
    if (errno == EEXIST || is_full(errno)) return false;
  }
  char source[32];
  snprintf(source, sizeof source, "/proc/self/fd/%d", file.fd());
  if (linkat(AT_FDCWD, source, folder, path, AT_SYMLINK_FOLLOW)) return false;
  best_naming = Naming::kProc;
  return true;
}

// `<folder of the file>/<temporary><number>.tmp`
std::string temporary_of(const hic_writes& batch, const Common& folder, uint64_t i) {
  const char* path = folder(batch.paths[i]);
  const char* slash = strrchr(path, '/');
  return std::string(path, slash ? slash + 1 - path : 0) + batch.temporary + std::to_string(batch.first + i) + ".tmp";
}

// Made without a name and then given one, a new file costs a fifth less than one that is created and renamed, and a crash leaves
// nothing of it.  -> a hic_write_outcome, FAILED leaves errno; NO_RENAME, with nothing made, if it cannot be had here.
int32_t write_unnamed(const hic_writes& batch, const Common& folder, hic::Breather& breather, uint64_t i) {
#ifdef O_TMPFILE
  const char* path = folder(batch.paths[i]);
  const char* slash = strrchr(path, '/');
  File file(folder.fd(), slash ? std::string(path, slash).c_str() : ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
  if (!file) {
    if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL) best_naming = Naming::kNone;
    return HIC_WRITE_NO_RENAME;
  }
  int32_t outcome = HIC_WRITE_FAILED;
  if (fill(file, batch.buffers[i], batch.bytes[i], breather)) {
    if (give_name(file, folder.fd(), path))
      outcome = HIC_WRITE_WRITTEN;
    else if (errno == EEXIST)
      outcome = give_name(file, folder.fd(), temporary_of(batch, folder, i).c_str()) ? HIC_WRITE_EXISTS : HIC_WRITE_FAILED;
    else if (!is_full(errno))
      outcome = HIC_WRITE_NO_RENAME;
  }
  int error = errno;
  if (!file.shut() && outcome == HIC_WRITE_WRITTEN) {  // a file system that tells only now
    error = errno;
    outcome = HIC_WRITE_FAILED;
    unlinkat(folder.fd(), path, 0);
  }
  errno = error;
  return outcome;
#else
  (void)batch, (void)folder, (void)i;
  return HIC_WRITE_NO_RENAME;
#endif
}

// -> a hic_write_outcome; FAILED leaves errno.
int32_t write_named(const hic_writes& batch, const Common& folder, hic::Breather& breather, uint64_t i) {
  const std::string name = temporary_of(batch, folder, i);
  const char* temporary = name.c_str();
  File file(folder.fd(), temporary, kCreate, 0600);
  if (!file) return errno == ENOENT ? HIC_WRITE_NO_FOLDER : HIC_WRITE_FAILED;
  if (fill(file, batch.buffers[i], batch.bytes[i], breather) && file.shut()) {
    if (!rename_new(folder.fd(), temporary, folder(batch.paths[i]))) return HIC_WRITE_WRITTEN;
    if (errno == EEXIST) return HIC_WRITE_EXISTS;
    if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return HIC_WRITE_NO_RENAME;
  }
  const int error = errno;
  unlinkat(folder.fd(), temporary, 0);
  errno = error;
  return HIC_WRITE_FAILED;
}

int32_t write_one(const hic_writes& batch, const Common& folder, hic::Breather& breather, uint64_t i) {
  if (best_naming == Naming::kNone) return write_named(batch, folder, breather, i);
  int32_t outcome = write_unnamed(batch, folder, breather, i);
  if (outcome != HIC_WRITE_NO_RENAME) return outcome;
  outcome = write_named(batch, folder, breather, i);
  if (outcome == HIC_WRITE_WRITTEN) best_naming = Naming::kNone;  // so it is the other way that cannot be had
  return outcome;
}

bool is_key(const char* key, size_t bytes) {
  if (!bytes || bytes > HIC_KEY_BYTES || *key == '-' || *key == '.') return false;
  uint8_t fits = 1;  // without a branch, so that the compiler looks at many letters at once
  for (size_t at = 0; at < bytes; ++at) {
    const uint8_t c = static_cast<uint8_t>(key[at]);
    const uint8_t letter = static_cast<uint8_t>((c | 0x20) - 'a') < 26, digit = static_cast<uint8_t>(c - '0') < 10;
    fits &= letter | digit | (c == '_') | (c == '-') | (c == '.');
  }
  return fits;
}

}  // namespace

uint64_t hic_files_place(hic_places* places) {
  static constexpr char kDigits[] = "0123456789abcdef";
  const size_t folder_bytes = strlen(places->folder);
  const char* key = places->keys;
  const char* const end = key + places->keys_bytes;
  char* out = places->memory;
  for (uint64_t i = 0; i < places->count; ++i) {
    const char* const key_end = i + 1 == places->count ? end : static_cast<const char*>(memchr(key, 0, end - key));
    if (!key_end || !is_key(key, key_end - key)) return i;
    const uint8_t shard = hic::xxh32(key, key_end - key) & (places->shards - 1);
    places->shard_of[i] = shard;
    places->paths[i] = out;
    out = static_cast<char*>(mempcpy(out, places->folder, folder_bytes));
    *out++ = '/', *out++ = kDigits[shard >> 4], *out++ = kDigits[shard & 15], *out++ = '/';
    out = static_cast<char*>(mempcpy(out, key, key_end - key));
    out = static_cast<char*>(mempcpy(out, ".kv", 4));
    key = key_end + 1;
  }
  return places->count;
}

int32_t hic_files_read(hic_reads* batch) {
  const Common folder(batch->paths, batch->count);
  hic::Breather breather;
  for (uint64_t i; (i = next(&batch->next)) < batch->count; breather.step()) {
    const int64_t outcome = read_one(*batch, folder, i);
    batch->errors[i] = outcome == HIC_READ_FAILED ? errno : 0;
    batch->outcomes[i] = outcome;
    if (outcome >= 0 && batch->names)  // while it is in the processor's cache
      batch->verdicts[i] = hic::judge(static_cast<const uint8_t*>(batch->buffers[i]), batch->bytes[i], *batch->names, i);
  }
  return HIC_OK;
}

int32_t hic_files_write(hic_writes* batch) {
  for (uint64_t i = 0; batch->names && i < batch->count; ++i)
    if (batch->bytes[i] < hic::kHeaderBytes)
      return hic::fail(HIC_INVALID, "object %llu has no room for a header", static_cast<unsigned long long>(i));
  const Common folder(batch->paths, batch->count);
  hic::Breather breather;
  for (uint64_t i; (i = next(&batch->next)) < batch->count;) {
    if (__atomic_load_n(&batch->full, __ATOMIC_RELAXED)) continue;
    if (batch->names) hic::seal(static_cast<uint8_t*>(batch->buffers[i]), batch->bytes[i], *batch->names, batch->numbers[i]);
    const int32_t outcome = write_one(*batch, folder, breather, i);  // while it is in the processor's cache
    batch->errors[i] = outcome == HIC_WRITE_FAILED ? errno : 0;
    batch->outcomes[i] = outcome;
    if (is_full(batch->errors[i])) __atomic_store_n(&batch->full, 1, __ATOMIC_RELAXED);
  }
  return HIC_OK;
}

int32_t hic_files_look_up(hic_lookups* batch) {
  const Common folder(batch->paths, batch->count);
  hic::Breather breather;
  for (uint64_t first; (first = take(&batch->next, kLookups)) < __atomic_load_n(&batch->leading, __ATOMIC_RELAXED);
       breather.step())
    for (uint64_t i = first; i < batch->count && i < first + kLookups; ++i) {
      struct stat found;
      const bool failed = fstatat(folder.fd(), folder(batch->paths[i]), &found, AT_SYMLINK_NOFOLLOW);
      if (!failed && S_ISREG(found.st_mode) && found.st_size) continue;
      end_at(*batch, i, failed && errno != ENOENT ? errno : 0);
      break;
    }
  return HIC_OK;
}
