#include "dream/attention_mass.h"

#include "cpu/attention_tile.h"
#include "cpu/isa.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace dream::DREAM_ISA {

// Adds softmax(scores[0..visible)) to mass; scores become the unnormalised weights.
static void add_row(float* scores, int64_t visible, float* mass) {
  floats high = broadcast(kNegInf), sum{};
  for (int64_t j = 0; j < visible; j += kLanes) high = vmax(load_visible(scores + j, visible - j), high);
  const float m = hmax(high);
  if (m == kNegInf) return;
  for (int64_t j = 0; j < visible; j += kLanes) {
    const floats e = vexp(load_visible(scores + j, visible - j) - m);
    store(scores + j, e);
    sum += e;
  }
  const float inverse = 1.f / hsum(sum);
  for (int64_t j = 0; j < visible; j += kLanes) store(mass + j, load(mass + j) + load(scores + j) * inverse);
}

static int64_t visible_keys(const AttentionMass& call, int64_t row) {
  const int64_t position = call.row_positions[row];
  return position < 0 ? 0 : position >= call.keys ? call.keys : position + 1;
}

// One head: mass (padded keys) += its rows. work holds 4 x head_dim query floats, then 4 x padded score floats.
static void add_head(const AttentionMass& call, int64_t head, const float* packed, float* work, float* mass) {
  const int64_t padded = tiles_of(call.keys) * kTileKeys;
  float *rows = work, *scores = work + kTileRows * call.head_dim;
  for (int64_t first = 0; first < call.rows; first += kTileRows) {
    const int64_t count = call.rows - first < kTileRows ? call.rows - first : kTileRows;
    int64_t longest = 0;
    for (int64_t r = 0; r < count; ++r)
      if (visible_keys(call, first + r) > longest) longest = visible_keys(call, first + r);
    pack_query_rows(call, head, first, count, rows);
    for (int64_t t = 0; t < tiles_of(longest); ++t)
      tile_scores(rows, packed + t * call.head_dim * kTileKeys, call.head_dim, scores + t * kTileKeys, padded);
    for (int64_t r = 0; r < count; ++r) add_row(scores + r * padded, visible_keys(call, first + r), mass);
  }
}

int attention_mass(const AttentionMass& call) {
  const int64_t padded = tiles_of(call.keys) * kTileKeys, head_floats = padded * call.head_dim;
  const int64_t work_floats = kTileRows * (call.head_dim + padded), groups = call.heads / call.kv_heads;
  const int threads = call.threads > 1 ? call.threads : 1;
  Scratch packed(call.kv_heads * head_floats), work(threads * work_floats), partial(call.heads * padded);
  pack_all_keys(call, call.keys, packed.data, head_floats);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t head = 0; head < call.heads; ++head) {
#ifdef _OPENMP
    const int thread = omp_get_thread_num();
#else
    const int thread = 0;
#endif
    add_head(call, head, packed.data + head / groups * head_floats, work.data + thread * work_floats,
             partial.data + head * padded);
  }
  for (int64_t j = 0; j < call.keys; ++j) {  // heads in order: the bits do not depend on the number of threads
    double sum = 0;
    for (int64_t head = 0; head < call.heads; ++head) sum += partial.data[head * padded + j];
    call.mass[j] = static_cast<float>(sum);
  }
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, attention_mass, const AttentionMass&)

void dream::attention_mass_cpu(const AttentionMass& call) { attention_mass_dispatch(call); }
#endif
