#include "dream/select_visual.h"

#include <algorithm>
#include <limits>

#include "cuda/device.cuh"
#include "cuda/launch_table.h"

namespace dream {

constexpr int kSelectWarps = kSelectThreads / kWarp;
constexpr int kSelectStep = kSelectThreads * kSelectItems;
constexpr int kDigit = 11;  // three digits make a key; sign, exponent and two bits of mantissa spread scores over the first one's bins
constexpr int kBins = 1 << kDigit;
constexpr int kBinsPerThread = kBins / kSelectThreads;
static_assert(kSelectWarps == kWarp, "a warp scans the sums of all warps, one a lane");
static_assert(kSelectStep < 1 << 16, "two counts of a step share a word");

struct SelectLaunch {
  const float* scores;
  int64_t* indices;
  int32_t v, keep;
};

struct GatherTensor {
  const char* data;
  char* out;
  int64_t row_bytes;
  int32_t words;                   // per row, of 1 << word_shift bytes
  int16_t word_shift, lane_shift;  // 1 << lane_shift threads share a row
};

struct GatherLaunch {
  const int64_t* indices;
  int32_t v, keep;
  GatherTensor tensors[kGatherTensors];
};

// Larger scores have larger keys, and equal scores equal ones: NaN is -inf, -0 is 0.
__device__ __forceinline__ uint32_t key_of(float score) {
  uint32_t bits = __float_as_uint(score);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;
  if (bits == 0x80000000u) bits = 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

struct BlockSum {
  uint32_t before, total;  // over the warps before this one; over the block
};

// `x` is this warp's sum. No thread may still be reading `sums` (kSelectWarps words).
__device__ __forceinline__ BlockSum sum_warps(uint32_t x, uint32_t* sums) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) sums[warp] = x;
  __syncthreads();
  const uint32_t inclusive = inclusive_sum(sums[lane]);
  return {__shfl_sync(kAllLanes, inclusive, warp) - x, __shfl_sync(kAllLanes, inclusive, kWarp - 1)};
}

struct Threshold {
  uint32_t key;   // of the keep-th best score
  uint32_t ties;  // scores with this key that are kept
};

// Counts the keys that agree with `known` from bit `top` up, by the digit at `shift`.
__device__ __forceinline__ void count_digits(const SelectLaunch& p, uint32_t known, int top, int shift, uint32_t* histogram) {
  for (int step = threadIdx.x; step < p.v; step += kSelectStep) {
#pragma unroll
    for (int j = 0; j < kSelectItems; ++j) {
      const int i = step + j * kSelectThreads;
      if (i >= p.v) break;
      const uint32_t key = key_of(p.scores[i]);
      if (static_cast<uint64_t>(key ^ known) >> top == 0) atomicAdd(&histogram[key >> shift & (kBins - 1)], 1u);
    }
  }
}

// Digit by digit from the top: the bin in which the keep-th best key lies. Thread t owns the t-th highest bins throughout.
__device__ __forceinline__ Threshold find_threshold(const SelectLaunch& p, uint32_t* histogram, uint32_t* sums, Threshold* found) {
  uint32_t* own = histogram + (kSelectThreads - 1 - threadIdx.x) * kBinsPerThread;
  Threshold threshold{0, static_cast<uint32_t>(p.keep)};
  for (int top = 32; top > 0; top -= kDigit) {
    const int shift = max(top - kDigit, 0);
#pragma unroll
    for (int b = 0; b < kBinsPerThread; ++b) own[b] = 0;
    __syncthreads();
    count_digits(p, threshold.key, top, shift, histogram);
    __syncthreads();
    uint32_t mine = 0;
#pragma unroll
    for (int b = 0; b < kBinsPerThread; ++b) mine += own[b];
    const uint32_t up_to = inclusive_sum(mine);
    uint32_t above = sum_warps(__shfl_sync(kAllLanes, up_to, kWarp - 1), sums).before + up_to - mine;
#pragma unroll
    for (int b = kBinsPerThread - 1; b >= 0; --b) {  // at most one bin of the block holds the wanted key
      const uint32_t in_bin = own[b];
      if (above < threshold.ties && threshold.ties <= above + in_bin)
        *found = {threshold.key | static_cast<uint32_t>(own - histogram + b) << shift, threshold.ties - above};
      above += in_bin;
    }
    __syncthreads();
    threshold = *found;
  }
  return threshold;
}

// Writes the indices of the keys above the threshold and of the first `ties` keys at it, in ascending order. A warp takes
// neighbouring scores, so that counts of lanes and warps in order are counts of indices in order.
__device__ __forceinline__ void compact(const SelectLaunch& p, const Threshold& threshold, uint32_t (*sums)[kSelectWarps]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned lower = (1u << lane) - 1;
  uint32_t above_before = 0, ties_before = 0;
  for (int start = 0, buffer = 0; start < p.v; start += kSelectStep, buffer ^= 1) {  // two buffers: one barrier a step
    const int first = start + warp * kWarp * kSelectItems + lane;
    unsigned above[kSelectItems], ties[kSelectItems];
    uint32_t counts = 0;  // ties in the low half, keys above in the high half
#pragma unroll
    for (int j = 0; j < kSelectItems; ++j) {
      const int i = first + j * kWarp;
      const uint32_t key = i < p.v ? key_of(p.scores[i]) : 0;  // no score has key 0
      above[j] = __ballot_sync(kAllLanes, key > threshold.key);
      ties[j] = __ballot_sync(kAllLanes, key == threshold.key);
      counts += __popc(above[j]) << 16 | __popc(ties[j]);
    }
    const BlockSum block = sum_warps(counts, sums[buffer]);
    uint32_t above_here = above_before + (block.before >> 16), ties_here = ties_before + (block.before & 0xffff);
#pragma unroll
    for (int j = 0; j < kSelectItems; ++j) {
      const uint32_t ties_up_to = ties_here + __popc(ties[j] & lower);
      const uint32_t place = above_here + __popc(above[j] & lower) + min(ties_up_to, threshold.ties);
      const bool kept = above[j] >> lane & 1 || (ties[j] >> lane & 1 && ties_up_to < threshold.ties);
      if (kept && place < static_cast<uint32_t>(p.keep)) p.indices[place] = first + j * kWarp;
      above_here += __popc(above[j]), ties_here += __popc(ties[j]);
    }
    above_before += block.total >> 16, ties_before += block.total & 0xffff;
  }
}

