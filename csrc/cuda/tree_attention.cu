#include "dream/tree_attention.h"

#include <algorithm>
#include <cmath>

#include "cuda/attention_mma.cuh"

namespace dream {

constexpr int kPlainRows = 16, kPlainTile = 32, kPlainLanes = kAttentionThreads / kPlainRows;  // lanes of a row

static constexpr size_t plain_bytes(int64_t head_dim) {
  return sizeof(float) * ((kPlainRows + 2 * kPlainTile) * (head_dim + 1) + kPlainRows * (kPlainTile + 1));
}

// A row of `to` is head_dim + 1 floats, so that the rows that a warp reads at once lie in different banks. Rows beyond become zeros.
template <class Row>
__device__ __forceinline__ void load_plain(float* to, Row row, int count, int rows, int head_dim) {
  for (int i = threadIdx.x; i < rows * head_dim; i += kAttentionThreads) {
    const int r = i / head_dim, d = i % head_dim;
    to[r * (head_dim + 1) + d] = r < count ? row(r)[d] : 0.f;
  }
}

// The fp32 kernel: 16 rows a block, eight lanes a row, each with every eighth key of a tile and every eighth column.
// Grid: (splits, kv_heads x row tiles, batch).
template <class T>
__global__ void __launch_bounds__(kAttentionThreads, 2) attention_plain_kernel(const __grid_constant__ AttentionLaunch p) {
  constexpr int kColumns = kMaxHeadDim / kPlainLanes, kKeys = kPlainTile / kPlainLanes;
  SIMT_DYN_SHARED(memory);
  const int pitch = p.head_dim + 1;
  float* queries = reinterpret_cast<float*>(memory);
  float *keys = queries + kPlainRows * pitch, *values = keys + kPlainTile * pitch, *weights = values + kPlainTile * pitch;
  const int row_tiles = (p.rows + kPlainRows - 1) / kPlainRows, batch = blockIdx.z, kv = blockIdx.y / row_tiles;
  const int first = blockIdx.y % row_tiles * kPlainRows, r = threadIdx.x / kPlainLanes, lane = threadIdx.x % kPlainLanes;
  const Slots slots = block_slots(p, batch, blockIdx.x);
  if (slots.begin >= slots.stop && p.splits > 1) return store_nothing(p, batch, kv, first, kPlainRows);

  const auto query = [&](int row) { return query_row<T>(p, batch, kv, first + row); };
  load_plain(queries, query, p.rows - first, kPlainRows, p.head_dim);
  __syncthreads();
  if (p.stage.norm) norm_rows(p, batch, first, kPlainRows, queries, pitch);  // read behind the barrier of the first tile
  const Sight sight = row_sight(p, slots, batch, first + r);
  float high = -INFINITY, sum = 0.f, mixed[kColumns] = {};
  for (int from = slots.begin; from < slots.stop; from += kPlainTile) {
    const T* k = static_cast<const T*>(p.k) + batch * p.k_batch + kv * p.k_head + from * p.k_row;
    const T* v = static_cast<const T*>(p.v) + batch * p.v_batch + kv * p.v_head + from * p.v_row;
    load_plain(keys, [&](int j) { return k + j * p.k_row; }, slots.stop - from, kPlainTile, p.head_dim);
    load_plain(values, [&](int j) { return v + j * p.v_row; }, slots.stop - from, kPlainTile, p.head_dim);
    __syncthreads();
    float scores[kKeys], top = high;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int j = lane + i * kPlainLanes;
      float s = 0.f;
      for (int d = 0; d < p.head_dim; ++d) s += queries[r * pitch + d] * keys[j * pitch + d];
      s = p.cap == 0.f ? s * p.scale : p.cap * tanhf(s * p.turn);
      const bool seen = sight.sees(slots, from + j) && !(p.padding && !p.padding[int64_t{batch} * p.slots + from + j]);
      scores[i] = seen ? s : -INFINITY;
      top = fmaxf(top, scores[i]);
    }
#pragma unroll
    for (int distance = kPlainLanes / 2; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, distance));
    const float base = top == -INFINITY ? 0.f : top, shrink = exp2_fast(high - base);
    high = top, sum *= shrink;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float weight = exp2_fast(scores[i] - base);
      weights[r * (kPlainTile + 1) + lane + i * kPlainLanes] = weight;
      sum += weight;
    }
    __syncwarp();  // the lanes of a row are in one warp
