#pragma once
#include "dream/types.h"

namespace dream {

// Attention mass per key, summed over heads and rows. Strides in elements, unit stride along head_dim.
struct AttentionMass {
  const void* q;                 // (heads, rows, head_dim) dtype
  const void* k;                 // (kv_heads, keys, head_dim) dtype; heads = groups x kv_heads
  Dtype dtype;                   // sums are fp32
  const int64_t* row_positions;  // (rows) key j is visible iff j <= position
  int64_t heads, kv_heads, rows, keys, head_dim;
  int64_t q_head_stride, q_row_stride, k_head_stride, k_row_stride;
  float scale;
  float* mass;                   // (keys) out; the same bits for every number of threads, and from run to run
  int threads;                   // CPU
  void* workspace;               // CUDA: attention_mass_workspace bytes
};

void attention_mass_cpu(const AttentionMass& call);
void attention_mass_cuda(const AttentionMass& call, int device, void* stream);
int64_t attention_mass_workspace(const AttentionMass& call);

}  // namespace dream
