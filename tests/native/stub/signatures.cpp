// TEST ONLY, compiled and never run: are our declarations of the driver those of cuda.h?
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

#include "src/cuda_api.h"

// What a calling convention sees of a parameter: a pointer, or an integer of some size.
template <typename T>
constexpr int kind = std::is_pointer_v<T> ? 100 : (std::is_integral_v<T> || std::is_enum_v<T>) ? static_cast<int>(sizeof(T)) : -1;

template <typename Ours, typename Theirs>
struct Same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct Same<R (*)(A...), S (*)(B...)> : std::bool_constant<kind<R> == kind<S> && sizeof...(A) == sizeof...(B)> {
  static_assert(((kind<A> == kind<B> && kind<A> > 0) && ...), "a parameter differs");
};

#define COMPARE(call, arguments) \
  static_assert(Same<decltype(hic::cuda::Api::call), decltype(&::call)>::value, #call " differs from cuda.h");
HIC_CUDA_CALLS(COMPARE)

static_assert(Same<hic::cuda::Batch12080, PFN_cuMemcpyBatchAsync_v12080>::value, "cuMemcpyBatchAsync of 12.8");
static_assert(Same<hic::cuda::Batch13000, PFN_cuMemcpyBatchAsync_v13000>::value, "cuMemcpyBatchAsync of 13.0");

using Ours = hic::cuda::CopyAttributes;
static_assert(sizeof(Ours) == sizeof(CUmemcpyAttributes), "CUmemcpyAttributes");
static_assert(offsetof(Ours, source_order) == offsetof(CUmemcpyAttributes, srcAccessOrder), "srcAccessOrder");
static_assert(offsetof(Ours, flags) == offsetof(CUmemcpyAttributes, flags), "flags");

#define EQUAL(ours, theirs) static_assert(static_cast<int>(hic::cuda::ours) == static_cast<int>(theirs), #theirs)
EQUAL(SUCCESS, CUDA_SUCCESS);
EQUAL(INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
EQUAL(NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
EQUAL(NOT_READY, CUDA_ERROR_NOT_READY);
EQUAL(STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
EQUAL(EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
EQUAL(CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
EQUAL(REGISTER_PORTABLE_MAPPED, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
EQUAL(SOURCE_IN_STREAM_ORDER, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
EQUAL(SOURCE_IN_ANY_ORDER, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
EQUAL(ATTRIBUTE_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
EQUAL(ATTRIBUTE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
EQUAL(ATTRIBUTE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
