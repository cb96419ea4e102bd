// Plans of a transformer block's two halves: weights are read and checked once, a call brings only what changes.
#pragma once
#include <pybind11/pybind11.h>

#include "dream/block_merge.h"
#include "dream/block_project.h"

namespace dream {

struct ProjectPlan {
  BlockProject call;        // without rows, x, tables and outputs
  pybind11::object weights; // keeps alive what the pointers point to
};

struct MergePlan {
  BlockMerge call;          // without rows, x, attended and y
  pybind11::object weights;
};

// wide: rows are float32, else bfloat16. layers: (packed, scale or None, bias or None, out) each. heads: (queries, keys,
// values).
ProjectPlan project_plan(bool wide, const pybind11::tuple& layers, int64_t in, const pybind11::tuple& heads, int64_t head_dim, bool normed,
                         pybind11::handle norm, float eps, bool round_first, pybind11::handle q_norm, pybind11::handle k_norm);

// gates: (attention, feed-forward), or None.
MergePlan merge_plan(bool wide, const pybind11::tuple& output, int64_t attended_size, const pybind11::tuple& gate_up, const pybind11::tuple& down,
                     int64_t intermediate, pybind11::handle norm, float eps, bool round_first, pybind11::handle gates);

void bind_block_project(const ProjectPlan& plan, pybind11::handle x, pybind11::handle cos, pybind11::handle sin, pybind11::handle q,
                        pybind11::handle k, pybind11::handle v, int threads);
// keys, values: (1, kv_heads, slots, head_dim), whole; lengths (1), ancestors (1, rows).
void bind_block_step(const ProjectPlan& project, const MergePlan& merge, pybind11::handle x, pybind11::handle cos, pybind11::handle sin,
                     pybind11::handle keys, pybind11::handle values, pybind11::handle lengths, pybind11::handle ancestors, float cap,
                     float scale, pybind11::handle y, int threads);
void bind_block_merge(const MergePlan& plan, pybind11::handle x, pybind11::handle attended, pybind11::handle y, int threads);

}  // namespace dream