#pragma unroll
    for (int c = 0; c < kColumns; ++c) mixed[c] *= shrink;
    for (int j = 0; j < kPlainTile; ++j) {
      const float weight = weights[r * (kPlainTile + 1) + j];
      if (weight == 0.f) continue;  // what a row does not see must not reach it, and 0 x inf is NaN
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (lane + c * kPlainLanes < p.head_dim) mixed[c] += weight * values[j * pitch + lane + c * kPlainLanes];
    }
    __syncthreads();  // keys, values and weights are free
  }
#pragma unroll
  for (int distance = kPlainLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane + c * kPlainLanes < p.head_dim) keys[r * pitch + lane + c * kPlainLanes] = mixed[c];  // free, to reorder columns
  __syncwarp();
  if (first + r >= p.rows) return;
  for (int column = lane * 4; column < p.head_dim; column += kPlainLanes * 4) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = keys[r * pitch + column + e];
    store_share<T>(p, batch, kv, first + r, column, high, sum, x);
  }
}

// How a call is cut into blocks; of sizes that the host knows alone. Splits are the same for every dtype: one workspace serves all.
struct AttentionPlan {
  int64_t rows, tile_rows, row_tiles, splits;
};

static AttentionPlan plan_attention(const TreeAttention& call) {
  AttentionPlan plan{};
  plan.rows = call.heads / call.kv_heads * call.nodes;
  plan.tile_rows = plan.rows <= 16 && call.head_dim <= 128 ? 16 : plan.rows <= 32 ? 32 : 64;
  const int64_t blocks = call.batch * call.kv_heads * ceil_div(plan.rows, plan.tile_rows);
  plan.splits = std::max<int64_t>(1, std::min(kAttentionBlocks / blocks, ceil_div(call.slots, kAttentionSlotsPerRow * plan.tile_rows)));
  if (call.dtype == Dtype::f32) plan.tile_rows = kPlainRows;
  plan.row_tiles = ceil_div(plan.rows, plan.tile_rows);
  return plan;
}

static bool empty(const TreeAttention& call) { return call.batch * call.nodes * call.heads * call.head_dim == 0; }

int64_t tree_attention_workspace(const TreeAttention& call) {
  if (empty(call)) return 0;
  const int64_t splits = plan_attention(call).splits, rows = call.batch * call.heads * call.nodes;
  return splits == 1 ? 0 : rows * splits * (call.head_dim * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(float2)));
}

static AttentionLaunch attention_params(const TreeAttention& call, const QueryStage& stage, const AttentionPlan& plan) {
  constexpr float kLog2e = 1.44269504088896340736f;
  AttentionLaunch p{};
  p.q = call.q, p.k = call.k, p.v = call.v, p.out = call.out;
  p.lengths = call.lengths, p.ancestors = call.ancestors, p.padding = call.padding, p.depth = call.depth;
  p.q_batch = call.q_batch, p.q_head = call.q_head, p.q_row = call.q_row;
  p.k_batch = call.k_batch, p.k_head = call.k_head, p.k_row = call.k_row;
  p.v_batch = call.v_batch, p.v_head = call.v_head, p.v_row = call.v_row;
  p.heads = static_cast<int32_t>(call.heads), p.groups = static_cast<int32_t>(call.heads / call.kv_heads);
  p.nodes = static_cast<int32_t>(call.nodes);
  p.tree = static_cast<int32_t>(call.tree), p.slots = static_cast<int32_t>(call.slots), p.head_dim = static_cast<int32_t>(call.head_dim);
  p.rows = static_cast<int32_t>(plan.rows), p.splits = static_cast<int32_t>(plan.splits);
  p.window = static_cast<int32_t>(std::min<int64_t>(call.window, call.slots + kDeepest + 1));
  p.scale = call.scale * kLog2e;
  if (call.cap != 0.f) {
    p.cap = call.cap * kLog2e;
    p.turn = call.scale / call.cap * (call.dtype == Dtype::f32 ? 1.f : 2.f * kLog2e);
  }
  p.aligned = aligned_rows(call.q, call.batch > 1 ? call.q_batch : 0, call.heads > 1 ? call.q_head : 0, call.nodes > 1 ? call.q_row : 0) &&
              aligned_rows(call.k, call.batch > 1 ? call.k_batch : 0, call.kv_heads > 1 ? call.k_head : 0, call.k_row) &&
              aligned_rows(call.v, call.batch > 1 ? call.v_batch : 0, call.kv_heads > 1 ? call.v_head : 0, call.v_row);
  p.aligned_out = (reinterpret_cast<uintptr_t>(call.out) & 15) == 0;
  p.partial = static_cast<float*>(call.workspace);
  p.shares = reinterpret_cast<float2*>(p.partial + call.batch * call.heads * call.nodes * plan.splits * call.head_dim);
  p.stage = stage;
  return p;
}

