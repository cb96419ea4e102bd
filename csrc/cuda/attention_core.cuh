// What tree_attention and cross_attention run: split-KV flash decoding (Dao et al. 2023) with an online softmax (Milakov and
// Gimelshein 2018). A block owns up to 64 rows of one key head (its query heads x nodes, so that keys and values are read once
// for all of them) and a share of the slots; a second kernel merges the shares.
#pragma once
#include "cuda/launch_table.h"
#include "cuda/tile.cuh"
#include "dream/tree_attention.h"

namespace dream {

constexpr int kDeepest = 64;     // of a node behind the prefix
constexpr int kShareUnit = 16;   // slots: shares are whole rows of multiply_add

// What cross_attention does to a query row on its way into shared memory; nothing without a norm.
struct QueryStage {
  const void *norm = nullptr, *cos = nullptr, *sin = nullptr;
  int64_t table_batch = 0, table_row = 0;
  float eps = 0;
};

struct AttentionLaunch {
  const void *q, *k, *v;
  void* out;
  const int64_t* lengths;
  const uint64_t* ancestors;
  const uint8_t* padding;
  const int64_t* depth;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;
  int32_t heads, groups, nodes, tree, slots, head_dim, splits;  // heads = groups x key heads
  int32_t rows;        // of a key head: groups x nodes
  int32_t window;      // 0 = all
  float scale;         // on q k^T, in powers of two: scale x log2(e)
  float cap;           // in powers of two; 0 = none
  float turn;          // with a cap: 2 scale log2(e) / cap, so that 2^(turn q k) = e^(2 x) and cap tanh(x) is the score
  bool aligned;        // rows of q, k and v to 16 bytes
  bool aligned_out;    // rows of out to 16 bytes
  float* partial;      // (batch x heads x nodes, splits, head_dim) sums of weighted values
  float2* shares;      // (batch x heads x nodes, splits) largest score and sum of weights
  QueryStage stage;
};

// Checks what the kernels demand of a call, chooses them and launches them.
void launch_attention(const char* op, const TreeAttention& call, const QueryStage& stage, int device, void* stream);

// The slots of a block.
struct Slots {
  int length;       // of the prefix, inside the buffer whatever memory says
  int open;         // every node sees the prefix slots from here on
  int begin, stop;  // this block's share
};

__device__ __forceinline__ int between(int64_t value, int low, int high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// The first prefix slot that a node at this depth sees.
__device__ __forceinline__ int window_start(const AttentionLaunch& p, int length, int64_t depth) {
  return p.window ? between(int64_t{length} + between(depth, 0, kDeepest) - p.window + 1, 0, length) : 0;
}

__device__ __forceinline__ Slots block_slots(const AttentionLaunch& p, int batch, int split) {
  Slots slots;
  slots.length = between(p.lengths[batch], 0, p.slots - p.tree);
  slots.open = window_start(p, slots.length, kDeepest);
  const int low = window_start(p, slots.length, 0), end = slots.length + p.tree;
  const int share = ((end - low + p.splits - 1) / p.splits + kShareUnit - 1) / kShareUnit * kShareUnit;
  slots.begin = static_cast<int>(min(int64_t{low} + int64_t{split} * share, int64_t{end}));
  slots.stop = min(slots.begin + share, end);
  return slots;
}

// What one row sees.
struct Sight {
  uint64_t tree = 0;  // bit j: slot length + j
  int first = 0;      // prefix slots from here on

  __device__ __forceinline__ bool sees(const Slots& slots, int slot) const {
    const int behind = slot - slots.length;
    return slot < slots.stop && (behind < 0 ? slot >= first : (tree >> behind & 1) != 0);
  }
};

__device__ __forceinline__ Sight row_sight(const AttentionLaunch& p, const Slots& slots, int batch, int row) {
  Sight sight;
  sight.first = slots.length;
  if (row < p.rows) {
    const int64_t node = int64_t{batch} * p.nodes + row % p.nodes;
    sight.tree = p.ancestors[node];
    sight.first = p.window ? window_start(p, slots.length, p.depth[node]) : 0;
  }
  return sight;
}

// What any node of the sequence sees of the tree; the same in all lanes.
__device__ __forceinline__ uint64_t any_sight(const AttentionLaunch& p, int batch) {
  uint64_t bits = 0;
  for (int node = threadIdx.x % kWarp; node < p.nodes; node += kWarp) bits |= p.ancestors[int64_t{batch} * p.nodes + node];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) bits |= __shfl_xor_sync(kAllLanes, bits, distance);
  return bits;
}

template <class T>
__device__ __forceinline__ const T* query_row(const AttentionLaunch& p, int batch, int kv, int row) {
  return static_cast<const T*>(p.q) + batch * p.q_batch + int64_t{kv * p.groups + row / p.nodes} * p.q_head +
         row % p.nodes * p.q_row;
}

// x as it is after a trip through memory of type T.
template <class T>
__device__ __forceinline__ float rounded(float x) { return to_float(from_float<T>(x)); }

// The query stage of cross_attention, in place, for one row of node `node` by one warp: RMSNorm, then rotation in the half-split
// layout. Each step rounds to T, and products are rounded before they are added, as a chain of torch operators does.
template <class T>
__device__ __forceinline__ void norm_row(const AttentionLaunch& p, int batch, int node, T* row) {
  constexpr int kItems = kMaxHeadDim / kWarp;
  const int lane = threadIdx.x % kWarp, half = p.head_dim / 2;
  float x[kItems], square = 0.f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int d = lane + i * kWarp;
    x[i] = d < p.head_dim ? to_float(row[d]) : 0.f;
    square += x[i] * x[i];
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
  const float inverse = 1.f / sqrtf(square / static_cast<float>(p.head_dim) + p.stage.eps);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int d = lane + i * kWarp;
    if (d < p.head_dim) x[i] = rounded<T>(x[i] * inverse * to_float(static_cast<const T*>(p.stage.norm)[d])), row[d] = from_float<T>(x[i]);
  }
  if (p.stage.cos == nullptr) return;
  __syncwarp();
  const int64_t table = batch * p.stage.table_batch + node * p.stage.table_row;
  const T *cos = static_cast<const T*>(p.stage.cos) + table, *sin = static_cast<const T*>(p.stage.sin) + table;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int d = lane + i * kWarp;
    if (d >= p.head_dim) continue;
    const float other = d < half ? -to_float(row[d + half]) : to_float(row[d - half]);
    x[i] = __fadd_rn(rounded<T>(__fmul_rn(x[i], to_float(cos[d]))), rounded<T>(__fmul_rn(other, to_float(sin[d]))));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (lane + i * kWarp < p.head_dim) row[lane + i * kWarp] = from_float<T>(x[i]);
}

