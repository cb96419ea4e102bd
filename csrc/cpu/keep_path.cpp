#include "dream/keep_path.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace dream {

constexpr int64_t kParallelBytes = 1 << 20;  // below this a parallel region costs more than it saves

static std::invalid_argument refusal(const std::string& wanted, const std::string& got) {
  return std::invalid_argument("keep_path: path: wanted " + wanted + ", got " + got);
}

void check_path(const KeepPath& call) {
  if (call.length > kMaxPath) throw refusal("at most 64 slots", std::to_string(call.length));
  if (call.length == 0) return;
  for (int64_t i = 0; !call.path_on_device && i < call.length; ++i)
    if (call.path[i] < (i == 0 ? 0 : call.path[i - 1] + 1))
      throw refusal("strictly ascending values >= 0", std::to_string(call.path[i]) + " at " + std::to_string(i));
  const int64_t last = call.path_on_device ? call.length - 1 : call.path[call.length - 1];
  for (int64_t b = 0; b < call.count; ++b)
    if (call.start >= call.buffers[b].capacity || last >= call.buffers[b].capacity - call.start)
      throw refusal("start + path below the capacity " + std::to_string(call.buffers[b].capacity) + " of buffers[" +
                        std::to_string(b) + "]",
                    std::to_string(call.start) + " + " + std::to_string(last));
}

static void move_rows(const KeepPath& call, const CacheBuffer& buffer, int64_t lane) {
  char* base = static_cast<char*>(buffer.data) + lane / buffer.heads * buffer.batch_stride +
               lane % buffer.heads * buffer.head_stride + call.start * buffer.slot_stride;
  for (int64_t i = 0; i < call.length; ++i)
    if (call.path[i] != i)
      std::memcpy(base + i * buffer.slot_stride, base + call.path[i] * buffer.slot_stride, buffer.row_bytes);
}

void keep_path_cpu(const KeepPath& call, int threads) {
  check_path(call);
  int64_t bytes = 0;
  for (int64_t b = 0; b < call.count; ++b)
    bytes += call.buffers[b].batch * call.buffers[b].heads * call.buffers[b].row_bytes * call.length;
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes >= kParallelBytes) schedule(static)
  for (int64_t b = 0; b < call.count; ++b)
    for (int64_t lane = 0; lane < call.buffers[b].batch * call.buffers[b].heads; ++lane)
      move_rows(call, call.buffers[b], lane);
}

}  // namespace dream
