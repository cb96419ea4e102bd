#include "dream/keep_path.h"

#include <algorithm>

#include "cuda/device.cuh"

namespace dream {

constexpr int kLaunchBuffers = 160;  // keys and values of 80 layers in one launch; the parameters stay far below 32 KB
constexpr int kRowsInFlight = 4;     // loads before the stores that may depend on them
constexpr int kLanesPerBlock = 4;    // warps, each with one (batch, head) of one buffer

struct LaunchBuffer {
  char* data;
  int64_t batch_stride, head_stride, slot_stride;  // bytes
  int32_t heads, lanes;                            // lanes = batch x heads
  int32_t row_bytes;
  int64_t capacity;
};

struct KeepPathLaunch {
  const int64_t *start, *path, *lengths;
  int32_t sequences, width;
  LaunchBuffer buffers[kLaunchBuffers];
};

// Moves the columns column, column + kWarp, ... (of type Word) of one lane's rows. A column belongs to one thread, and path
// ascends, so target slot i <= path[i] < path[i + 1]: loads of later rows may run ahead of earlier stores, and no barrier is
// needed.
template <class Word>
__device__ __forceinline__ void move_columns(const LaunchBuffer& buffer, char* base, const int64_t* path, int64_t start, int length) {
  for (int column = threadIdx.x; column < buffer.row_bytes / static_cast<int>(sizeof(Word)); column += kWarp) {
    for (int first = 0; first < length; first += kRowsInFlight) {
      Word word[kRowsInFlight];
      bool moves[kRowsInFlight];
#pragma unroll
      for (int j = 0; j < kRowsInFlight; ++j) {
        const int i = first + j;
        const int64_t slot = i < length ? path[i] : -1;
        moves[j] = slot > i && slot < buffer.capacity - start;
        if (moves[j]) word[j] = reinterpret_cast<const Word*>(base + slot * buffer.slot_stride)[column];
      }
#pragma unroll
      for (int j = 0; j < kRowsInFlight; ++j)
        if (moves[j]) reinterpret_cast<Word*>(base + (first + j) * buffer.slot_stride)[column] = word[j];
    }
  }
}

template <class Word>
__global__ void __launch_bounds__(kWarp* kLanesPerBlock) keep_path_kernel(const __grid_constant__ KeepPathLaunch launch) {
  const LaunchBuffer& buffer = launch.buffers[blockIdx.y];
  const int lane = blockIdx.x * kLanesPerBlock + threadIdx.y;
  if (lane >= buffer.lanes) return;
  const int batch = lane / buffer.heads, sequence = launch.sequences == 1 ? 0 : batch;
  const int64_t start = launch.start[sequence];
  const int64_t length = launch.lengths ? launch.lengths[sequence] : launch.width;
  if (start < 0 || start >= buffer.capacity) return;
  char* base = buffer.data + batch * buffer.batch_stride + lane % buffer.heads * buffer.head_stride + start * buffer.slot_stride;
  move_columns<Word>(buffer, base, launch.path + int64_t{sequence} * launch.width, start,
                     static_cast<int>(min(length, static_cast<int64_t>(launch.width))));
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
  const dim3 grid(static_cast<unsigned>(ceil_div(lanes, kLanesPerBlock)), count), block(kWarp, kLanesPerBlock);
  switch (word) {
    case 16: SIMT_LAUNCH(keep_path_kernel<uint4>, grid, block, 0, stream, params); break;
    case 8: SIMT_LAUNCH(keep_path_kernel<uint64_t>, grid, block, 0, stream, params); break;
    case 4: SIMT_LAUNCH(keep_path_kernel<uint32_t>, grid, block, 0, stream, params); break;
    case 2: SIMT_LAUNCH(keep_path_kernel<uint16_t>, grid, block, 0, stream, params); break;
    default: SIMT_LAUNCH(keep_path_kernel<uint8_t>, grid, block, 0, stream, params); break;
  }
  check_launch("keep_path");
}

static const Prepared prepared([] {
  prepare(keep_path_kernel<uint4>), prepare(keep_path_kernel<uint64_t>), prepare(keep_path_kernel<uint32_t>);
  prepare(keep_path_kernel<uint16_t>), prepare(keep_path_kernel<uint8_t>);
});

void keep_path_cuda(const KeepPath& call, int device, void* stream) {
  if (call.width == 0) return;
  const OnDevice current(device);
  KeepPathLaunch params{call.start, call.path, call.lengths, static_cast<int32_t>(call.sequences), static_cast<int32_t>(call.width), {}};
  for (int64_t first = 0; first < call.count; first += kLaunchBuffers) {
    const int count = static_cast<int>(std::min<int64_t>(kLaunchBuffers, call.count - first));
    int lanes = 0;
    for (int b = 0; b < count; ++b) {
      const CacheBuffer& x = call.buffers[first + b];
      params.buffers[b] = {static_cast<char*>(x.data), x.batch_stride, x.head_stride, x.slot_stride, static_cast<int32_t>(x.heads),
                           static_cast<int32_t>(x.batch * x.heads), static_cast<int32_t>(x.row_bytes), x.capacity};
      lanes = std::max(lanes, params.buffers[b].lanes);
    }
    if (lanes > 0) launch(params, count, lanes, word_bytes(call.buffers + first, count), static_cast<cudaStream_t>(stream));
  }
}

}  // namespace dream
