// The operators as operators.cpp runs them: each function calls one contract over sizes at its boundaries.
#pragma once
#include "dream/skinny_linear.h"
#include "guarded.h"

namespace check {

constexpr dream::Dtype kDtypes[] = {dream::Dtype::f32, dream::Dtype::bf16};

// A random weight matrix (out, in) and its packed form.
struct PackedWeight {
  PackedWeight(dream::Dtype dtype, int64_t out, int64_t in)
      : dtype(dtype), out(out), in(in), matrix(size_of(dtype), {out, in}), packed(size_of(dtype), {dream::packed_elements(dtype, out, in)}) {
    matrix.random(dtype);
    dream::pack_linear_cpu(call());
    packed.require_finite(dtype);
  }
  dream::PackLinear call() const { return {matrix.data(), packed.data(), dtype, out, in}; }

  dream::Dtype dtype;
  int64_t out, in;
  Tensor matrix, packed;
};

// Random bytes in the panels of rounded_linear.h, with their scales.
struct RoundedWeight {
  RoundedWeight(int64_t out, int64_t in) : packed(1, {(out + 15) / 16 * ((in + 3) / 4) * 64}), scale(4, {out}) {
    packed.random_bytes();
    for (int64_t i = 0; i < out; ++i) scale.set<float>(i, static_cast<float>(1 + pick(16)) / 1024.f);
  }
  Tensor packed, scale;
};

void attention_entropy();
void attention_mass();
void block_merge();
void block_project();
void block_step();
void cross_attention();
void expand_tree();
void keep_path();
void rank_tree();
void rms_norm();
void rounded_linear();
void sample_tree();
void select_visual();
void skinny_linear();
void tree_attention();
void verify_tree();

}  // namespace check
