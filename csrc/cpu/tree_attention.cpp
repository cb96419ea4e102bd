#include "dream/tree_attention.h"

#include "cpu/isa.h"
#include "cpu/lanes.h"

#ifdef _OPENMP
#include <omp.h>
#endif

// The rows that share a key head (its query heads x nodes) lie in the lanes of a register, so that a key is read once for
// all of them and softmax needs no reduction across lanes. Keys are split into chunks of a fixed size, each with an online
// softmax of its own (Milakov and Gimelshein 2018), combined at the end as in flash decoding.

namespace dream::DREAM_ISA {

constexpr int64_t kChunk = 512;  // slots of one task: enough to hide its start, few enough to share a long prefix
constexpr int64_t kBlock = 32;   // slots between two softmax updates: keys and values of a block stay in L1
#ifdef __AVX512F__
constexpr int kVecs = 4;         // row vectors a pass: 16 accumulators
#else
constexpr int kVecs = 2;         // 8 accumulators
#endif

DREAM_INLINE int64_t ceil_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
DREAM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One key head of one sequence: what all of its tasks share.
struct Head {
  int64_t rows, lanes, width;  // query rows; rows and head_dim, each rounded up to whole registers
  int64_t end;                 // slots in use: prefix and tree
  float* q;                    // (head_dim, lanes) scaled
  ints* sees;                  // (tree, lanes / kLanes) all ones where the row sees the tree slot
  ints* first;                 // (lanes / kLanes) first prefix slot the row sees
};

// The result of one chunk.
struct Partial {
  float *high, *sum, *mixed;  // (lanes) largest score, (lanes) sum of weights, (rows, width) weighted values
};

static int64_t head_floats(const TreeAttention& call, int64_t lanes) { return (call.head_dim + call.tree + 1) * lanes; }

static Head view_head(const TreeAttention& call, int64_t index, float* memory) {
  Head head{};
  head.rows = call.heads / call.kv_heads * call.nodes;
  head.lanes = ceil_to(head.rows, kLanes), head.width = ceil_to(call.head_dim, kLanes);
  head.end = call.lengths[index / call.kv_heads] + call.tree;
  memory += index * head_floats(call, head.lanes);
  head.q = memory;
  head.sees = reinterpret_cast<ints*>(memory + call.head_dim * head.lanes);
  head.first = head.sees + call.tree * head.lanes / kLanes;
  return head;
}

// The first prefix slot in the window of a node. Clamped, so that no value overflows.
static int32_t first_slot(const TreeAttention& call, int64_t b, int64_t node) {
  const int64_t length = call.lengths[b], depth = call.depth[b * call.nodes + node];
  const int64_t from = length + least(depth < 0 ? 0 : depth, 64) - least(call.window, length + 65) + 1;
  return static_cast<int32_t>(from < 0 ? 0 : least(from, length));
}

template <class T>
static void pack_head(const TreeAttention& call, int64_t index, const Head& head) {
  const int64_t b = index / call.kv_heads, kv = index % call.kv_heads, groups = call.heads / call.kv_heads;
  auto* sees = reinterpret_cast<int32_t*>(head.sees);
  auto* first = reinterpret_cast<int32_t*>(head.first);
  for (int64_t r = 0; r < head.rows; ++r) {
    const int64_t node = r % call.nodes;
    const T* row = static_cast<const T*>(call.q) + b * call.q_batch + (kv * groups + r / call.nodes) * call.q_head + node * call.q_row;
    for (int64_t d = 0; d < call.head_dim; ++d) head.q[d * head.lanes + r] = scalar(row + d) * call.scale;
    const uint64_t bits = call.ancestors[b * call.nodes + node];
    for (int64_t j = 0; j < call.tree; ++j) sees[j * head.lanes + r] = bits >> j & 1 ? -1 : 0;
    first[r] = call.window ? first_slot(call, b, node) : 0;
  }
}

// scores (KEYS, lanes) of VECS row vectors against KEYS keys of (head_dim) floats each, `width` apart.
template <int KEYS, int VECS>
DREAM_INLINE void score_tile(const float* q, int64_t lanes, const float* keys, int64_t width, int64_t head_dim, float* scores) {
  floats sum[KEYS][VECS] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    floats row[VECS];
    for (int i = 0; i < VECS; ++i) row[i] = load(q + d * lanes + i * kLanes);
    for (int j = 0; j < KEYS; ++j)
      for (int i = 0; i < VECS; ++i) sum[j][i] += row[i] * keys[j * width + d];
  }
  for (int j = 0; j < KEYS; ++j)
    for (int i = 0; i < VECS; ++i) store(scores + j * lanes + i * kLanes, sum[j][i]);
}

