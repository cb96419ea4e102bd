#pragma once
#include "dream/types.h"

namespace dream {

constexpr int64_t kPanel = 16;  // outputs of one packed panel

// Weights are packed in panels of 16 outputs, rows past `out` zero. fp32: (panels, in, 16). bf16: (panels, ceil(in / 2), 16, 2),
// two neighbouring inputs side by side, an odd input's neighbour zero.
int64_t packed_elements(Dtype dtype, int64_t out, int64_t in);

// Moves a weight matrix into its packed form, or back.
struct PackLinear {
  void* weight;    // (out, in) dtype, contiguous; read when packing, written when unpacking
  void* packed;    // (packed_elements) dtype; written when packing, read when unpacking
  Dtype dtype;
  int64_t out, in;
};

// y = x W^T + bias. CPU pointers. A row's bits depend neither on the other rows, nor on their number, nor on the threads.
struct SkinnyLinear {
  const void* x;       // (rows, in) dtype, row stride below, unit column stride
  const void* packed;  // packed weight, same dtype
  const void* bias;    // (out) dtype, or null
  Dtype dtype;         // sums are fp32
  int64_t rows, in, out;
  int64_t x_row;       // elements between rows of x
  int64_t y_row;       // elements between rows of y
  void* y;             // (rows, out) dtype, unit column stride
  int threads;
};

void pack_linear_cpu(const PackLinear& call);
void unpack_linear_cpu(const PackLinear& call);
void skinny_linear_cpu(const SkinnyLinear& call);

}  // namespace dream
