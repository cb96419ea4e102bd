#pragma once
#include "dream/types.h"

namespace dream {

// y = x / sqrt(mean(x^2) + eps) * weight, row by row. CPU pointers; sums and products in fp32.
struct RmsNorm {
  const void* x;       // (rows, size) dtype, row stride below, unit column stride
  const void* weight;  // (size) dtype, or null for 1
  Dtype dtype;
  int64_t rows, size;
  int64_t x_row;       // elements between rows of x
  float eps;
  bool round_first;    // round to dtype before the product with weight, as Llama's modelling code does
  void* y;             // (rows, size) dtype, contiguous
};

void rms_norm_cpu(const RmsNorm& call);

}  // namespace dream
