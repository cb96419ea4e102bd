// The CUDA kernels as device.cpp runs them: each function calls one operator's launcher over sizes at its boundaries, compares
// what it wrote, and folds the bits of all outputs into the hash.
#pragma once
#include <cstddef>
#include <cstdint>

namespace device_check {

uint64_t& hash();                            // of the outputs of the operator at work; device.cpp sets it back for each
void fold(const void* bytes, size_t count);  // FNV-1a

int run_fault(const char* name);  // a kernel of device_faults.cpp; the exit status

void attention_entropy();
void attention_mass();
void cross_attention();
void expand_tree();
void keep_path();
void rank_tree();
void sample_tree();
void select_visual();
void tree_attention();
void verify_tree();

}  // namespace device_check
