// Makes a device's primary context current for one call, through the driver: cudaSetDevice would create a context on device
// 0 when it restores. The driver's functions are looked up at run time, so that the module loads without a driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/device.h"

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#error "torch works on the legacy default stream: build without per-thread default streams"
#endif

namespace dream {

inline void check_cuda(const char* op, cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": CUDA: " + cudaGetErrorString(error));
}

template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  check_cuda(name, cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(function);
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    static const auto push = driver_function<CUresult (*)(CUcontext)>("cuCtxPushCurrent");
    static const auto pop = driver_function<CUresult (*)(CUcontext*)>("cuCtxPopCurrent");
    check(push(primary(device)), "cuCtxPushCurrent");
    pop_ = pop;
  }
  ~OnDevice() {
    CUcontext popped;
    pop_(&popped);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  CUresult (*pop_)(CUcontext*);

  static void check(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": CUDA driver error " + std::to_string(result));
  }

  // Retained once a device for the life of the process, as torch does.
  static CUcontext primary(int device) {
    constexpr int kDevices = 64;
    static CUcontext contexts[kDevices];
    static const auto retain = driver_function<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
    static std::mutex mutex;
    const std::lock_guard<std::mutex> locked(mutex);
    if (device < 0 || device >= kDevices) throw std::runtime_error("CUDA device index out of range");
    if (!contexts[device]) check(retain(&contexts[device], device), "cuDevicePrimaryCtxRetain");
    return contexts[device];
  }
};

}  // namespace dream
