#pragma once
#include "dream/types.h"

namespace dream {

// A linear layer whose weight is packed as skinny_linear.h says or, when there is a scale, as rounded_linear.h says.
struct PackedLayer {
  const void* packed;  // (packed_elements) dtype, or bytes
  const float* scale;  // (out), or null
  const void* bias;  // (out) dtype, or null
  int64_t out;
};

// From the rows that enter an attention layer to its queries, keys and values: norm, linear layers, norms per head, rotary
// positions. CPU pointers; sums in fp32; every intermediate is rounded to dtype, as a chain of torch operators rounds it.
struct BlockProject {
  const void* x;             // (rows, in) dtype, row stride below, unit column stride
  Dtype dtype;
  int64_t rows, in;
  int64_t x_row;             // elements between rows of x
  bool normed;               // RMSNorm first, as rms_norm.h
  const void* norm_weight;   // (in) dtype, or null for 1
  float eps;                 // of all norms
  bool round_first;
  PackedLayer layers[3];     // their outputs, side by side, are the heads: queries, then keys, then values
  int64_t layer_count;       // 1 .. 3
  int64_t q_heads, k_heads, v_heads, head_dim;
  const void* q_norm;        // (head_dim) dtype: RMSNorm of every query head; null for none
  const void* k_norm;        // likewise for key heads
  const void *cos, *sin;     // (rows, head_dim) dtype, both halves; null for no rotation
  int64_t table_row;         // elements between rows of cos and sin; 0 when one row serves all
  void *q, *k, *v;           // (heads, rows, head_dim) dtype, strides below, unit stride along head_dim
  int64_t q_head, q_row, k_head, k_row, v_head, v_row;
  int threads;
};

void block_project_cpu(const BlockProject& call);

}  // namespace dream
