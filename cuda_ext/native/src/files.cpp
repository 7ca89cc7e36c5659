// Batches of whole files.
#include "capi/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "error.h"
#include "objects.h"

namespace {

// Without O_NONBLOCK somebody's pipe under the name of an object would block us for ever.
constexpr int kRead = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
constexpr int kCreate = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;

class File {
 public:
  File(const char* path, int flags, mode_t mode = 0) {
    do fd_ = open(path, flags, mode);
    while (fd_ < 0 && errno == EINTR);
  }
  ~File() { shut(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
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

int64_t mtime_ns(const struct stat& found) { return found.st_mtim.tv_sec * INT64_C(1000000000) + found.st_mtim.tv_nsec; }

uint64_t next(uint64_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// -> the bytes read, or a hic_read_outcome; FAILED leaves errno.
int64_t read_one(const hic_reads& batch, uint64_t i) {
  const File file(batch.paths[i], kRead);
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
int rename_new(const char* from, const char* to) {
#ifdef RENAME_NOREPLACE
  return renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
#else
  (void)from, (void)to;
  errno = ENOSYS;
  return -1;
#endif
}

bool fill(const File& file, const void* buffer, uint64_t bytes) {
  const uint8_t* at = static_cast<const uint8_t*>(buffer);
  do {
    const ssize_t now = write(file.fd(), at, bytes);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return false;
    at += now;
    bytes -= static_cast<uint64_t>(now);
  } while (bytes);
  return true;
}

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EROFS; }

// How a file gets a name that has been made without one: by its descriptor (older kernels let only root do that), by what /proc
// calls it, or not at all.
enum class Naming { kDescriptor, kProc, kNone };

std::atomic<Naming> best_naming{Naming::kDescriptor};

// As `link`; errno is EEXIST if something has the name.
bool give_name(const File& file, const char* path) {
  if (best_naming == Naming::kDescriptor) {
    if (!linkat(file.fd(), "", AT_FDCWD, path, AT_EMPTY_PATH)) return true;
    if (errno == EEXIST || is_full(errno)) return false;
  }
  char source[32];
  snprintf(source, sizeof source, "/proc/self/fd/%d", file.fd());
  if (linkat(AT_FDCWD, source, AT_FDCWD, path, AT_SYMLINK_FOLLOW)) return false;
  best_naming = Naming::kProc;
  return true;
}

// Made without a name and then given one, a new file costs a fifth less than one that is created and renamed, and a crash leaves
// nothing of it.  -> a hic_write_outcome, FAILED leaves errno; NO_RENAME, with nothing made, if it cannot be had here.
int32_t write_unnamed(const hic_writes& batch, uint64_t i) {
#ifdef O_TMPFILE
  const char* path = batch.paths[i];
  const char* slash = strrchr(path, '/');
  if (!slash) return HIC_WRITE_NO_RENAME;
  File file(std::string(path, slash).c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
  if (!file) {
    if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL) best_naming = Naming::kNone;
    return HIC_WRITE_NO_RENAME;
  }
  int32_t outcome = HIC_WRITE_FAILED;
  if (fill(file, batch.buffers[i], batch.bytes[i])) {
    if (give_name(file, path))
      outcome = HIC_WRITE_WRITTEN;
    else if (errno == EEXIST)
      outcome = give_name(file, batch.temporaries[i]) ? HIC_WRITE_EXISTS : HIC_WRITE_FAILED;
    else if (!is_full(errno))
      outcome = HIC_WRITE_NO_RENAME;
  }
  int error = errno;
  if (!file.shut() && outcome == HIC_WRITE_WRITTEN) {  // a file system that tells only now
    error = errno;
    outcome = HIC_WRITE_FAILED;
    unlink(path);
  }
  errno = error;
  return outcome;
#else
  (void)batch, (void)i;
  return HIC_WRITE_NO_RENAME;
#endif
}

// -> a hic_write_outcome; FAILED leaves errno.
int32_t write_named(const hic_writes& batch, uint64_t i) {
  const char* temporary = batch.temporaries[i];
  File file(temporary, kCreate, 0600);
  if (!file) return errno == ENOENT ? HIC_WRITE_NO_FOLDER : HIC_WRITE_FAILED;
  if (fill(file, batch.buffers[i], batch.bytes[i]) && file.shut()) {
    if (!rename_new(temporary, batch.paths[i])) return HIC_WRITE_WRITTEN;
    if (errno == EEXIST) return HIC_WRITE_EXISTS;
    if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return HIC_WRITE_NO_RENAME;
  }
  const int error = errno;
  unlink(temporary);
  errno = error;
  return HIC_WRITE_FAILED;
}

int32_t write_one(const hic_writes& batch, uint64_t i) {
  if (best_naming == Naming::kNone) return write_named(batch, i);
  int32_t outcome = write_unnamed(batch, i);
  if (outcome != HIC_WRITE_NO_RENAME) return outcome;
  outcome = write_named(batch, i);
  if (outcome == HIC_WRITE_WRITTEN) best_naming = Naming::kNone;  // so it is the other way that cannot be had
  return outcome;
}

}  // namespace

int32_t hic_files_read(hic_reads* batch) {
  for (uint64_t i; (i = next(&batch->next)) < batch->count;) {
    const int64_t outcome = read_one(*batch, i);
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
  for (uint64_t i; (i = next(&batch->next)) < batch->count;) {
    if (__atomic_load_n(&batch->full, __ATOMIC_RELAXED)) continue;
    if (batch->names) hic::seal(static_cast<uint8_t*>(batch->buffers[i]), batch->bytes[i], *batch->names, batch->numbers[i]);
    const int32_t outcome = write_one(*batch, i);  // while it is in the processor's cache
    batch->errors[i] = outcome == HIC_WRITE_FAILED ? errno : 0;
    batch->outcomes[i] = outcome;
    if (is_full(batch->errors[i])) __atomic_store_n(&batch->full, 1, __ATOMIC_RELAXED);
  }
  return HIC_OK;
}

uint64_t hic_files_leading(uint64_t count, const char* const* paths, int32_t* error) {
  *error = 0;
  for (uint64_t i = 0; i < count; ++i) {
    struct stat found;
    if (lstat(paths[i], &found)) {
      if (errno != ENOENT) *error = errno;
      return i;
    }
    if (!S_ISREG(found.st_mode) || found.st_size == 0) return i;
  }
  return count;
}