template <int VECS>
static void score_rows(const Head& head, int64_t at, const float* keys, int64_t head_dim, float* scores) {
  constexpr int kKeys = VECS <= 2 ? 8 : 4;
  for (int64_t j = 0; j < kBlock; j += kKeys)
    score_tile<kKeys, VECS>(head.q + at, head.lanes, keys + j * head.width, head.width, head_dim, scores + j * head.lanes + at);
}

static void score_block(const Head& head, const float* keys, int64_t head_dim, float* scores) {
  int64_t at = 0;
  for (; at + kVecs * kLanes <= head.lanes; at += kVecs * kLanes) score_rows<kVecs>(head, at, keys, head_dim, scores);
  if (at + 2 * kLanes <= head.lanes) score_rows<2>(head, at, keys, head_dim, scores), at += 2 * kLanes;
  if (at < head.lanes) score_rows<1>(head, at, keys, head_dim, scores);
}

// mixed (ROWS, width) += weights^T values; weights (count, lanes) from column `row` on, values (count, width).
template <int ROWS>
DREAM_INLINE void mix_rows(const float* weights, int64_t lanes, const float* values, int64_t width, int64_t count, float* mixed) {
  for (int64_t d = 0; d < width; d += 4 * kLanes) {
    const int vecs = static_cast<int>(least(4, (width - d) / kLanes));
    if (vecs == 4) {
      floats sum[ROWS][4];
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) sum[r][i] = load(mixed + r * width + d + i * kLanes);
      for (int64_t j = 0; j < count; ++j)
        for (int r = 0; r < ROWS; ++r)
          for (int i = 0; i < 4; ++i) sum[r][i] += load(values + j * width + d + i * kLanes) * weights[j * lanes + r];
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) store(mixed + r * width + d + i * kLanes, sum[r][i]);
      continue;
    }
    for (int i = 0; i < vecs; ++i)
      for (int r = 0; r < ROWS; ++r) {
        floats sum = load(mixed + r * width + d + i * kLanes);
        for (int64_t j = 0; j < count; ++j) sum += load(values + j * width + d + i * kLanes) * weights[j * lanes + r];
        store(mixed + r * width + d + i * kLanes, sum);
      }
  }
}

static bool all_finite(const float* values, int64_t size) {
  floats zero{};  // inf - inf and NaN - NaN are NaN
  for (int64_t i = 0; i < size; i += kLanes) zero += load(values + i) - load(values + i);
  return hsum(zero) == 0.f;
}

// A hidden slot has weight zero; what it holds must not matter, and 0 x inf is NaN.
static void mix_visible(const Head& head, const float* weights, const float* values, int64_t count, float* mixed) {
  for (int64_t r = 0; r < head.rows; ++r)
    for (int64_t j = 0; j < count; ++j)
      if (const float weight = weights[j * head.lanes + r]; weight != 0.f)
        for (int64_t d = 0; d < head.width; ++d) mixed[r * head.width + d] += weight * values[j * head.width + d];
}

static void mix_block(const Head& head, const float* weights, const float* values, int64_t count, float* mixed) {
  if (!all_finite(values, count * head.width)) return mix_visible(head, weights, values, count, mixed);
  constexpr int kRows = kVecs == 4 ? 4 : 2;
  int64_t r = 0;
  for (; r + kRows <= head.rows; r += kRows)
    mix_rows<kRows>(weights + r, head.lanes, values, head.width, count, mixed + r * head.width);
  for (; r < head.rows; ++r) mix_rows<1>(weights + r, head.lanes, values, head.width, count, mixed + r * head.width);
}

