// The operators made of others: what enters the attention of a block, what leaves it, and the whole block.
#include <cmath>
#include <memory>
#include <vector>

#include "cases.h"
#include "dream/block_merge.h"
#include "dream/block_project.h"
#include "dream/block_step.h"

namespace check {

using dream::Dtype;

// A linear layer on guarded memory; with a scale its weights have 8 bits.
struct Layer {
  Layer(Dtype dtype, int64_t in, int64_t out, bool scaled, bool biased)
      : weight(dtype, out, in), rounded(out, in), bias(size_of(dtype), {out}), scaled(scaled), biased(biased) {
    bias.random(dtype);
  }
  dream::PackedLayer view() const {
    const void* added = biased ? bias.data() : nullptr;
    if (scaled) return {rounded.packed.data(), rounded.scale.data<float>(), added, weight.out};
    return {weight.packed.data(), nullptr, added, weight.out};
  }

  PackedWeight weight;
  RoundedWeight rounded;
  Tensor bias;
  bool scaled, biased;
};

struct ProjectCase {
  int64_t rows, in, q_heads, k_heads, v_heads, head_dim, layers;
  int64_t gap;                 // between rows of x, of the tables and of the outputs
  bool normed, weighted;       // RMSNorm first, with a weight
  bool head_norms, turned;
  bool one_table, scaled;      // one table row for all rows; weights of 8 bits
};

// The arguments of block_project but for its outputs.
struct Projection {
  Projection(Dtype dtype, const ProjectCase& c)
      : c(c), dtype(dtype), x(size_of(dtype), {c.rows, c.in}, {c.in + c.gap, 1}), norm(size_of(dtype), {c.in}),
        q_norm(size_of(dtype), {c.head_dim}), k_norm(size_of(dtype), {c.head_dim}), cos(table()), sin(table()) {
    for (Tensor* tensor : {&x, &norm, &q_norm, &k_norm, &cos, &sin}) tensor->random(dtype);
    const int64_t heads[] = {c.q_heads, c.k_heads, c.v_heads};
    for (int64_t i = 0; i < c.layers; ++i) {
      int64_t out = heads[i];
      for (int64_t j = i + 1; i == c.layers - 1 && j < 3; ++j) out += heads[j];  // the last layer makes what is left
      layers.push_back(std::make_unique<Layer>(dtype, c.in, out * c.head_dim, c.scaled, i == 1));
    }
  }
  dream::BlockProject call(int threads) const {
    dream::BlockProject call{};
    call.x = x.data(), call.dtype = dtype, call.rows = c.rows, call.in = c.in, call.x_row = c.in + c.gap;
    call.normed = c.normed, call.norm_weight = c.weighted ? norm.data() : nullptr, call.eps = 1e-5f, call.round_first = c.weighted;
    for (int64_t i = 0; i < c.layers; ++i) call.layers[i] = layers[i]->view();
    call.layer_count = c.layers, call.q_heads = c.q_heads, call.k_heads = c.k_heads, call.v_heads = c.v_heads;
    call.head_dim = c.head_dim, call.threads = threads;
    if (c.head_norms) call.q_norm = q_norm.data(), call.k_norm = k_norm.data();
    if (c.turned) call.cos = cos.data(), call.sin = sin.data(), call.table_row = c.one_table ? 0 : c.head_dim + c.gap;
    return call;
  }

  ProjectCase c;
  Dtype dtype;
  Tensor x, norm, q_norm, k_norm, cos, sin;
  std::vector<std::unique_ptr<Layer>> layers;

