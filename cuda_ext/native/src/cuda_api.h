// The part of the CUDA driver that is used, by its stable symbol names; types as cuda.h has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hic::cuda {

typedef int Result;  // CUresult
typedef int Device;
typedef struct Opaque* Handle;  // CUcontext, CUmodule, CUfunction, CUstream, CUevent
typedef unsigned long long Address;

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  NOT_SUPPORTED = 801,
  NOT_READY = 600,
  STREAM_NON_BLOCKING = 1,
  EVENT_DISABLE_TIMING = 2,
  CAPTURE_RELAXED = 2,
  REGISTER_PORTABLE_MAPPED = 1 | 2,
  SOURCE_IN_STREAM_ORDER = 1,
  SOURCE_IN_ANY_ORDER = 3,
  ATTRIBUTE_MULTIPROCESSORS = 16,
  ATTRIBUTE_MAJOR = 75,
  ATTRIBUTE_MINOR = 76,
};

struct Location {
  int type, id;
};
struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;
  Location source_hint, target_hint;
  unsigned flags;
};

#define HIC_CUDA_CALLS(X)                                                                                              \
  X(cuInit, (unsigned))                                                                                                \
  X(cuDriverGetVersion, (int*))                                                                                        \
  X(cuDeviceGet, (Device*, int))                                                                                       \
  X(cuDeviceGetName, (char*, int, Device))                                                                             \
  X(cuDeviceGetPCIBusId, (char*, int, Device))                                                                         \
  X(cuDeviceGetAttribute, (int*, int, Device))                                                                         \
  X(cuDevicePrimaryCtxRetain, (Handle*, Device))                                                                       \
  X(cuDevicePrimaryCtxRelease_v2, (Device))                                                                            \
  X(cuCtxPushCurrent_v2, (Handle))                                                                                     \
  X(cuCtxPopCurrent_v2, (Handle*))                                                                                     \
  X(cuCtxGetStreamPriorityRange, (int*, int*))                                                                         \
  X(cuThreadExchangeStreamCaptureMode, (int*))                                                                         \
  X(cuStreamCreateWithPriority, (Handle*, unsigned, int))                                                              \
  X(cuStreamDestroy_v2, (Handle))                                                                                      \
  X(cuStreamWaitEvent, (Handle, Handle, unsigned))                                                                     \
  X(cuStreamIsCapturing, (Handle, int*))                                                                               \
  X(cuEventCreate, (Handle*, unsigned))                                                                                \
  X(cuEventDestroy_v2, (Handle))                                                                                       \
  X(cuEventRecord, (Handle, Handle))                                                                                   \
  X(cuEventQuery, (Handle))                                                                                            \
  X(cuLaunchHostFunc, (Handle, void (*)(void*), void*))                                                                \
  X(cuMemcpyAsync, (Address, Address, size_t, Handle))                                                                 \
  X(cuMemAlloc_v2, (Address*, size_t))                                                                                 \
  X(cuMemFree_v2, (Address))                                                                                           \
  X(cuMemHostRegister_v2, (void*, size_t, unsigned))                                                                   \
  X(cuMemHostUnregister, (void*))                                                                                      \
  X(cuMemHostGetDevicePointer_v2, (Address*, void*, unsigned))                                                         \
  X(cuModuleLoadData, (Handle*, const void*))                                                                          \
  X(cuModuleUnload, (Handle))                                                                                          \
  X(cuModuleGetFunction, (Handle*, Handle, const char*))                                                               \
  X(cuLaunchKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**)) \
  X(cuGetErrorName, (Result, const char**))                                                                            \
  X(cuGetErrorString, (Result, const char**))                                                                          \
  X(cuGetProcAddress_v2, (const char*, void**, int, uint64_t, int*))

// cuMemcpyBatchAsync as CUDA 12.8 has it, and as 13.0 has it under the same name.
typedef Result (*Batch12080)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*, Handle);
typedef Result (*Batch13000)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t, Handle);

struct Api {
#define HIC_CUDA_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  HIC_CUDA_CALLS(HIC_CUDA_MEMBER)
#undef HIC_CUDA_MEMBER
  void* library = nullptr;
  int driver_version = 0;
  Batch12080 batch_12080 = nullptr;  // at most one of the two
  Batch13000 batch_13000 = nullptr;

  int open(const char* path);  // a hic_code; opens the library once and for all: a driver is never unloaded
  int fail(const char* call, Result result) const;  // HIC_CUDA or HIC_CUDA_LOST, with the driver's text
};

// Whether the result means that the context is gone: every later call of this process on this device fails, too.
bool is_fatal(Result result);

}  // namespace hic::cuda
