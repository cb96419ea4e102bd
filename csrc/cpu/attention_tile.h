// Scores of four query rows against 64 keys, from keys packed in tiles: the core of the streaming attention statistics.
#pragma once
#include "cpu/lanes.h"
#include "dream/types.h"

namespace dream::DREAM_ISA {

constexpr int64_t kTileKeys = 64, kTileRows = 4, kTileVecs = kTileKeys / kLanes;
#ifdef __AVX512F__
constexpr int kGroup = 4;  // key vectors per pass: 16 accumulators fill half of the 32 registers
#else
constexpr int kGroup = 2;  // 8 accumulators, half of the 16 registers
#endif

DREAM_INLINE int64_t tiles_of(int64_t keys) { return (keys + kTileKeys - 1) / kTileKeys; }

// packed (tiles, head_dim, 64) fp32 of one key head; keys past the end are left as they are (zero).
template <class T>
DREAM_INLINE void pack_keys(const T* k, int64_t row_stride, int64_t keys, int64_t head_dim, float* packed) {
  for (int64_t j = 0; j < keys; ++j) {
    float* column = packed + j / kTileKeys * head_dim * kTileKeys + j % kTileKeys;
    for (int64_t d = 0; d < head_dim; ++d) column[d * kTileKeys] = scalar(k + j * row_stride + d);
  }
}

// rows (4, head_dim) fp32, scaled; rows past the end become zero.
template <class T>
DREAM_INLINE void pack_rows(const T* q, int64_t row_stride, int64_t count, int64_t head_dim, float scale, float* rows) {
  for (int64_t r = 0; r < kTileRows; ++r)
    for (int64_t d = 0; d < head_dim; ++d) rows[r * head_dim + d] = r < count ? scalar(q + r * row_stride + d) * scale : 0.f;
}

// out (4, out_stride): scores of the four rows against one packed tile (head_dim, 64).
DREAM_INLINE void tile_scores(const float* rows, const float* tile, int64_t head_dim, float* out, int64_t out_stride) {
  for (int64_t group = 0; group < kTileVecs; group += kGroup) {
    floats sum[kTileRows][kGroup] = {};
    for (int64_t d = 0; d < head_dim; ++d) {
      floats key[kGroup];
      for (int i = 0; i < kGroup; ++i) key[i] = load(tile + d * kTileKeys + (group + i) * kLanes);
      for (int r = 0; r < kTileRows; ++r)
        for (int i = 0; i < kGroup; ++i) sum[r][i] += rows[r * head_dim + d] * key[i];
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int i = 0; i < kGroup; ++i) store(out + r * out_stride + (group + i) * kLanes, sum[r][i]);
  }
}

// Scores at x[0 .. kLanes) with keys from `visible` on hidden (-inf).
DREAM_INLINE floats load_visible(const float* x, int64_t visible) {
  const floats s = load(x);
  if (visible >= kLanes) return s;
  return lane_ids() < static_cast<int32_t>(visible) ? s : broadcast(kNegInf);
}

template <class Call>
DREAM_INLINE void pack_all_keys(const Call& call, int64_t keys, float* packed, int64_t head_floats) {
#pragma omp parallel for num_threads(call.threads) schedule(static) if (call.threads > 1)
  for (int64_t h = 0; h < call.kv_heads; ++h) {
    const int64_t at = h * call.k_head_stride;
    if (call.dtype == Dtype::f32)
      pack_keys(static_cast<const float*>(call.k) + at, call.k_row_stride, keys, call.head_dim, packed + h * head_floats);
    else
      pack_keys(static_cast<const bf16*>(call.k) + at, call.k_row_stride, keys, call.head_dim, packed + h * head_floats);
  }
}

template <class Call>
DREAM_INLINE void pack_query_rows(const Call& call, int64_t head, int64_t first, int64_t count, float* rows) {
  const int64_t at = head * call.q_head_stride + first * call.q_row_stride;
  if (call.dtype == Dtype::f32)
    pack_rows(static_cast<const float*>(call.q) + at, call.q_row_stride, count, call.head_dim, call.scale, rows);
  else
    pack_rows(static_cast<const bf16*>(call.q) + at, call.q_row_stride, count, call.head_dim, call.scale, rows);
}

}  // namespace dream::DREAM_ISA
