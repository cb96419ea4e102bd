#include "dream/keep_path.h"

#include <algorithm>

#include "cuda/device.cuh"
#include "cuda/keep_path.cuh"

namespace dream {

template <class Word>
__global__ void __launch_bounds__(kWarp* kLanesPerBlock) keep_path_kernel(const __grid_constant__ KeepPathLaunch launch) {
  const LaunchBuffer& buffer = launch.buffers[blockIdx.y];
  const int lane = blockIdx.x * kLanesPerBlock + threadIdx.y;
  if (lane < buffer.lanes) move_columns<Word>(buffer, launch.path, lane, threadIdx.x, kWarp);
}

// The widest word that every row of these buffers is aligned to.
static int word_bytes(const CacheBuffer* buffers, int64_t count) {
  uint64_t bits = 16;
  for (int64_t b = 0; b < count; ++b) {
    const CacheBuffer& x = buffers[b];
    bits |= reinterpret_cast<uintptr_t>(x.data) | static_cast<uint64_t>(x.row_bytes | x.batch_stride | x.head_stride | x.slot_stride);
  }
  return static_cast<int>(bits & -bits);
}

static void launch(const KeepPathLaunch& params, int count, int lanes, int word, cudaStream_t stream) {
  const dim3 grid((lanes + kLanesPerBlock - 1) / kLanesPerBlock, count), block(kWarp, kLanesPerBlock);
  switch (word) {
    case 16: keep_path_kernel<uint4><<<grid, block, 0, stream>>>(params); break;
    case 8: keep_path_kernel<uint64_t><<<grid, block, 0, stream>>>(params); break;
    case 4: keep_path_kernel<uint32_t><<<grid, block, 0, stream>>>(params); break;
    case 2: keep_path_kernel<uint16_t><<<grid, block, 0, stream>>>(params); break;
    default: keep_path_kernel<uint8_t><<<grid, block, 0, stream>>>(params); break;
  }
  check_cuda("keep_path", cudaGetLastError());
}

void keep_path_cuda(const KeepPath& call, int device, void* stream) {
  if (call.length == 0) return;
  const OnDevice current(device);
  KeepPathLaunch params{};
  params.path.start = call.start;
  params.path.length = static_cast<int32_t>(call.length);
  params.path.on_device = call.path_on_device ? call.path : nullptr;
  for (int64_t i = 0; !call.path_on_device && i < call.length; ++i) params.path.slots[i] = static_cast<int32_t>(call.path[i]);
  for (int64_t first = 0; first < call.count; first += kLaunchBuffers) {
    const int count = static_cast<int>(std::min<int64_t>(kLaunchBuffers, call.count - first));
    int lanes = 0;
    for (int b = 0; b < count; ++b) {
      const CacheBuffer& x = call.buffers[first + b];
      params.buffers[b] = {static_cast<char*>(x.data),    x.batch_stride, x.head_stride, x.slot_stride, static_cast<int32_t>(x.heads),
                           static_cast<int32_t>(x.batch * x.heads), static_cast<int32_t>(x.row_bytes), static_cast<int32_t>(x.capacity)};
      lanes = std::max(lanes, params.buffers[b].lanes);
    }
    if (lanes > 0) launch(params, count, lanes, word_bytes(call.buffers + first, count), static_cast<cudaStream_t>(stream));
  }
}

int cuda_runtime_version() { return CUDART_VERSION; }

int cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace dream
