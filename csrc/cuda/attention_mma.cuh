// The tensor-core kernel of tree_attention, for bf16 and f16.
//
// Four warps share tiles of keys and values, which arrive in the background in a ring of stages. With few rows the warps stand
// side by side along the keys of a tile; with many each has 16 rows of its own and all keys. Scores, weights and sums stay in
// registers; the results of warps that share rows meet in shared memory at the end.
#pragma once
#include "cuda/attention_core.cuh"

namespace dream {

constexpr int kAttentionThreads = kWarp * kAttentionWarps;

template <int D, int RowWarps>
struct AttentionShape {
  static constexpr int kRows = 16 * RowWarps, kKeyWarps = kAttentionWarps / RowWarps;
  static constexpr int kWarpKeys = RowWarps == kAttentionWarps && D < 256 ? 32 : 16;  // of a tile
  static constexpr int kTile = kWarpKeys * kKeyWarps;
  // One tile of 32 KB under way while another is at work, or two of 16 KB and less: kAttentionBlocks counts on them.
  static constexpr int kStages = kTile * D >= 64 * 128 ? 2 : 3;
  static constexpr int kBlocks = D == 64 ? 3 : D == 128 ? 2 : 1;  // on a multiprocessor: 168 or 255 registers a thread, no spills
  static constexpr int kPitchOut = D + 8;                         // floats; rows of the merge lie in different banks
  static constexpr size_t kBytes = tile_bytes<D>(kRows + 2 * kTile * kStages);
  static_assert(kBytes >= sizeof(float) * kRows * kKeyWarps * kPitchOut, "the merge reuses the memory");
  static_assert(kBytes <= 98 * 1024, "processors of compute capability 8.6, 8.9 and 12.0 give a block 99 KB, static memory included");
};

// The online softmax of a lane's two rows, g and g + 8 of the warp's 16.
template <int D>
struct Running {
  float mixed[D / 8][4];                   // as the result of multiply_add
  float high[2] = {-INFINITY, -INFINITY};  // largest score
  float sum[2] = {0.f, 0.f};               // of the weights in this lane's columns

  __device__ __forceinline__ Running() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) mixed[n][i] = 0.f;
  }

  // Scores become weights; sums so far shrink to the new maximum.
  template <int N>
  __device__ __forceinline__ void weigh(float (&scores)[N][4]) {
    float base[2], shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = high[h];
#pragma unroll
      for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      base[h] = top == -INFINITY ? 0.f : top;
      shrink[h] = exp2_fast(high[h] - base[h]);
      high[h] = top, sum[h] *= shrink[h];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = exp2_fast(scores[n][i] - base[i / 2]), sum[i / 2] += scores[n][i];
    if (!__any_sync(kAllLanes, shrink[0] != 1.f || shrink[1] != 1.f)) return;  // after some tiles the maximum rests
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) mixed[n][i] *= shrink[i / 2];
  }

  // Adds weights (rounded to T) times values, of which `values` is the row of the first key.
  template <int N, class T>
  __device__ __forceinline__ void mix(const float (&weights)[N][4], const T* values) {
    const int lane = threadIdx.x % kWarp;
    const T* corner = values + lane % 16 * kPitch<D> + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const float(&low)[4] = weights[2 * k], (&next)[4] = weights[2 * k + 1];
      const uint32_t a[4] = {pack_pair(low[0], low[1], T{}), pack_pair(low[2], low[3], T{}), pack_pair(next[0], next[1], T{}),
                             pack_pair(next[2], next[3], T{})};
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, corner + k * 16 * kPitch<D> + n * 16);
        multiply_add(mixed[2 * n], a, b[0], b[1], T{});
        multiply_add(mixed[2 * n + 1], a, b[2], b[3], T{});
      }
    }
  }

  // The same where values hold inf or NaN: what a row does not see must not reach it, and 0 x inf is NaN.
  template <int N, class T>
  __device__ __forceinline__ void mix_seen(const float (&weights)[N][4], const T* values) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        const int owner = lane / 4 * 4 + j / 2;
        const float w0 = __shfl_sync(kAllLanes, j % 2 ? weights[n][1] : weights[n][0], owner);
        const float w1 = __shfl_sync(kAllLanes, j % 2 ? weights[n][3] : weights[n][2], owner);
        const T* value = values + (8 * n + j) * kPitch<D> + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float w = i / 2 ? w1 : w0;
            if (w != 0.f) mixed[d][i] += w * to_float(value[d * 8 + i % 2]);
          }
      }
  }
};

