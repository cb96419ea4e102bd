#pragma once
#include "dream/types.h"

namespace dream {

constexpr int kMaxPath = 64;

// One cache tensor (batch, heads, capacity, head_dim) with a contiguous last dimension. Sizes and strides in bytes.
struct CacheBuffer {
  void* data;            // read and written in place
  int64_t batch, heads;
  int64_t capacity;      // slots
  int64_t row_bytes;     // head_dim x element size
  int64_t batch_stride, head_stride, slot_stride;
};

// Slot start + path[i] moves to slot start + i in every buffer. Because path ascends strictly, no slot is written before
// it has been read when the rows of one (batch, head) move in order. Buffers do not overlap.
struct KeepPath {
  const CacheBuffer* buffers;  // (count) on the host
  int64_t count;
  int64_t start;               // slot of the root, >= 0
  const int64_t* path;         // (length) strictly ascending, >= 0
  int64_t length;              // 0 .. kMaxPath
  bool path_on_device;         // CUDA only: path is device memory; rows out of range are then not moved
};

// Throws std::invalid_argument before anything is written; of a path on the device only start and length are checked.
void check_path(const KeepPath& call);
void keep_path_cpu(const KeepPath& call, int threads);
void keep_path_cuda(const KeepPath& call, int device, void* stream);  // throws std::runtime_error on a CUDA error

}  // namespace dream
