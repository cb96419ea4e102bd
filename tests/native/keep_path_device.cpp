// The per-thread code of the CUDA kernel keep_path, run on the host: a warp's threads one by one, the last one first.
#include "cuda/keep_path.cuh"
using namespace dream;
template <class Word> static void run(const LaunchBuffer& b, const LaunchPath& p) {
  for (int lane = 0; lane < b.lanes; ++lane)
    for (int thread = kWarp - 1; thread >= 0; --thread) move_columns<Word>(b, p, lane, thread, kWarp);
}
extern "C" void keep(char* data, const int64_t* strides, int heads, int lanes, int row_bytes, int capacity, int word,
                     int64_t start, const int64_t* path, int length, int on_device) {
  const LaunchBuffer b{data, strides[0], strides[1], strides[2], heads, lanes, row_bytes, capacity};
  LaunchPath p{start, on_device ? path : nullptr, length, {}};
  for (int i = 0; !on_device && i < length; ++i) p.slots[i] = static_cast<int32_t>(path[i]);
  if (word == 16) run<uint4>(b, p);
  else if (word == 8) run<uint64_t>(b, p);
  else if (word == 4) run<uint32_t>(b, p);
  else if (word == 2) run<uint16_t>(b, p);
  else run<uint8_t>(b, p);
}