template <class T, int D>
static void launch_width(const AttentionLaunch& p, const AttentionPlan& plan, const dim3& grid, cudaStream_t stream) {
  const dim3 block(kAttentionThreads);
  if (plan.tile_rows == 64) SIMT_LAUNCH((attention_mma_kernel<T, D, 4>), grid, block, (AttentionShape<D, 4>::kBytes), stream, p);
  if (plan.tile_rows == 32) SIMT_LAUNCH((attention_mma_kernel<T, D, 2>), grid, block, (AttentionShape<D, 2>::kBytes), stream, p);
  if constexpr (D < 256)  // wider heads with few rows use the tiles of 32: four warps' keys would not fit every processor
    if (plan.tile_rows == 16) SIMT_LAUNCH((attention_mma_kernel<T, D, 1>), grid, block, (AttentionShape<D, 1>::kBytes), stream, p);
}

template <class T>
static void launch_type(const AttentionLaunch& p, const AttentionPlan& plan, const dim3& grid, cudaStream_t stream) {
  if constexpr (sizeof(T) == sizeof(float))
    SIMT_LAUNCH(attention_plain_kernel<T>, grid, dim3(kAttentionThreads), plain_bytes(p.head_dim), stream, p);
  else
    with_width(p.head_dim, [&](auto width) { launch_width<T, decltype(width)::value>(p, plan, grid, stream); });
}

static const Prepared prepared([] {
  const auto prepare_width = [](auto type, auto width) {
    using T = decltype(type);
    constexpr int D = decltype(width)::value;
    if constexpr (D < 256) prepare(attention_mma_kernel<T, D, 1>, AttentionShape<D, 1>::kBytes);
    prepare(attention_mma_kernel<T, D, 2>, AttentionShape<D, 2>::kBytes);
    prepare(attention_mma_kernel<T, D, 4>, AttentionShape<D, 4>::kBytes);
  };
  const auto prepare_type = [&](auto type) {
    prepare_width(type, Width<64>{}), prepare_width(type, Width<128>{}), prepare_width(type, Width<256>{});
    prepare(attention_combine_kernel<decltype(type)>);
  };
  prepare_type(__nv_bfloat16{}), prepare_type(__half{});
  prepare(attention_plain_kernel<float>, plain_bytes(kMaxHeadDim)), prepare(attention_combine_kernel<float>);
});

void launch_attention(const char* op, const TreeAttention& call, const QueryStage& stage, int device, void* stream) {
  check_head_dim(op, call.head_dim);
  if (empty(call)) return;
  const OnDevice current(device);
  const AttentionPlan plan = plan_attention(call);
  const AttentionLaunch p = attention_params(call, stage, plan);
  const auto at = static_cast<cudaStream_t>(stream);
  const int64_t rows = call.batch * call.heads * call.nodes;
  with_type(call.dtype, [&](auto type) {
    using T = decltype(type);
    launch_type<T>(p, plan, dim3(plan.splits, call.kv_heads * plan.row_tiles, call.batch), at);
    check_launch(op);
    if (plan.splits == 1) return;
    SIMT_LAUNCH(attention_combine_kernel<T>, dim3(ceil_div(rows, kCombineWarps)), dim3(kWarp, kCombineWarps), 0, at, p, rows);
    check_launch(op);
  });
}

void tree_attention_cuda(const TreeAttention& call, int device, void* stream) {
  launch_attention("tree_attention", call, {}, device, stream);
}

}  // namespace dream