 private:
  Tensor table() const { return Tensor(size_of(dtype), {c.one_table ? 1 : c.rows, c.head_dim}, {c.head_dim + c.gap, 1}); }
};

static void one_block_project(Dtype dtype, const ProjectCase& c) {
  at("block_project", size_of(dtype), c.rows, c.in, c.q_heads, c.k_heads, c.v_heads, c.head_dim, c.layers, c.gap, c.normed,
     c.weighted, c.head_norms, c.turned, c.one_table, c.scaled);
  const Projection projection(dtype, c);
  const int64_t item = size_of(dtype), row = c.head_dim + c.gap, head = c.rows * row + c.gap;
  every_thread_count([&](int threads) {
    Tensor q(item, {c.q_heads, c.rows, c.head_dim}, {head, row, 1});
    Tensor k(item, {c.k_heads, c.rows, c.head_dim}, {row, c.k_heads * row + c.gap, 1});  // heads inside slots
    Tensor v(item, {c.v_heads, c.rows, c.head_dim}, {head, row, 1});
    dream::BlockProject call = projection.call(threads);
    call.q = q.data(), call.q_head = head, call.q_row = row;
    call.k = k.data(), call.k_head = row, call.k_row = c.k_heads * row + c.gap;
    call.v = v.data(), call.v_head = head, call.v_row = row;
    dream::block_project_cpu(call);
    return q.require_finite(dtype).bits() + k.require_finite(dtype).bits() + v.require_finite(dtype).bits();
  });
}

void block_project() {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t head_dim : {2, 6, 14, 16, 18, 30, 32, 34, 66})  // halves around every register width
      for (const int64_t rows : {0, 1, 3, 8})
        for (const int64_t gap : {0, 3})
          for (const bool scaled : {false, true}) {
            const bool odd = rows % 2;
            one_block_project(dtype, {rows, 33, 3, 1, 1, head_dim, 1 + rows % 3, gap, true, !odd, gap > 0, true, odd, scaled});
          }
    for (const int64_t in : {0, 1, 15, 16, 17, 64, 130})
      for (const bool turned : {false, true})
        for (const bool normed : {false, true})
          one_block_project(dtype, {2, in, 2, 2, 1, 10, 3, in % 3, normed && in > 0, turned, !turned, turned, normed, turned});
    one_block_project(dtype, {5, 32, 4, 0, 0, 34, 1, 0, true, false, true, true, true, false});   // queries alone
    one_block_project(dtype, {5, 32, 0, 2, 2, 34, 2, 1, false, false, true, false, false, true});  // keys and values alone
    one_block_project(dtype, {64, 96, 9, 3, 3, 64, 3, 0, true, true, false, true, false, false});
  }
}

struct MergeCase {
  int64_t rows, hidden, attended, intermediate, gate_ups;
  bool weighted, gated, in_place, scaled;
};

// The arguments of block_merge but for x, what was attended and y.
struct Merging {
  Merging(Dtype dtype, const MergeCase& c)
      : c(c), dtype(dtype), norm(size_of(dtype), {c.hidden}), output(dtype, c.attended, c.hidden, c.scaled, true),
        down(dtype, c.intermediate, c.hidden, c.scaled, false) {
    norm.random(dtype);
    for (int64_t i = 0; i < c.gate_ups; ++i)
      gate_up.push_back(std::make_unique<Layer>(dtype, c.hidden, 2 * c.intermediate / c.gate_ups, c.scaled, i == 1));
  }
  dream::BlockMerge call(int threads) const {
    dream::BlockMerge call{};
    call.dtype = dtype, call.rows = c.rows, call.hidden = c.hidden, call.attended_size = c.attended;
    call.intermediate = c.intermediate, call.output = output.view(), call.norm_weight = c.weighted ? norm.data() : nullptr;
    call.eps = 1e-5f, call.round_first = c.weighted, call.gate_up_count = c.gate_ups, call.down = down.view();
    for (int64_t i = 0; i < c.gate_ups; ++i) call.gate_up[i] = gate_up[i]->view();
    call.gated = c.gated, call.attention_gate = 0.7f, call.mlp_gate = -0.3f, call.threads = threads;
    return call;
  }

  MergeCase c;
  Dtype dtype;
  Tensor norm;
  Layer output, down;
  std::vector<std::unique_ptr<Layer>> gate_up;
};

static void one_block_merge(Dtype dtype, const MergeCase& c) {
  at("block_merge", size_of(dtype), c.rows, c.hidden, c.attended, c.intermediate, c.gate_ups, c.weighted, c.gated, c.in_place, c.scaled);
  const Merging merging(dtype, c);
  const int64_t item = size_of(dtype);
  Tensor x(item, {c.rows, c.hidden}), attended(item, {c.rows, c.attended});
  x.random(dtype), attended.random(dtype);
  every_thread_count([&](int threads) {
    Tensor y(item, {c.rows, c.hidden});
    for (int64_t i = 0; c.in_place && i < x.size(); ++i) y.set_float(dtype, i, x.get_float(dtype, i));
    dream::BlockMerge call = merging.call(threads);
    call.x = c.in_place ? y.data() : x.data(), call.attended = attended.data(), call.y = y.data();
    dream::block_merge_cpu(call);
    return y.require_finite(dtype).bits();
  });
}

void block_merge() {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t rows : {0, 1, 2, 9})
      for (const int64_t hidden : {1, 7, 15, 16, 17, 33})
        for (const int64_t intermediate : {1, 3, 8, 15, 16, 17, 35})
          one_block_merge(dtype, {rows, hidden, 2 * hidden % 23 + 1, intermediate, 1 + intermediate % 2, rows % 2 > 0, hidden % 2 > 0,
                                  intermediate % 4 == 3, rows > 1});
    one_block_merge(dtype, {3, 0, 4, 5, 2, true, false, false, false});
    one_block_merge(dtype, {3, 16, 0, 0, 1, false, true, true, true});  // branches of nothing
    one_block_merge(dtype, {64, 96, 128, 80, 2, true, false, false, false});
    one_block_merge(dtype, {64, 96, 128, 80, 1, false, true, true, true});
  }
}

