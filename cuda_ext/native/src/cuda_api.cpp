#include "cuda_api.h"

#include <dlfcn.h>

#include "capi.h"
#include "error.h"

namespace hic::cuda {

int Api::open(const char* path) {
  const char* name = *path != '\0' ? path : "libcuda.so.1";
  library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return hic::fail(HIC_SYSTEM, "no CUDA driver: %s", dlerror());
#define HIC_CUDA_FIND(call, arguments)                                                       \
  call = reinterpret_cast<decltype(call)>(dlsym(library, #call));                            \
  if (call == nullptr) return hic::fail(HIC_SYSTEM, "%s has no %s: the driver is too old", name, #call);
  HIC_CUDA_CALLS(HIC_CUDA_FIND)
#undef HIC_CUDA_FIND
  Result result = cuInit(0);
  if (result != SUCCESS) return fail("cuInit", result);
  result = cuDriverGetVersion(&driver_version);
  if (result != SUCCESS) return fail("cuDriverGetVersion", result);
  // The version asked for decides the signature, and a driver that is older than it answers with its own: never ask an old
  // driver for 13.0.
  void* found = nullptr;
  int status = 0;
  const int version = driver_version >= 13000 ? 13000 : driver_version >= 12080 ? 12080 : 0;
  if (version != 0 && cuGetProcAddress_v2("cuMemcpyBatchAsync", &found, version, 0, &status) == SUCCESS && status == 0) {
    if (version == 13000)
      batch_13000 = reinterpret_cast<Batch13000>(found);
    else
      batch_12080 = reinterpret_cast<Batch12080>(found);
  }
  return HIC_OK;
}

int Api::fail(const char* call, Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != SUCCESS || name == nullptr) name = "unknown error";
  if (cuGetErrorString(result, &text) != SUCCESS || text == nullptr) text = "no text";
  return hic::fail(is_fatal(result) ? HIC_CUDA_LOST : HIC_CUDA, "%s: %s (%d): %s", call, name, result, text);
}

bool is_fatal(Result result) {
  switch (result) {
    case 4:    // the driver is shutting down
    case 46:   // device unavailable
    case 201:  // invalid context
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 226:  // contained error
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context is destroyed
    case 710:  // assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failure
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

}  // namespace hic::cuda
