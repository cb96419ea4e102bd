#pragma once
#include "dream/types.h"

namespace dream {

// Row entropies in nats of causal softmax(scale q k^T). Strides in elements, unit stride along head_dim.
struct AttentionEntropy {
  const void* q;    // (heads, n, head_dim) dtype
  const void* k;    // (kv_heads, n, head_dim) dtype; heads = groups x kv_heads
  Dtype dtype;      // sums are fp32
  int64_t heads, kv_heads, n, head_dim;
  int64_t q_head_stride, q_row_stride, k_head_stride, k_row_stride;
  float scale;
  float* entropy;   // (heads, n) out, row i over keys 0..i
  int threads;      // CPU
};

void attention_entropy_cpu(const AttentionEntropy& call);
void attention_entropy_cuda(const AttentionEntropy& call, int device, void* stream);

}  // namespace dream