DREAM_INLINE floats vtanh(floats x) {
  const floats less = vexpm1((x < 0.f ? x : -x) * 2.f), size = -less / (less + 2.f);
  return x < 0.f ? -size : size;
}

// Scores of slots from .. from + count become weights; hidden ones become zero. Earlier sums shrink to the new maximum.
static void update_softmax(const Head& head, int64_t prefix, int64_t from, int64_t count, const uint8_t* padding, float* scores,
                           float cap, const Partial& part) {
  for (int64_t at = 0; at < head.lanes; at += kLanes) {
    const floats before = load(part.high + at);
    floats high = before;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t slot = from + j;
      floats s = load(scores + j * head.lanes + at);
      if (cap > 0) s = vtanh(s / cap) * cap;
      const ints seen = slot >= prefix ? head.sees[((slot - prefix) * head.lanes + at) / kLanes]
                                       : head.first[at / kLanes] <= static_cast<int32_t>(slot);
      s = seen ? s : broadcast(kNegInf);
      if (padding && !padding[slot]) s = broadcast(kNegInf);
      store(scores + j * head.lanes + at, s);
      high = vmax(s, high);
    }
    const floats base = high == kNegInf ? floats{} : high, shrink = vexp(before - base);
    floats sum = load(part.sum + at) * shrink;
    for (int64_t j = 0; j < count; ++j) {
      const floats weight = vexp(load(scores + j * head.lanes + at) - base);
      store(scores + j * head.lanes + at, weight);
      sum += weight;
    }
    store(part.high + at, high);
    store(part.sum + at, sum);
    float factor[kLanes];
    store(factor, shrink);
    for (int64_t r = at; r < least(at + kLanes, head.rows); ++r)
      if (factor[r - at] != 1.f)
        for (int64_t d = 0; d < head.width; d += kLanes)
          store(part.mixed + r * head.width + d, load(part.mixed + r * head.width + d) * factor[r - at]);
  }
}

// (kBlock, width) floats of `count` slots; the rest of the block, the padding of the width and hidden slots are zero.
template <class T>
static void widen(const T* from, int64_t stride, int64_t count, int64_t head_dim, int64_t width, const uint8_t* padding, float* to) {
  for (int64_t j = 0; j < kBlock; ++j) {
    float* row = to + j * width;
    int64_t d = 0;
    if (j < count && !(padding && !padding[j])) {
      for (; d + kLanes <= head_dim; d += kLanes) store(row + d, load(from + j * stride + d));
      for (; d < head_dim; ++d) row[d] = scalar(from + j * stride + d);
    }
    for (; d < width; ++d) row[d] = 0.f;
  }
}

// One chunk. work holds keys and values (kBlock, width) and scores (kBlock, lanes).
template <class T>
static void run_chunk(const TreeAttention& call, int64_t index, const Head& head, int64_t begin, float* work, const Partial& part) {
  const int64_t b = index / call.kv_heads, kv = index % call.kv_heads, end = least(begin + kChunk, head.end);
  const T* k = static_cast<const T*>(call.k) + b * call.k_batch + kv * call.k_head;
  const T* v = static_cast<const T*>(call.v) + b * call.v_batch + kv * call.v_head;
  const uint8_t* padding = call.padding ? call.padding + b * call.slots : nullptr;
  float *keys = work, *values = keys + kBlock * head.width, *scores = values + kBlock * head.width;
  for (int64_t at = 0; at < head.lanes; at += kLanes) store(part.high + at, broadcast(kNegInf));
  for (int64_t from = begin; from < end; from += kBlock) {
    const int64_t count = least(kBlock, end - from);
    const uint8_t* hidden = padding ? padding + from : nullptr;
    widen(k + from * call.k_row, call.k_row, count, call.head_dim, head.width, hidden, keys);
    score_block(head, keys, call.head_dim, scores);
    update_softmax(head, call.lengths[b], from, count, padding, scores, call.cap, part);
    widen(v + from * call.v_row, call.v_row, count, call.head_dim, head.width, hidden, values);
    mix_block(head, scores, values, count, part.mixed);
  }
}

