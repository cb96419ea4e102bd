#include "cuda/device.cuh"

#ifdef __CUDACC__
#include <cuda.h>
#endif

#include <mutex>
#include <vector>

namespace dream {

static std::vector<void (*)()>& preparations() {
  static std::vector<void (*)()> all;
  return all;
}

Prepared::Prepared(void (*prepare)()) { preparations().push_back(prepare); }

void warm_device(int device) { const OnDevice current(device); }

#ifdef __CUDACC__

void check_cuda(const char* what, cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": CUDA: " + cudaGetErrorString(error));
}

void check_launch(const char* op) { check_cuda(op, cudaGetLastError()); }

namespace {

// The driver's functions are looked up at run time, so that the module loads without a driver.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  check_cuda(name, cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(function);
}

void check_driver(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": CUDA driver error " + std::to_string(result));
}

void push(CUcontext context) {
  static const auto push_current = driver_function<CUresult (*)(CUcontext)>("cuCtxPushCurrent");
  check_driver(push_current(context), "cuCtxPushCurrent");
}

void pop() {
  static const auto pop_current = driver_function<CUresult (*)(CUcontext*)>("cuCtxPopCurrent");
  CUcontext popped;
  pop_current(&popped);
}

// Retained once a device for the life of the process, as torch does; kernels are prepared when a device is met first.
CUcontext primary(int device) {
  constexpr int kDevices = 64;
  static CUcontext contexts[kDevices];
  static std::mutex mutex;
  const std::lock_guard<std::mutex> locked(mutex);
  if (device < 0 || device >= kDevices) throw std::runtime_error("CUDA device index out of range");
  if (contexts[device]) return contexts[device];
  static const auto retain = driver_function<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
  CUcontext context;
  check_driver(retain(&context, device), "cuDevicePrimaryCtxRetain");
  push(context);
  try {
    for (const auto prepare_kernels : preparations()) prepare_kernels();
  } catch (...) {
    pop();
    throw;
  }
  pop();
  return contexts[device] = context;
}

}  // namespace

OnDevice::OnDevice(int device) { push(primary(device)); }
OnDevice::~OnDevice() { pop(); }

int cuda_runtime_version() { return CUDART_VERSION; }

int cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

#else  // the emulator has neither contexts nor versions

void check_launch(const char*) {}

OnDevice::OnDevice(int) {
  static const bool all_prepared = [] {
    for (const auto prepare_kernels : preparations()) prepare_kernels();
    return true;
  }();
  (void)all_prepared;
}

OnDevice::~OnDevice() {}
int cuda_runtime_version() { return 0; }
int cuda_driver_version() { return 0; }

#endif

}  // namespace dream
