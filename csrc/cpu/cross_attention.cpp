#include "dream/cross_attention.h"

#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/rotate.h"

namespace dream::DREAM_ISA {

// Queries of one head of one sequence, normed and rotated, to contiguous rows.
template <class T>
static void prepare_head(const CrossAttention& call, int64_t b, int64_t head, T* to) {
  const TreeAttention& a = call.attention;
  const T* q = static_cast<const T*>(a.q) + b * a.q_batch + head * a.q_head;
  rms_norm({q, call.q_norm, a.dtype, a.nodes, a.head_dim, a.q_row, call.eps, false, to});
  if (!call.cos) return;
  Room<T> normed(a.head_dim);
  for (int64_t r = 0; r < a.nodes; ++r) {
    const int64_t table = b * call.table_batch + r * call.table_row;
    memcpy(normed.data, to + r * a.head_dim, a.head_dim * sizeof(T));
    rotate(normed.data, static_cast<const T*>(call.cos) + table, static_cast<const T*>(call.sin) + table, a.head_dim, to + r * a.head_dim);
  }
}

template <class T>
static void run(const CrossAttention& call) {
  TreeAttention a = call.attention;
  const int64_t head_size = a.nodes * a.head_dim;
  Room<T> queries(a.batch * a.heads * head_size);
#pragma omp parallel for num_threads(a.threads > 1 ? a.threads : 1) if (a.threads > 1)
  for (int64_t i = 0; i < a.batch * a.heads; ++i) prepare_head(call, i / a.heads, i % a.heads, queries.data + i * head_size);
  a.q = queries.data, a.q_batch = a.heads * head_size, a.q_head = head_size, a.q_row = a.head_dim;
  tree_attention(a);
}

int cross_attention(const CrossAttention& call) {
  const TreeAttention& a = call.attention;
  if (a.batch * a.nodes * a.heads * a.head_dim == 0) return 0;
  a.dtype == Dtype::f32 ? run<float>(call) : run<bf16>(call);
  return 0;
}

}  // namespace dream::DREAM_ISA

#ifdef DREAM_DISPATCHER
DREAM_DISPATCH(int, cross_attention, const CrossAttention&)

void dream::cross_attention_cpu(const CrossAttention& call) { cross_attention_dispatch(call); }
#endif