struct StepCase {
  int64_t nodes, length, heads, kv_heads, head_dim;
  bool padded, scaled;
  float cap;
};

static void one_block_step(Dtype dtype, const StepCase& c) {
  at("block_step", size_of(dtype), c.nodes, c.length, c.heads, c.kv_heads, c.head_dim, c.padded, c.scaled, c.cap);
  const int64_t item = size_of(dtype), hidden = 33, slots = c.length + c.nodes + 2, row = c.head_dim + 1;
  const Projection projection(dtype, {c.nodes, hidden, c.heads, c.kv_heads, c.kv_heads, c.head_dim, 2, 0, true, true, false, true,
                                      c.nodes % 2 > 0, c.scaled});
  const Merging merging(dtype, {c.nodes, hidden, c.heads * c.head_dim, 19, 2, true, false, false, c.scaled});
  Tensor lengths(8, {1}), ancestors(8, {c.nodes}), padding(1, {slots});
  lengths.set<int64_t>(0, c.length);
  for (int64_t n = 0; n < c.nodes; ++n)
    ancestors.set<uint64_t>(n, uint64_t{1} << n | (n ? uint64_t{dice()()} & ((uint64_t{1} << n) - 1) : 0));
  for (int64_t i = 0; i < slots; ++i) padding.set<uint8_t>(i, i >= c.length || pick(3) > 0);
  const auto seed = dice()();
  // Step by step, each operator on its own memory, or at once.
  const auto run = [&](int threads, bool at_once) {
    dice().seed(seed);  // the same cache for every run
    const int64_t k_head = row, k_row = c.kv_heads * row, v_head = slots * row + 2, v_row = row;
    Tensor k(item, {1, c.kv_heads, slots, c.head_dim}, {slots * k_row, k_head, k_row, 1});
    Tensor v(item, {1, c.kv_heads, slots, c.head_dim}, {c.kv_heads * v_head, v_head, v_row, 1});
    Tensor q(item, {c.heads, c.nodes, c.head_dim}), attended(item, {c.nodes, c.heads * c.head_dim}), y(item, {c.nodes, hidden});
    k.random(dtype), v.random(dtype);
    for (int64_t i = 0; i < k.size(); ++i)
      if (i / c.head_dim % slots >= c.length) k.set_float(dtype, i, NAN), v.set_float(dtype, i, NAN);  // to be written, or unseen
    dream::BlockStep call{projection.call(threads), {}, merging.call(threads)};
    call.project.k = k.data<char>() + c.length * k_row * item, call.project.k_head = k_head, call.project.k_row = k_row;
    call.project.v = v.data<char>() + c.length * v_row * item, call.project.v_head = v_head, call.project.v_row = v_row;
    dream::TreeAttention& attention = call.attention;
    attention.k = k.data(), attention.v = v.data(), attention.dtype = dtype, attention.batch = 1, attention.heads = c.heads;
    attention.kv_heads = c.kv_heads, attention.nodes = c.nodes, attention.tree = c.nodes, attention.slots = slots;
    attention.head_dim = c.head_dim, attention.k_head = k_head, attention.k_row = k_row, attention.v_head = v_head;
    attention.v_row = v_row, attention.lengths = lengths.data<int64_t>(), attention.ancestors = ancestors.data<uint64_t>();
    attention.padding = c.padded ? padding.data<uint8_t>() : nullptr, attention.scale = 0.2f, attention.cap = c.cap;
    attention.threads = threads;
    call.merge.x = projection.x.data(), call.merge.y = y.data();
    if (at_once) {
      dream::block_step_cpu(call);
    } else {
      call.project.q = q.data(), call.project.q_head = c.nodes * c.head_dim, call.project.q_row = c.head_dim;
      dream::block_project_cpu(call.project);
      attention.q = q.data(), attention.q_head = c.nodes * c.head_dim, attention.q_row = c.head_dim, attention.out = attended.data();
      dream::tree_attention_cpu(attention);
      call.merge.attended = attended.data();
      dream::block_merge_cpu(call.merge);
    }
    return y.require_finite(dtype).bits() + k.bits() + v.bits();
  };
  require(run(1, true) == run(1, false), "other bits than those of the three operators");
  every_thread_count([&](int threads) { return run(threads, true); });
}

void block_step() {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t nodes : {0, 1, 2, 8, 17, 63, 64})
      for (const int64_t length : {0, 1, 31, 32, 33})
        for (const int64_t head_dim : {2, 6, 34})
          one_block_step(dtype, {nodes, length, 3, nodes % 2 ? 3 : 1, head_dim, length % 2 > 0, head_dim == 6, nodes % 3 ? 0.f : 5.f});
    for (const int64_t length : {330, 511, 513}) one_block_step(dtype, {8, length, 4, 2, 64, false, length == 330, 0.f});
  }
}

}  // namespace check
