#pragma once
#include "dream/types.h"

namespace dream {

// Attention of tree nodes over a cached prefix and their own ancestors. Sequence b has its prefix in slots 0 .. lengths[b),
// and its tree in the `tree` slots behind them. Strides in elements, unit stride along head_dim.
struct TreeAttention {
  const void* q;              // (batch, heads, nodes, head_dim) dtype, rotary positions applied
  const void* k;              // (batch, kv_heads, slots, head_dim) dtype; heads = groups x kv_heads
  const void* v;              // (batch, kv_heads, slots, head_dim) dtype
  Dtype dtype;                // sums are fp32
  int64_t batch, heads, kv_heads, nodes, tree, slots, head_dim;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;  // strides
  const int64_t* lengths;     // (batch) prefix slots; 0 <= length, length + tree <= slots
  const uint64_t* ancestors;  // (batch, nodes) bit j: the node sees tree slot j (its own included); tree <= 64
  const uint8_t* padding;     // (batch, slots) 0 = hidden from every node; null = nothing is hidden
  const int64_t* depth;       // (batch, nodes) place of each node behind the prefix, 0 .. 64; read only with a window
  int64_t window;             // a node sees prefix slot j iff j > length + depth - window; 0 = all. Tree slots: ancestors alone
  float scale;
  float cap;                  // scores s become cap tanh(s / cap) before the softmax; 0 = they stay
  void* out;                  // (batch, nodes, heads, head_dim) dtype, contiguous; a node that sees nothing gets zeros
  int threads;                // CPU; the same bits for every number
  void* workspace;            // CUDA: tree_attention_workspace bytes
};

void tree_attention_cpu(const TreeAttention& call);

// Lengths are read on the device; slots outside the buffers are never touched, whatever they say.
void tree_attention_cuda(const TreeAttention& call, int device, void* stream);
int64_t tree_attention_workspace(const TreeAttention& call);

}  // namespace dream
