#include "dream/attention_entropy.h"

#include <cmath>

#include "cpu/attention_tile.h"
#include "cpu/isa.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace dream::DREAM_ISA {

// Running statistics of one row: maximum m, Z = sum e^(s-m), U = sum e^(s-m) (s-m), the sums in lanes.
struct Row {
  float m;
  floats z, u;
};

DREAM_INLINE void add_tile(Row& row, const float* scores, int64_t visible) {
  floats high = broadcast(kNegInf);
  for (int64_t j = 0; j < kTileKeys && j < visible; j += kLanes) high = vmax(load_visible(scores + j, visible - j), high);
  const float m = hmax(high);
  if (m > row.m) {
    if (row.m != kNegInf) {
      const float delta = row.m - m, shrink = expf(delta);
      row.u = (row.u + delta * row.z) * shrink;
      row.z *= shrink;
    }
    row.m = m;
  }
  for (int64_t j = 0; j < kTileKeys && j < visible; j += kLanes) {
    const floats t = load_visible(scores + j, visible - j) - row.m, e = vexp(t);
    row.z += e;
    row.u += e * (t < -87.f ? floats{} : t);  // a hidden key has e = 0 and t = -inf: it adds 0, not NaN
  }
}

// Rows first .. first + 3 of one head. work holds 4 x head_dim query floats, then 4 x 64 score floats.
static void four_rows(const AttentionEntropy& call, int64_t head, int64_t first, const float* packed, float* work) {
  const int64_t count = call.n - first < kTileRows ? call.n - first : kTileRows;
  float *rows = work, *scores = work + kTileRows * call.head_dim;
  pack_query_rows(call, head, first, count, rows);
  Row row[kTileRows];
  for (auto& r : row) r = Row{kNegInf, floats{}, floats{}};
  for (int64_t t = 0; t < tiles_of(first + count); ++t) {
    tile_scores(rows, packed + t * call.head_dim * kTileKeys, call.head_dim, scores, kTileKeys);
    for (int64_t r = 0; r < count; ++r)
      if (first + r >= t * kTileKeys) add_tile(row[r], scores + r * kTileKeys, first + r + 1 - t * kTileKeys);
  }
  for (int64_t r = 0; r < count; ++r) {
    const float z = hsum(row[r].z), entropy = logf(z) - hsum(row[r].u) / z;
    call.entropy[head * call.n + first + r] = entropy < 0 ? 0.f : entropy;
  }
}

int attention_entropy(const AttentionEntropy& call) {
  const int64_t head_floats = tiles_of(call.n) * kTileKeys * call.head_dim, blocks = (call.n + kTileRows - 1) / kTileRows;
  const int64_t work_floats = (kTileRows * (call.head_dim + kTileKeys) + 15) / 16 * 16, groups = call.heads / call.kv_heads;
  const int threads = call.threads > 1 ? call.threads : 1;
  Scratch packed(call.kv_heads * head_floats), work(threads * work_floats);
  pack_all_keys(call, call.n, packed.data, head_floats);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8) if (threads > 1)
  for (int64_t item = 0; item < call.heads * blocks; ++item) {
#ifdef _OPENMP
    const int thread = omp_get_thread_num();
#else
    const int thread = 0;
#endif
    const int64_t head = item / blocks;
    four_rows(call, head, item % blocks * kTileRows, packed.data + head / groups * head_floats,
              work.data + thread * work_floats);
  }
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, attention_entropy, const AttentionEntropy&)

void dream::attention_entropy_cpu(const AttentionEntropy& call) { attention_entropy_dispatch(call); }
#endif
