#pragma once
#include "dream/tree_attention.h"

namespace dream {

// Draft cross-attention: tree_attention whose queries come straight from their linear layer. Every query head is RMS-normed
// and, where there are tables, rotated; both steps round to dtype, as a chain of torch operators rounds.
struct CrossAttention {
  TreeAttention attention;   // q without norm and rotation
  const void* q_norm;        // (head_dim) dtype, weight of the norm
  float eps;
  const void *cos, *sin;     // (batch, nodes, head_dim) dtype, both halves, strides below; null for no rotation
  int64_t table_batch, table_row;  // elements between sequences and rows of cos and sin; 0 when one serves all
};

void cross_attention_cpu(const CrossAttention& call);
void cross_attention_cuda(const CrossAttention& call, int device, void* stream);  // workspace as tree_attention

}  // namespace dream
