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
// it has been read when the rows of one (batch, head) move in order. Buffers do not overlap. start, path and lengths are in
// the buffers' memory: on a device the host does not read them, and a row out of range is not moved.
struct KeepPath {
  const CacheBuffer* buffers;  // (count) on the host
  int64_t count;
  const int64_t* start;        // (sequences) slot of the root, >= 0
  const int64_t* path;         // (sequences, width) strictly ascending, >= 0
  const int64_t* lengths;      // (sequences) entries of path that count, 0 .. width; null = width
  int64_t sequences;           // 1 serves every batch row of the buffers; otherwise their batch
  int64_t width;               // 0 .. kMaxPath
};

void keep_path_cpu(const KeepPath& call, int threads);  // throws std::invalid_argument before anything is written
void keep_path_cuda(const KeepPath& call, int device, void* stream);

}  // namespace dream
