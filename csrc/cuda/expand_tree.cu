#include "dream/expand_tree.h"

#include "cuda/vocab_rows.cuh"

namespace dream {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kExpandWarps = kExpandThreads / kWarp;
static_assert(kExpandWarps <= kWarp && kMaxRowSplits <= kWarp && kMaxDeviceWidth <= kWarp, "one list or one entry a lane");

struct alignas(8) Entry {
  uint32_t order;
  int32_t id;
};

// The largest number so far and the sum of 2^((x - high) log2 e).
struct alignas(8) LogSum {
  float high, sum;
};

// Partial results of every split of a row, in the workspace.
struct ExpandParts {
  LogSum* sums;    // (batch, rows, splits)
  Entry* entries;  // (batch, rows, splits, width) best first, what is missing with kNoOrder
};

struct ExpandLaunch {
  const void* logits;
  int64_t batch_stride, row_stride;
  ExpandParts parts;
  int32_t vocab, width;
};

struct MergeLaunch {
  ExpandParts parts;
  const float* scores;
  int64_t* tokens;
  float* cumulative;
  int64_t* best;
  int32_t rows, splits, width;
};

// A warp's best numbers so far, one a lane, best first; the first `width` count. Ids come in ascending order, but for those of one
// call of `offer`.
class TopList {
 public:
  __device__ __forceinline__ explicit TopList(int width) : width_(width) {}

  // Each lane's items with bit e of `left` set have the ids first + e, above those of the lane before. `high` is their largest.
  // What enters the list leaves it only for better: one turn for each entry that stays.
  template <int kItems>
  __device__ __forceinline__ void offer(const float (&x)[kItems], unsigned left, int first, float high) {
    if (!__any_sync(kAllLanes, order_of(high) > worst_)) return;
    Entry mine = greatest(x, left, first);
    for (;;) {
      const uint32_t top = __reduce_max_sync(kAllLanes, mine.order);
      if (top <= worst_) return;
      const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, mine.order == top))) - 1;
      insert({top, __shfl_sync(kAllLanes, mine.id, owner)});
      if (static_cast<int>(threadIdx.x % kWarp) == owner) {
        left &= ~(1u << (mine.id - first));
        mine = greatest(x, left, first);
      }
    }
  }

  __device__ __forceinline__ Entry entry() const { return entry_; }

 private:
  template <int kItems>
  static __device__ __forceinline__ Entry greatest(const float (&x)[kItems], unsigned left, int first) {
    Entry found{kNoOrder, first};
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const uint32_t order = order_of(x[e]);
      if (left >> e & 1 && order > found.order) found = {order, first + e};
    }
    return found;
  }

  // Behind its equals, whose ids are lower.
  __device__ __forceinline__ void insert(const Entry& entry) {
    const int lane = threadIdx.x % kWarp;
    const int place = __popc(__ballot_sync(kAllLanes, entry_.order >= entry.order));
    const Entry before{__shfl_up_sync(kAllLanes, entry_.order, 1), __shfl_up_sync(kAllLanes, entry_.id, 1)};
    if (lane >= place) entry_ = lane == place ? entry : before;
    worst_ = __shfl_sync(kAllLanes, entry_.order, width_ - 1);
  }

  Entry entry_{kNoOrder, 0};
  uint32_t worst_ = kNoOrder;  // order of the last entry that counts
  int width_;
};

// Merges up to kWarp lists of `width` entries; the result's entry i comes to lane i.
__device__ __forceinline__ Entry merge_lists(const Entry* lists, int count, int width) {
  const int lane = threadIdx.x % kWarp;
  const Entry* next = lists + lane * width;
  const Entry* const end = next + width;
  const Entry nothing{kNoOrder, kNoId};
  Entry head = lane < count ? *next : nothing, result = nothing;
  for (int i = 0; i < width; ++i) {
    const uint32_t top = __reduce_max_sync(kAllLanes, head.order);
    const uint32_t id = __reduce_min_sync(kAllLanes, head.order == top ? static_cast<uint32_t>(head.id) : 0xffffffffu);
    if (lane == i) result = {top, static_cast<int32_t>(id)};
    if (head.order == top && head.id == static_cast<int32_t>(id) && lane < count) head = ++next < end ? *next : nothing;
  }
  return result;
}

// e^(from - to), and 1 where both are the same infinity.
__device__ __forceinline__ float shrink(float from, float to) { return from == to ? 1.f : exp2_fast((from - to) * kLog2E); }

// The sum of the lanes' sums, in every lane. The tree is the same in every lane, and so are the bits.
__device__ __forceinline__ LogSum merge_sums(LogSum mine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const LogSum other{__shfl_xor_sync(kAllLanes, mine.high, step), __shfl_xor_sync(kAllLanes, mine.sum, step)};
    const float high = fmaxf(mine.high, other.high);
    mine.sum = mine.sum * shrink(mine.high, high) + other.sum * shrink(other.high, high);
    mine.high = high;
  }
  return mine;
}

