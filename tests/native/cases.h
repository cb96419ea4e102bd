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
    dtype == dream::Dtype::i8 ? matrix.random_bytes() : matrix.random(dtype);
    dream::pack_linear_cpu(call());
    if (dtype != dream::Dtype::i8) packed.require_finite(dtype);
    for (int64_t i = 0; dtype == dream::Dtype::i8 && i < packed.size(); ++i)
      require(packed.get<uint8_t>(i) != 0xff, "a packed weight was left out");  // random bytes never are 0xff
  }
  dream::PackLinear call() const { return {matrix.data(), packed.data(), dtype, out, in}; }

  dream::Dtype dtype;
  int64_t out, in;
  Tensor matrix, packed;
};

void attention_entropy();
void attention_mass();
void block_merge();
void block_project();
void block_step();
void expand_tree();
void keep_path();
void rank_tree();
void rms_norm();
void sample_tree();
void select_visual();
void skinny_linear();
void tree_attention();
void verify_tree();

}  // namespace check
