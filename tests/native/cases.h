// The operators as operators.cpp runs them: each function calls one contract over sizes at its boundaries.
#pragma once
#include "guarded.h"

namespace check {

constexpr dream::Dtype kDtypes[] = {dream::Dtype::f32, dream::Dtype::bf16};

void attention_entropy();
void attention_mass();
void expand_tree();
void keep_path();
void rank_tree();
void rms_norm();
void select_visual();
void skinny_linear();
void tree_attention();
void verify_tree();

}  // namespace check