// Grid (splits, rows, batch).
template <class T>
__global__ void __launch_bounds__(kExpandThreads, kExpandBlocks) expand_rows_kernel(const ExpandLaunch p) {
  SIMT_SHARED(LogSum, sums, kExpandWarps);
  SIMT_SHARED(Entry, lists, kExpandWarps* kMaxDeviceWidth);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const VocabRow<T> row(static_cast<const T*>(p.logits) + blockIdx.z * p.batch_stride + blockIdx.y * p.row_stride, p.vocab);
  LogSum total{-kInfinity, 0.f};
  TopList top(p.width);
  for_words<kExpandThreads, kRowWordsInFlight>(row, split_words(row, blockIdx.x, gridDim.x), [&](auto items, int first) {
    float high = -kInfinity;
#pragma unroll
    for (auto& x : items.x) {
      x = fmaxf(x, -kInfinity);  // of a number and NaN the number is taken
      high = fmaxf(high, x);
    }
    top.offer(items.x, items.inside, first, high);
    if (high > total.high) {
      total.sum *= shrink(total.high, high);
      total.high = high;
    }
    const float base = total.high > -kInfinity ? total.high : 0.f;
#pragma unroll
    for (const auto x : items.x) total.sum += exp2_fast((x - base) * kLog2E);
  });
  total = merge_sums(total);
  if (lane == 0) sums[warp] = total;
  if (lane < p.width) lists[warp * p.width + lane] = top.entry();
  __syncthreads();
  if (warp > 0) return;
  const int64_t part = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  total = merge_sums(lane < kExpandWarps ? sums[lane] : LogSum{-kInfinity, 0.f});
  const Entry entry = merge_lists(lists, kExpandWarps, p.width);
  if (lane == 0) p.parts.sums[part] = total;
  if (lane < p.width) p.parts.entries[part * p.width + lane] = entry;
}

// One warp: tokens and scores of one row from its splits; `lists` has room for their entries.
__device__ __forceinline__ void merge_row(const MergeLaunch& p, int64_t row, Entry* lists) {
  const int lane = threadIdx.x % kWarp, count = p.splits * p.width;
  const LogSum total = merge_sums(lane < p.splits ? p.parts.sums[row * p.splits + lane] : LogSum{-kInfinity, 0.f});
  for (int i = lane; i < count; i += kWarp) lists[i] = p.parts.entries[row * count + i];
  __syncwarp();
  const Entry entry = merge_lists(lists, p.splits, p.width);
  __syncwarp();  // the next row's entries come to the same place
  if (lane >= p.width) return;
  const float log_probability = value_of(entry.order) - total.high - logf(total.sum);  // NaN beside an infinite `high`
  p.tokens[row * p.width + lane] = entry.id;
  p.cumulative[row * p.width + lane] = fmaxf(p.scores[row] + log_probability, -kInfinity);
}

// One block a sequence: a warp for each row, then one for the best of all of them.
__global__ void __launch_bounds__(kMergeWarps* kWarp) merge_rows_kernel(const MergeLaunch p) {
  SIMT_DYN_SHARED(shared);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * p.rows;
  Entry* lists = reinterpret_cast<Entry*>(shared) + warp * p.splits * p.width;
  for (int row = warp; row < p.rows; row += kMergeWarps) merge_row(p, first_row + row, lists);
  __syncthreads();
  if (warp > 0) return;
  TopList top(p.width);
  const int count = p.rows * p.width;
  const float* cumulative = p.cumulative + first_row * p.width;
  for (int turn = 0; turn < count; turn += kWarp) {
    const bool inside = turn + lane < count;
    const float x[1] = {inside ? cumulative[turn + lane] : -kInfinity};
    top.offer(x, inside, turn + lane, x[0]);
  }
  if (lane < p.width) p.best[int64_t{blockIdx.x} * p.width + lane] = top.entry().id;
}

static constexpr size_t merge_bytes(int splits, int64_t width) { return sizeof(Entry) * kMergeWarps * splits * width; }

static const Prepared prepared([] {
  prepare(expand_rows_kernel<float>), prepare(expand_rows_kernel<__nv_bfloat16>), prepare(expand_rows_kernel<__half>);
  prepare(merge_rows_kernel, merge_bytes(kMaxRowSplits, kMaxDeviceWidth));
});

static int expand_splits(const ExpandTree& call) {
  return vocab_splits(call.dtype, call.batch * call.rows, call.vocab, kExpandBlocks, kExpandLeastWords);
}

int64_t expand_tree_workspace(const ExpandTree& call) {
  if (call.batch * call.rows == 0) return 0;
  return call.batch * call.rows * expand_splits(call) * static_cast<int64_t>(sizeof(LogSum) + sizeof(Entry) * call.width);
}

void expand_tree_cuda(const ExpandTree& call, int device, void* stream) {
  if (call.batch * call.rows == 0) return;
  check_vocab("expand_tree", call.vocab);
  if (call.width < 1 || call.width > kMaxDeviceWidth)
    throw std::invalid_argument("expand_tree: width: wanted 1 to 32 on CUDA, got " + std::to_string(call.width));
  const OnDevice current(device);
  const int splits = expand_splits(call);
  const int32_t vocab = static_cast<int32_t>(call.vocab), width = static_cast<int32_t>(call.width);
  LogSum* sums = static_cast<LogSum*>(call.workspace);
  const ExpandParts parts{sums, reinterpret_cast<Entry*>(sums + call.batch * call.rows * splits)};
  const dim3 grid(splits, static_cast<unsigned>(call.rows), static_cast<unsigned>(call.batch));
  with_type(call.dtype, [&](auto type) {
    SIMT_LAUNCH(expand_rows_kernel<decltype(type)>, grid, dim3(kExpandThreads), 0, static_cast<cudaStream_t>(stream),
                ExpandLaunch{call.logits, call.batch_stride, call.row_stride, parts, vocab, width});
  });
  check_launch("expand_tree");
  SIMT_LAUNCH(merge_rows_kernel, dim3(static_cast<unsigned>(call.batch)), dim3(kMergeWarps * kWarp), merge_bytes(splits, width),
              static_cast<cudaStream_t>(stream),
              MergeLaunch{parts, call.scores, call.tokens, call.cumulative, call.best, static_cast<int32_t>(call.rows), splits, width});
  check_launch("expand_tree");
}

}  // namespace dream
