// The CUDA border of every kernel's launcher: `const OnDevice current(device)`, launches, `check_launch(op)`.
#pragma once
#include <stdexcept>
#include <string>

#include "cuda/device.h"
#include "cuda/simt.cuh"
#include "dream/types.h"

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#error "torch works on the legacy default stream: build without per-thread default streams"
#endif

namespace dream {

// Makes a device's primary context current for one call, through the driver: cudaSetDevice would create a context on device 0
// when it restores. The first call for a device also prepares all kernels there.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
};

// Registers a function that runs once per device before its first launch, outside of any graph capture: it loads kernels and
// raises their limits of shared memory by `prepare`.
struct Prepared {
  explicit Prepared(void (*prepare)());
};

// After every launch: throws std::runtime_error with CUDA's words.
void check_launch(const char* op);

// Loads a kernel, and lets it use this much dynamic shared memory.
template <class Kernel>
void prepare(Kernel* kernel, size_t shared_bytes = 0);

#ifdef __CUDACC__
void check_cuda(const char* what, cudaError_t error);
template <class Kernel>
void prepare(Kernel* kernel, size_t shared_bytes) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes loaded;
  check_cuda("loading a kernel", cudaFuncGetAttributes(&loaded, function));
  check_cuda("reserving shared memory",
             cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
}
#else
template <class Kernel>
void prepare(Kernel* kernel, size_t shared_bytes) {
  simt::prepare(reinterpret_cast<const void*>(kernel), shared_bytes);
}
#endif

// Calls f with a value of the element type.
template <class Function>
void with_type(Dtype dtype, Function f) {
  switch (dtype) {
    case Dtype::f32: return f(float{});
    case Dtype::bf16: return f(__nv_bfloat16{});
    case Dtype::f16: return f(__half{});
  }
}

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
constexpr int64_t ceil_div(int64_t value, int64_t step) { return (value + step - 1) / step; }

}  // namespace dream
