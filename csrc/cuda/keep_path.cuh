// The device code of keep_path. It also compiles as plain C++ (DREAM_DEVICE empty), which is how it is tested without a GPU.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define DREAM_DEVICE __device__ __forceinline__
#else
#define DREAM_DEVICE inline
struct alignas(16) uint4 { uint32_t x, y, z, w; };
#endif

namespace dream {

constexpr int kLaunchBuffers = 160;  // keys and values of 80 layers in one launch; the parameters stay far below 32 KB
constexpr int kRowsInFlight = 4;
constexpr int kWarp = 32, kLanesPerBlock = 4;

struct LaunchBuffer {
  char* data;
  int64_t batch_stride, head_stride, slot_stride;  // bytes
  int32_t heads, lanes;                            // lanes = batch x heads
  int32_t row_bytes, capacity;
};

struct LaunchPath {
  int64_t start;
  const int64_t* on_device;  // null: `slots` holds the path
  int32_t length;
  int32_t slots[64];
};

struct KeepPathLaunch {
  LaunchPath path;
  LaunchBuffer buffers[kLaunchBuffers];
};

// Moves the columns column, column + step, ... (of type Word) of one lane's rows. A column belongs to one thread, and
// path ascends, so target slot i <= path[i] < path[i + 1]: loads of later rows may run ahead of earlier stores, and no barrier is needed.
template <class Word>
DREAM_DEVICE void move_columns(const LaunchBuffer& buffer, const LaunchPath& path, int lane, int column, int step) {
  char* base = buffer.data + lane / buffer.heads * buffer.batch_stride + lane % buffer.heads * buffer.head_stride;
  for (; column < buffer.row_bytes / static_cast<int>(sizeof(Word)); column += step) {
    for (int first = 0; first < path.length; first += kRowsInFlight) {
      Word word[kRowsInFlight];
      bool moves[kRowsInFlight];
      for (int j = 0; j < kRowsInFlight; ++j) {
        const int i = first + j;
        const int64_t slot = i >= path.length ? -1 : path.on_device ? path.on_device[i] : path.slots[i];
        moves[j] = slot >= 0 && slot != i && path.start + slot < buffer.capacity && path.start + i < buffer.capacity;
        if (moves[j]) word[j] = reinterpret_cast<const Word*>(base + (path.start + slot) * buffer.slot_stride)[column];
      }
      for (int j = 0; j < kRowsInFlight; ++j)
        if (moves[j]) reinterpret_cast<Word*>(base + (path.start + first + j) * buffer.slot_stride)[column] = word[j];
    }
  }
}

}  // namespace dream
