// Kernels that other kernels of the same instruction set call.
#pragma once
#include "cpu/lanes.h"
#include "dream/block_project.h"
#include "dream/rms_norm.h"
#include "dream/rounded_linear.h"
#include "dream/skinny_linear.h"
#include "dream/tree_attention.h"

namespace dream::DREAM_ISA {

int rms_norm(const RmsNorm& call);
int skinny_linear(const SkinnyLinear& call);
int rounded_linear(const RoundedLinear& call);
int tree_attention(const TreeAttention& call);

// y (rows, layer.out), rows y_row apart, from contiguous x (rows, in).
template <class T>
DREAM_INLINE void apply(const PackedLayer& layer, Dtype dtype, int64_t rows, int64_t in, const T* x, int64_t x_row, T* y,
                        int64_t y_row, int threads) {
  if (layer.scale)
    rounded_linear({x, static_cast<const uint8_t*>(layer.packed), layer.scale, layer.bias, dtype, rows, in, layer.out, x_row, y_row, y,
                    threads});
  else
    skinny_linear({x, layer.packed, layer.bias, dtype, rows, in, layer.out, x_row, y_row, y, threads});
}

}  // namespace dream::DREAM_ISA