// Scales, in powers of two, and caps.
template <int N>
__device__ __forceinline__ void finish_scores(const AttentionLaunch& p, float (&scores)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = scores[n][i];
      s = p.cap == 0.f ? s * p.scale : p.cap - __fdividef(2.f * p.cap, exp2_fast(s * p.turn) + 1.f);
    }
}

// -inf where a row does not see a key; `from` is the slot of key 0, shown[j] = 0 hides it from every row.
template <int N>
__device__ __forceinline__ void hide_scores(float (&scores)[N][4], const Sight (&sight)[2], const Slots& slots, int from,
                                            const uint8_t* shown) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 8 * n + column + i % 2;
      if (!sight[i / 2].sees(slots, from + j) || (shown && !shown[j])) scores[n][i] = -INFINITY;
    }
}

__device__ __forceinline__ bool not_finite(uint32_t pair, __nv_bfloat16) {
  return (pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u;
}
__device__ __forceinline__ bool not_finite(uint32_t pair, __half) {
  return (pair & 0x7c00u) == 0x7c00u || (pair & 0x7c000000u) == 0x7c000000u;
}

// Values that no row sees become zeros. Returns whether any other holds inf or NaN; a barrier of the block.
template <int D, int Tile, class T>
__device__ __forceinline__ bool clean_values(T* values, const Slots& slots, int from, uint64_t tree, const uint8_t* shown) {
  constexpr int kWords = D / 8;
  bool odd = false;
  for (int i = threadIdx.x; i < Tile * kWords; i += kAttentionThreads) {
    const int r = i / kWords, behind = from + r - slots.length;
    if (from + r >= slots.stop) continue;  // load_tile left zeros
    uint4* word = reinterpret_cast<uint4*>(values + r * kPitch<D> + i % kWords * 8);
    if ((shown && !shown[r]) || (behind >= 0 && !(tree >> behind & 1))) *word = make_uint4(0, 0, 0, 0);
    else odd = odd || not_finite(word->x, T{}) || not_finite(word->y, T{}) || not_finite(word->z, T{}) || not_finite(word->w, T{});
  }
  return __syncthreads_or(odd);
}

// Merges the warps that share rows, and stores. Reuses the memory of queries and stages.
template <class T, int D, int RowWarps>
__device__ __forceinline__ void store_block(const AttentionLaunch& p, int batch, int kv, int first, const Running<D>& running,
                                            float* mixed) {
  using Shape = AttentionShape<D, RowWarps>;
  SIMT_SHARED(float, high, kAttentionWarps * 16);
  SIMT_SHARED(float, sum, kAttentionWarps * 16);
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * 16 + lane / 4;  // of (key warp, row)
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(mixed + (row + 8 * h) * Shape::kPitchOut + 8 * n + lane % 4 * 2) =
          make_float2(running.mixed[n][2 * h], running.mixed[n][2 * h + 1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = running.sum[h];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (lane % 4 == 0) high[row + 8 * h] = running.high[h], sum[row + 8 * h] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Shape::kRows * D / 4; i += kAttentionThreads) {
    const int r = i / (D / 4), column = i % (D / 4) * 4;
    if (first + r >= p.rows || column >= p.head_dim) continue;
    float top = -INFINITY, total = 0.f, x[4] = {};
#pragma unroll
    for (int k = 0; k < Shape::kKeyWarps; ++k) top = fmaxf(top, high[k * Shape::kRows + r]);
    const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
    for (int k = 0; k < Shape::kKeyWarps; ++k) {
      const int from = k * Shape::kRows + r;
      const float weight = exp2_fast(high[from] - base);
      const float4 more = *reinterpret_cast<const float4*>(mixed + from * Shape::kPitchOut + column);
      total += weight * sum[from];
      x[0] += weight * more.x, x[1] += weight * more.y, x[2] += weight * more.z, x[3] += weight * more.w;
    }
    store_share<T>(p, batch, kv, first + r, column, top, total, x);
  }
}

// Grid: (splits, kv_heads x row tiles, batch).
template <class T, int D, int RowWarps>
__global__ void __launch_bounds__(kAttentionThreads, (AttentionShape<D, RowWarps>::kBlocks))
attention_mma_kernel(const __grid_constant__ AttentionLaunch p) {
  using Shape = AttentionShape<D, RowWarps>;
  constexpr int kTile = Shape::kTile, kStages = Shape::kStages;
  SIMT_DYN_SHARED(memory);
  SIMT_SHARED(uint8_t, shown, kStages * kTile);
  T* queries = reinterpret_cast<T*>(memory);
  T* stages = queries + Shape::kRows * kPitch<D>;  // (stage, keys and values, kTile, kPitch)
  const int row_tiles = (p.rows + Shape::kRows - 1) / Shape::kRows, batch = blockIdx.z, kv = blockIdx.y / row_tiles;
  const int first = blockIdx.y % row_tiles * Shape::kRows, warp = threadIdx.x / kWarp, key_warp = warp / RowWarps;
  const Slots slots = block_slots(p, batch, blockIdx.x);
  if (slots.begin >= slots.stop && p.splits > 1) return store_nothing(p, batch, kv, first, Shape::kRows);

  const auto load = [&](int stage, int from) {
    T* keys = stages + stage * 2 * kTile * kPitch<D>;
    const T* k = static_cast<const T*>(p.k) + batch * p.k_batch + kv * p.k_head + from * p.k_row;
    const T* v = static_cast<const T*>(p.v) + batch * p.v_batch + kv * p.v_head + from * p.v_row;
    const int count = slots.stop - from;
    const auto key = [&](int r) { return r < count ? k + r * p.k_row : nullptr; };
    const auto value = [&](int r) { return r < count ? v + r * p.v_row : nullptr; };
    load_tile<D, kTile, kAttentionThreads>(keys, key, p.head_dim, p.aligned, threadIdx.x);
    load_tile<D, kTile, kAttentionThreads>(keys + kTile * kPitch<D>, value, p.head_dim, p.aligned, threadIdx.x);
    if (const int j = threadIdx.x; p.padding && j < kTile)
      shown[stage * kTile + j] = j < count ? p.padding[int64_t{batch} * p.slots + from + j] : 0;
  };
  const auto query = [&](int r) { return first + r < p.rows ? query_row<T>(p, batch, kv, first + r) : nullptr; };
  load_tile<D, Shape::kRows, kAttentionThreads>(queries, query, p.head_dim, p.aligned, threadIdx.x);
  copy_async_commit();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (slots.begin + s * kTile < slots.stop) load(s, slots.begin + s * kTile);
    copy_async_commit();
  }
  copy_async_wait<kStages - 1>();
  __syncthreads();
  if (p.stage.norm) {
    norm_rows(p, batch, first, Shape::kRows, queries, kPitch<D>);
    __syncthreads();
  }
  const int own = warp % RowWarps * 16;
  const QueryRows<D, T> q(queries + own * kPitch<D>);
  const int row = first + own + static_cast<int>(threadIdx.x % kWarp / 4);
  const Sight sight[2] = {row_sight(p, slots, batch, row), row_sight(p, slots, batch, row + 8)};
  const uint64_t tree = slots.stop > slots.length ? any_sight(p, batch) : 0;

  Running<D> running;
  int stage = 0;
  for (int from = slots.begin; from < slots.stop; from += kTile) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // the tile is there for all; the stage of the tile before is free
    const int ahead = from + (kStages - 1) * kTile, free = stage == 0 ? kStages - 1 : stage - 1;
    if (ahead < slots.stop) load(free, ahead);
    copy_async_commit();
    T *keys = stages + stage * 2 * kTile * kPitch<D>, *values = keys + kTile * kPitch<D>;
    const uint8_t* visible = p.padding ? shown + stage * kTile : nullptr;
    const bool careful = p.padding || from < slots.open || from + kTile > slots.length, whole = from + kTile <= slots.stop;
    const bool odd = careful && clean_values<D, kTile>(values, slots, from, tree, visible);
    const int at = key_warp * Shape::kWarpKeys;
    if (from + at < slots.stop) {
      float scores[Shape::kWarpKeys / 8][4];
      score_tile<D, Shape::kWarpKeys>(scores, q, keys + at * kPitch<D>);
      finish_scores(p, scores);
      if (careful || !whole) hide_scores(scores, sight, slots, from + at, visible ? visible + at : nullptr);
      running.weigh(scores);
      if (odd) running.mix_seen(scores, values + at * kPitch<D>);
      else running.mix(scores, values + at * kPitch<D>);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  __syncthreads();  // the memory is free: no copy is under way, since the groups still open are empty
  store_block<T, D, RowWarps>(p, batch, kv, first, running, reinterpret_cast<float*>(memory));
}

}  // namespace dream