// Every row of a block's queries, `pitch` elements apart, by all of its warps.
template <class T>
__device__ __forceinline__ void norm_rows(const AttentionLaunch& p, int batch, int first, int count, T* rows, int pitch) {
  for (int r = threadIdx.x / kWarp; r < count; r += kAttentionWarps)
    if (first + r < p.rows) norm_row(p, batch, (first + r) % p.nodes, rows + r * pitch);
}

template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&x)[4], bool aligned) {
  T four[4] = {from_float<T>(x[0]), from_float<T>(x[1]), from_float<T>(x[2]), from_float<T>(x[3])};
  if (aligned) {
    using Word = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
    Word word;
    memcpy(&word, four, sizeof word);
    *reinterpret_cast<Word*>(to) = word;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = four[e];
  }
}

// Four columns of a row of a key head, merged within the block: to the output where there is one share, otherwise to the
// partial results. A row that saw nothing has no weight, and becomes zeros.
template <class T>
__device__ __forceinline__ void store_share(const AttentionLaunch& p, int batch, int kv, int row, int column, float high, float sum,
                                            float (&x)[4]) {
  if (p.splits == 1) {
    const int64_t place = (int64_t{batch} * p.nodes + row % p.nodes) * p.heads + kv * p.groups + row / p.nodes;
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= inverse;
    store_four(static_cast<T*>(p.out) + place * p.head_dim + column, x, p.aligned_out);
  } else {
    const int64_t place = ((int64_t{batch} * p.heads + kv * p.groups) * p.nodes + row) * p.splits + blockIdx.x;
    if (column == 0) p.shares[place] = make_float2(high, sum);
    *reinterpret_cast<float4*>(p.partial + place * p.head_dim + column) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

// A block without slots says so; its part of `partial` is then never read.
__device__ __forceinline__ void store_nothing(const AttentionLaunch& p, int batch, int kv, int first, int count) {
  for (int r = threadIdx.x; r < count && first + r < p.rows; r += blockDim.x)
    p.shares[((int64_t{batch} * p.heads + kv * p.groups) * p.nodes + first + r) * p.splits + blockIdx.x] =
        make_float2(-INFINITY, 0.f);
}

// Merges the shares of a row; a warp each.
template <class T>
__global__ void __launch_bounds__(kWarp* kCombineWarps) attention_combine_kernel(const __grid_constant__ AttentionLaunch p, int64_t rows) {
  constexpr int kParts = kMaxHeadDim / 4 / kWarp;
  const int lane = threadIdx.x;
  const int64_t row = int64_t{blockIdx.x} * kCombineWarps + threadIdx.y;  // (batch, heads, nodes)
  if (row >= rows) return;
  const float2* shares = p.shares + row * p.splits;
  float high = -INFINITY, total = 0.f, x[kParts][4] = {};
  for (int s = lane; s < p.splits; s += kWarp) high = fmaxf(high, shares[s].x);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, distance));
#pragma unroll 4
  for (int s = 0; s < p.splits; ++s) {
    const float2 share = shares[s];
    if (share.y == 0.f) continue;
    const float weight = exp2_fast(share.x - high);
    total += weight * share.y;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = (part * kWarp + lane) * 4;
      if (column >= p.head_dim) continue;
      const float4 more = *reinterpret_cast<const float4*>(p.partial + (row * p.splits + s) * p.head_dim + column);
      x[part][0] += weight * more.x, x[part][1] += weight * more.y, x[part][2] += weight * more.z, x[part][3] += weight * more.w;
    }
  }
  const float inverse = total == 0.f ? 0.f : 1.f / total;
  const int64_t node = row % p.nodes, head = row / p.nodes % p.heads, batch = row / p.nodes / p.heads;
  T* out = static_cast<T*>(p.out) + ((batch * p.nodes + node) * p.heads + head) * p.head_dim;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int column = (part * kWarp + lane) * 4;
    if (column >= p.head_dim) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[part][e] *= inverse;
    store_four(out + column, x[part], p.aligned_out);
  }
}

}  // namespace dream
