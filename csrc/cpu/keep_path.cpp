#include "dream/keep_path.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace dream {

constexpr int64_t kParallelBytes = 1 << 20;  // below this a parallel region costs more than it saves

static std::invalid_argument refusal(const std::string& wanted, const std::string& got) {
  return std::invalid_argument("keep_path: path: wanted " + wanted + ", got " + got);
}

static int64_t length_of(const KeepPath& call, int64_t sequence) { return call.lengths ? call.lengths[sequence] : call.width; }

static void check_sequence(const KeepPath& call, int64_t sequence) {
  const int64_t start = call.start[sequence], length = length_of(call, sequence), *path = call.path + sequence * call.width;
  if (length < 0 || length > call.width)
    throw std::invalid_argument("keep_path: lengths: wanted 0 .. " + std::to_string(call.width) + ", got " + std::to_string(length));
  if (start < 0) throw std::invalid_argument("keep_path: start: wanted at least 0, got " + std::to_string(start));
  for (int64_t i = 0; i < length; ++i)
    if (path[i] < (i == 0 ? 0 : path[i - 1] + 1))
      throw refusal("strictly ascending values >= 0", std::to_string(path[i]) + " at " + std::to_string(i));
  for (int64_t b = 0; length > 0 && b < call.count; ++b)
    if (start >= call.buffers[b].capacity || path[length - 1] >= call.buffers[b].capacity - start)
      throw refusal("start + path below the capacity " + std::to_string(call.buffers[b].capacity) + " of buffers[" +
                        std::to_string(b) + "]",
                    std::to_string(start) + " + " + std::to_string(path[length - 1]));
}

static void move_rows(const KeepPath& call, const CacheBuffer& buffer, int64_t lane) {
  const int64_t batch = lane / buffer.heads, sequence = call.sequences == 1 ? 0 : batch;
  const int64_t length = length_of(call, sequence), *path = call.path + sequence * call.width;
  char* base = static_cast<char*>(buffer.data) + batch * buffer.batch_stride + lane % buffer.heads * buffer.head_stride +
               call.start[sequence] * buffer.slot_stride;
  for (int64_t i = 0; i < length; ++i)
    if (path[i] != i) std::memcpy(base + i * buffer.slot_stride, base + path[i] * buffer.slot_stride, buffer.row_bytes);
}

void keep_path_cpu(const KeepPath& call, int threads) {
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) check_sequence(call, sequence);
  int64_t bytes = 0;
  for (int64_t b = 0; b < call.count; ++b)
    bytes += call.buffers[b].batch * call.buffers[b].heads * call.buffers[b].row_bytes * call.width;
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes >= kParallelBytes) schedule(static)
  for (int64_t b = 0; b < call.count; ++b)
    for (int64_t lane = 0; lane < call.buffers[b].batch * call.buffers[b].heads; ++lane)
      move_rows(call, call.buffers[b], lane);
}

}  // namespace dream