__global__ void __launch_bounds__(kSelectThreads) select_visual_kernel(const SelectLaunch p) {
  SIMT_SHARED(uint32_t, histogram, kBins);
  SIMT_SHARED(uint32_t, sums, 3 * kSelectWarps);  // one for the threshold, two for the compaction
  SIMT_SHARED(Threshold, found, 1);
  const Threshold threshold = find_threshold(p, histogram, sums, found);
  compact(p, threshold, reinterpret_cast<uint32_t(*)[kSelectWarps]>(sums + kSelectWarps));
}

template <class Word>
__device__ __forceinline__ void copy_row(const GatherTensor& tensor, int64_t from_row, int64_t to_row) {
  const Word* from = reinterpret_cast<const Word*>(tensor.data + from_row * tensor.row_bytes);
  Word* to = reinterpret_cast<Word*>(tensor.out + to_row * tensor.row_bytes);
  const int lanes = 1 << tensor.lane_shift;
  for (int first = threadIdx.x & (lanes - 1); first < tensor.words; first += lanes * kGatherWords) {
    Word word[kGatherWords];
#pragma unroll
    for (int j = 0; j < kGatherWords; ++j)
      if (first + j * lanes < tensor.words) word[j] = from[first + j * lanes];
#pragma unroll
    for (int j = 0; j < kGatherWords; ++j)
      if (first + j * lanes < tensor.words) to[first + j * lanes] = word[j];
  }
}

__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(const __grid_constant__ GatherLaunch launch) {
  const GatherTensor& tensor = launch.tensors[blockIdx.y];
  const int64_t row = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) >> tensor.lane_shift;
  if (row >= launch.keep) return;
  const int64_t from = launch.indices[row];
  if (static_cast<uint64_t>(from) >= static_cast<uint64_t>(launch.v)) return;
  switch (tensor.word_shift) {
    case 4: return copy_row<uint4>(tensor, from, row);
    case 3: return copy_row<uint64_t>(tensor, from, row);
    case 2: return copy_row<uint32_t>(tensor, from, row);
    case 1: return copy_row<uint16_t>(tensor, from, row);
    default: return copy_row<uint8_t>(tensor, from, row);
  }
}

// Rows in the widest word that they are aligned to, each by as many threads as it has words.
static GatherTensor gather_tensor(const GatherRows& rows) {
  const uint64_t addresses = reinterpret_cast<uintptr_t>(rows.data) | reinterpret_cast<uintptr_t>(rows.out);
  const uint64_t bits = 16 | addresses | static_cast<uint64_t>(rows.row_bytes);
  int16_t word_shift = 0, lane_shift = 0;
  while (!(bits >> word_shift & 1)) ++word_shift;
  const int64_t words = rows.row_bytes >> word_shift;
  while (1 << lane_shift < std::min<int64_t>(words, kGatherThreads)) ++lane_shift;
  return {static_cast<const char*>(rows.data), static_cast<char*>(rows.out), rows.row_bytes,
          static_cast<int32_t>(words),         word_shift,                    lane_shift};
}

static const Prepared prepared([] { prepare(select_visual_kernel), prepare(gather_rows_kernel); });

void select_visual_cuda(const SelectVisual& call, int device, void* stream) {
  if (call.keep == 0) return;
  if (call.v > std::numeric_limits<int32_t>::max() - kSelectStep)
    throw std::invalid_argument("select_visual: scores: wanted fewer than 2^31 - 4096, got " + std::to_string(call.v));
  const OnDevice current(device);
  const int32_t v = static_cast<int32_t>(call.v), keep = static_cast<int32_t>(call.keep);
  SIMT_LAUNCH(select_visual_kernel, dim3(1), dim3(kSelectThreads), 0, static_cast<cudaStream_t>(stream),
              SelectLaunch{call.scores, call.indices, v, keep});
  check_launch("select_visual");
  GatherLaunch params{call.indices, v, keep, {}};
  for (int64_t next = 0; next < call.count;) {
    unsigned count = 0, blocks = 0;
    for (; next < call.count && count < kGatherTensors; ++next) {
      if (call.tensors[next].row_bytes == 0) continue;
      params.tensors[count] = gather_tensor(call.tensors[next]);
      blocks = std::max(blocks, static_cast<unsigned>(ceil_div(call.keep << params.tensors[count++].lane_shift, kGatherThreads)));
    }
    if (count == 0) return;
    SIMT_LAUNCH(gather_rows_kernel, dim3(blocks, count), dim3(kGatherThreads), 0, static_cast<cudaStream_t>(stream), params);
    check_launch("select_visual");
  }
}

}  // namespace dream