// Writes the rows of one head from the partial results part(0) .. part(chunks - 1); part(0) is overwritten.
template <class T, class Part>
static void combine(const TreeAttention& call, int64_t index, const Head& head, Part part, int64_t chunks) {
  const int64_t b = index / call.kv_heads, kv = index % call.kv_heads, groups = call.heads / call.kv_heads;
  for (int64_t r = 0; r < head.rows; ++r) {
    float high = kNegInf, total = 0, *mixed = part(0).mixed + r * head.width;
    for (int64_t c = 0; c < chunks; ++c) high = part(c).high[r] > high ? part(c).high[r] : high;
    for (int64_t c = 0; c < chunks; ++c) {
      const floats shrink = vexp(broadcast(part(c).high[r] - (high == kNegInf ? 0.f : high)));
      total += part(c).sum[r] * shrink[0];
      for (int64_t d = 0; d < head.width; d += kLanes) {
        const floats more = load(part(c).mixed + r * head.width + d) * shrink;
        store(mixed + d, c ? load(mixed + d) + more : more);
      }
    }
    const float inverse = total == 0 ? 0.f : 1.f / total;
    const int64_t head_id = kv * groups + r / call.nodes, node = r % call.nodes;
    T* out = static_cast<T*>(call.out) + ((b * call.nodes + node) * call.heads + head_id) * call.head_dim;
    for (int64_t d = 0; d < call.head_dim; ++d) store_scalar(out + d, mixed[d] * inverse);
  }
}

template <class T>
static void run(const TreeAttention& call) {
  const int64_t count = call.batch * call.kv_heads, chunks = call.slots > 0 ? (call.slots + kChunk - 1) / kChunk : 1;
  const int64_t lanes = ceil_to(call.heads / call.kv_heads * call.nodes, kLanes), width = ceil_to(call.head_dim, kLanes);
  const int64_t part_floats = 2 * lanes + lanes * width, work_floats = kBlock * (2 * width + lanes);
  const int threads = call.threads > 1 ? call.threads : 1;
  Scratch packed(count * head_floats(call, lanes)), work(threads * work_floats), partial(count * chunks * part_floats);
  const auto part = [&](int64_t index, int64_t chunk) {
    float* p = partial.data + (index * chunks + chunk) * part_floats;
    return Partial{p, p + lanes, p + 2 * lanes};
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#ifdef _OPENMP
    float* own = work.data + omp_get_thread_num() * work_floats;
#else
    float* own = work.data;
#endif
#pragma omp for schedule(static)
    for (int64_t index = 0; index < count; ++index) pack_head<T>(call, index, view_head(call, index, packed.data));
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < count * chunks; ++task) {
      const Head head = view_head(call, task / chunks, packed.data);
      const int64_t begin = task % chunks * kChunk;
      if (begin < head.end) run_chunk<T>(call, task / chunks, head, begin, own, part(task / chunks, task % chunks));
    }
#pragma omp for schedule(static)
    for (int64_t index = 0; index < count; ++index) {
      const Head head = view_head(call, index, packed.data);
      combine<T>(call, index, head, [&](int64_t chunk) { return part(index, chunk); }, (head.end + kChunk - 1) / kChunk);
    }
  }
}

int tree_attention(const TreeAttention& call) {
  if (call.batch * call.nodes * call.heads * call.head_dim == 0) return 0;
  call.dtype == Dtype::f32 ? run<float>(call) : run<bf16>(call);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, tree_attention, const TreeAttention&)

void dream::tree_attention_cpu(const TreeAttention& call) { tree_attention_dispatch(call); }
#endif
