// The operators with heavy arithmetic: attention, linear layers, norms.
#include <algorithm>
#include <cmath>

#include "cases.h"
#include "dream/attention_entropy.h"
#include "dream/attention_mass.h"
#include "dream/rms_norm.h"
#include "dream/rounded_linear.h"
#include "dream/skinny_linear.h"
#include "dream/cross_attention.h"

namespace check {

using dream::Dtype;

void rms_norm() {
  for (const Dtype dtype : kDtypes)
    for (const int64_t size : {0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 576})
      for (const int64_t rows : {0, 1, 3})
        for (const int64_t gap : {0, 3})
          for (const bool weighted : {false, true}) {
            at("rms_norm", size_of(dtype), size, rows, gap, weighted);
            Tensor x(size_of(dtype), {rows, size}, {size + gap, 1}), weight(size_of(dtype), {size}), y(size_of(dtype), {rows, size});
            dream::RmsNorm call{};
            call.x = x.random(dtype).data(), call.weight = weighted ? weight.random(dtype).data() : nullptr;
            call.dtype = dtype, call.rows = rows, call.size = size, call.x_row = size + gap, call.eps = 1e-5f;
            call.round_first = weighted, call.y = y.data();
            dream::rms_norm_cpu(call);
            y.require_finite(dtype);
          }
}

static void one_skinny_linear(Dtype dtype, int64_t rows, int64_t in, int64_t out, int64_t gap, bool biased) {
  at("skinny_linear", size_of(dtype), rows, in, out, gap, biased);
  const int64_t item = size_of(dtype);
  PackedWeight weight(dtype, out, in);
  Tensor back(item, {out, in}), bias(item, {out}), x(item, {rows, in}, {in + gap, 1});
  bias.random(dtype), x.random(dtype);
  dream::PackLinear pack = weight.call();
  pack.weight = back.data();
  dream::unpack_linear_cpu(pack);
  require(weight.matrix.bits() == back.bits(), "unpacking gives other bits");
  every_thread_count([&](int threads) {
    Tensor y(item, {rows, out}, {out + gap, 1});
    dream::SkinnyLinear call{};
    call.x = x.data(), call.packed = weight.packed.data();
    call.bias = biased ? bias.data() : nullptr, call.dtype = dtype, call.rows = rows, call.in = in, call.out = out;
    call.x_row = in + gap, call.y_row = out + gap, call.y = y.data(), call.threads = threads;
    dream::skinny_linear_cpu(call);
    return y.require_finite(dtype).bits();
  });
}

static void one_rounded_linear(Dtype dtype, int64_t rows, int64_t in, int64_t out, int64_t gap, bool biased) {
  at("rounded_linear", size_of(dtype), rows, in, out, gap, biased);
  const int64_t item = size_of(dtype);
  RoundedWeight weight(out, in);
  Tensor bias(item, {out}), x(item, {rows, in}, {in + gap, 1});
  bias.random(dtype), x.random(dtype);
  every_thread_count([&](int threads) {
    Tensor y(item, {rows, out}, {out + gap, 1});
    dream::RoundedLinear call{};
    call.x = x.data(), call.packed = weight.packed.data<uint8_t>(), call.scale = weight.scale.data<float>();
    call.bias = biased ? bias.data() : nullptr, call.dtype = dtype, call.rows = rows, call.in = in, call.out = out;
    call.x_row = in + gap, call.y_row = out + gap, call.y = y.data(), call.threads = threads;
    dream::rounded_linear_cpu(call);
    return y.require_finite(dtype).bits();
  });
}

// Rows, inputs and outputs at every boundary of a tile.
static void linear_sizes(void (*one)(Dtype, int64_t, int64_t, int64_t, int64_t, bool)) {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 17})
      for (const int64_t in : {0, 1, 2, 3, 4, 17, 65, 130})
        for (const int64_t out : {0, 1, 15, 16, 17, 33, 48, 65}) one(dtype, rows, in, out, rows % 4, rows % 2);
    for (const int64_t in : {15, 16, 63, 64, 127, 128, 129, 257}) one(dtype, 8, in, 97, 1, true);
    one(dtype, 64, 96, 129, 0, false);
  }
}

void rounded_linear() { linear_sizes(one_rounded_linear); }
void skinny_linear() { linear_sizes(one_skinny_linear); }

// Query and key heads of (rows, head_dim) that lie apart.
static std::vector<int64_t> head_strides(int64_t rows, int64_t row) { return {rows * row + 2, row, 1}; }

static void one_attention_mass(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys, int64_t head_dim) {
  at("attention_mass", size_of(dtype), heads, kv_heads, rows, keys, head_dim);
  const int64_t q_row = head_dim + 1, k_row = head_dim + keys % 2;
  Tensor q(size_of(dtype), {heads, rows, head_dim}, head_strides(rows, q_row)), positions(8, {rows});
  Tensor k(size_of(dtype), {kv_heads, keys, head_dim}, head_strides(keys, k_row));
  q.random(dtype), k.random(dtype);
  for (int64_t r = 0; r < rows; ++r) positions.set<int64_t>(r, pick(keys + 4) - 2);  // also before the first, past the last
  every_thread_count([&](int threads) {
    Tensor mass(4, {keys});
    dream::AttentionMass call{};
    call.q = q.data(), call.k = k.data(), call.dtype = dtype, call.row_positions = positions.data<int64_t>();
    call.heads = heads, call.kv_heads = kv_heads, call.rows = rows, call.keys = keys, call.head_dim = head_dim;
    call.q_head_stride = rows * q_row + 2, call.q_row_stride = q_row, call.k_head_stride = keys * k_row + 2;
    call.k_row_stride = k_row, call.scale = 0.2f, call.mass = mass.data<float>(), call.threads = threads;
    dream::attention_mass_cpu(call);
    return mass.require_finite(Dtype::f32).bits();
  });
}

void attention_mass() {
  for (const Dtype dtype : kDtypes) one_attention_mass(dtype, 9, 3, 33, 1030, 64);  // long enough for threads to share it
  for (const Dtype dtype : kDtypes)
    for (const int64_t keys : {0, 1, 63, 64, 65, 129})
      for (const int64_t rows : {0, 1, 3, 4, 5, 9})
        for (const int64_t head_dim : {0, 1, 17, 64}) {
          one_attention_mass(dtype, 1, 1, rows, keys, head_dim);
          one_attention_mass(dtype, 9, 3, rows, keys, head_dim);
        }
}

static void one_attention_entropy(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t n, int64_t head_dim) {
  at("attention_entropy", size_of(dtype), heads, kv_heads, n, head_dim);
  const int64_t q_row = head_dim + 1, k_row = head_dim + n % 2;
  Tensor q(size_of(dtype), {heads, n, head_dim}, head_strides(n, q_row));
  Tensor k(size_of(dtype), {kv_heads, n, head_dim}, head_strides(n, k_row));
  q.random(dtype), k.random(dtype);
  every_thread_count([&](int threads) {
    Tensor entropy(4, {heads, n});
    dream::AttentionEntropy call{};
    call.q = q.data(), call.k = k.data(), call.dtype = dtype;
    call.heads = heads, call.kv_heads = kv_heads, call.n = n, call.head_dim = head_dim;
    call.q_head_stride = n * q_row + 2, call.q_row_stride = q_row, call.k_head_stride = n * k_row + 2;
    call.k_row_stride = k_row, call.scale = 0.2f, call.entropy = entropy.data<float>(), call.threads = threads;
    dream::attention_entropy_cpu(call);
    return entropy.require_finite(Dtype::f32).bits();
  });
}

void attention_entropy() {
  for (const Dtype dtype : kDtypes) one_attention_entropy(dtype, 9, 3, 257, 64);
  for (const Dtype dtype : kDtypes)
    for (const int64_t n : {0, 1, 2, 3, 4, 5, 63, 64, 65, 67, 129})
      for (const int64_t head_dim : {0, 1, 17, 64}) {
        one_attention_entropy(dtype, 1, 1, n, head_dim);
        one_attention_entropy(dtype, 9, 3, n, head_dim);
      }
}

struct TreeCase {
  int64_t heads, kv_heads, nodes, tree, length, head_dim, window;
  bool padded;
  float cap = 0;
};

static void one_tree_attention(Dtype dtype, int64_t batch, const TreeCase& c) {
  at("tree_attention", size_of(dtype), batch, c.heads, c.kv_heads, c.nodes, c.tree, c.length, c.head_dim, c.window, c.padded, c.cap);
  const int64_t item = size_of(dtype), row = c.head_dim + 1, slots = c.length + c.tree + 3, q_head = c.nodes * row + 1;
  const int64_t q_batch = c.heads * q_head + 3, k_head = row, k_row = c.kv_heads * row, k_batch = slots * k_row + 1;
  const int64_t v_head = slots * row + 2, v_batch = c.kv_heads * v_head;
  Tensor q(item, {batch, c.heads, c.nodes, c.head_dim}, {q_batch, q_head, row, 1});
  Tensor k(item, {batch, c.kv_heads, slots, c.head_dim}, {k_batch, k_head, k_row, 1});
  Tensor v(item, {batch, c.kv_heads, slots, c.head_dim}, {v_batch, v_head, row, 1});
  q.random(dtype), k.random(dtype), v.random(dtype);
  Tensor lengths(8, {batch}), ancestors(8, {batch, c.nodes}), padding(1, {batch, slots}), depth(8, {batch, c.nodes});
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = b == 0 ? c.length : c.length / 2;  // the shorter sequence ends inside another chunk
    lengths.set<int64_t>(b, length);
    for (int64_t slot = 0; slot < slots; ++slot) {
      const bool hidden = c.padded && slot < length && pick(3) == 0;
      padding.set<uint8_t>(b * slots + slot, !hidden);
      for (int64_t i = 0; i < c.kv_heads * c.head_dim; ++i) {  // what no node sees may hold anything
        const int64_t at = ((b * c.kv_heads + i / c.head_dim) * slots + slot) * c.head_dim + i % c.head_dim;
        if (hidden || slot >= length + c.tree) k.set_float(dtype, at, NAN), v.set_float(dtype, at, INFINITY);
      }
    }
    for (int64_t n = 0; n < c.nodes; ++n) {
      ancestors.set<uint64_t>(b * c.nodes + n, n < c.tree ? uint64_t{1} << n | (n ? uint64_t{dice()()} & ((uint64_t{1} << n) - 1) : 0) : 0);
      depth.set<int64_t>(b * c.nodes + n, n ? std::min<int64_t>(n, 64) : 0);
    }
  }
  every_thread_count([&](int threads) {
    Tensor out(item, {batch, c.nodes, c.heads, c.head_dim});
    dream::TreeAttention call{};
    call.q = q.data(), call.k = k.data(), call.v = v.data(), call.dtype = dtype, call.batch = batch, call.heads = c.heads;
    call.kv_heads = c.kv_heads, call.nodes = c.nodes, call.tree = c.tree, call.slots = slots, call.head_dim = c.head_dim;
    call.q_batch = q_batch, call.q_head = q_head, call.q_row = row, call.k_batch = k_batch, call.k_head = k_head;
    call.k_row = k_row, call.v_batch = v_batch, call.v_head = v_head, call.v_row = row;
    call.lengths = lengths.data<int64_t>(), call.ancestors = ancestors.data<uint64_t>();
    call.padding = c.padded ? padding.data<uint8_t>() : nullptr, call.depth = c.window ? depth.data<int64_t>() : nullptr;
    call.window = c.window, call.scale = 0.2f, call.cap = c.cap, call.out = out.data(), call.threads = threads;
    dream::tree_attention_cpu(call);
    return out.require_finite(dtype).bits();
  });
}

void tree_attention() {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t length : {0, 1, 31, 32, 33})
      for (const int64_t nodes : {0, 1, 2, 5, 17, 64})
        for (const int64_t head_dim : {1, 15, 16, 17, 80})
          one_tree_attention(dtype, 1 + nodes % 2, {3, nodes % 2 ? 3 : 1, nodes, nodes, length, head_dim, length % 2 * 7, nodes % 3 == 2});
    for (const int64_t length : {447, 448, 449, 511, 512, 513, 1030})
      one_tree_attention(dtype, 2, {4, 2, 64, 64, length, 20, length % 2 * 500, length % 3 == 0});
    one_tree_attention(dtype, 0, {3, 1, 4, 4, 8, 16, 0, false});
    one_tree_attention(dtype, 1, {3, 1, 4, 0, 8, 16, 0, false});  // nodes that see the prefix alone
    one_tree_attention(dtype, 1, {3, 1, 4, 0, 0, 16, 0, false});  // nodes that see nothing
    one_tree_attention(dtype, 1, {3, 1, 4, 64, 8, 16, INT64_MAX, true});
    one_tree_attention(dtype, 1, {3, 1, 4, 4, 8, 0, 0, false});
    for (const float cap : {1e-3f, 0.5f, 50.f, 1e30f}) {  // far below the scores, among them, far above
      for (const int64_t nodes : {1, 2, 17, 64})
        for (const int64_t length : {0, 31, 33}) one_tree_attention(dtype, 2, {4, 2, nodes, nodes, length, 17, length % 2 * 7, nodes == 17, cap});
      one_tree_attention(dtype, 1, {4, 2, 8, 8, 513, 64, 0, true, cap});
    }
  }
}

// The same bits as rms_norm and tree_attention one after the other: without tables, and with one that turns by nothing.
static void one_cross_attention(Dtype dtype, int64_t batch, int64_t heads, int64_t kv_heads, int64_t nodes, int64_t head_dim) {
  at("cross_attention", size_of(dtype), batch, heads, kv_heads, nodes, head_dim);
  const int64_t item = size_of(dtype), row = head_dim + 1, slots = 40, rows = batch * heads * nodes;
  Tensor q(item, {batch, heads, nodes, head_dim}, {heads * nodes * row + 3, nodes * row, row, 1});
  Tensor normed(item, {batch, heads, nodes, head_dim});
  Tensor k(item, {batch, kv_heads, slots, head_dim}), v(item, {batch, kv_heads, slots, head_dim}), norm(item, {head_dim});
  Tensor lengths(8, {batch}), ancestors(8, {batch, nodes}), cos(item, {batch, nodes, head_dim}, {nodes * row, row, 1});
  Tensor sin(item, {batch, nodes, head_dim}, {nodes * row, row, 1});
  q.random(dtype), k.random(dtype), v.random(dtype), norm.random(dtype);
  for (int64_t b = 0; b < batch; ++b) lengths.set<int64_t>(b, 33 - 7 * b);
  for (int64_t i = 0; i < ancestors.size(); ++i) ancestors.set<uint64_t>(i, uint64_t{1} << i % 5);
  for (int64_t r = 0; r < batch * heads; ++r) {
    const char* from = q.data<char>() + (r / heads * (heads * nodes * row + 3) + r % heads * nodes * row) * item;
    char* to = normed.data<char>() + r * nodes * head_dim * item;
    if (nodes) dream::rms_norm_cpu({from, norm.data(), dtype, nodes, head_dim, row, 1e-5f, false, to});
  }
  const auto run = [&](int threads, bool tables, bool apart) {
    Tensor out(item, {batch, nodes, heads, head_dim});
    dream::CrossAttention call{};
    dream::TreeAttention& a = call.attention;
    a.q = q.data(), a.k = k.data(), a.v = v.data(), a.dtype = dtype, a.batch = batch, a.heads = heads, a.kv_heads = kv_heads;
    a.nodes = nodes, a.tree = 5, a.slots = slots, a.head_dim = head_dim, a.lengths = lengths.data<int64_t>();
    a.q_batch = heads * nodes * row + 3, a.q_head = nodes * row, a.q_row = row, a.scale = 0.2f, a.out = out.data(), a.threads = threads;
    a.k_batch = a.v_batch = kv_heads * slots * head_dim, a.k_head = a.v_head = slots * head_dim, a.k_row = a.v_row = head_dim;
    a.ancestors = ancestors.data<uint64_t>(), call.q_norm = norm.data(), call.eps = 1e-5f;
    if (tables) call.cos = cos.data(), call.sin = sin.data(), call.table_batch = nodes * row, call.table_row = row;
    if (apart) a.q = normed.data(), a.q_batch = heads * nodes * head_dim, a.q_head = nodes * head_dim, a.q_row = head_dim;
    apart ? dream::tree_attention_cpu(a) : dream::cross_attention_cpu(call);
    return out.require_finite(dtype).bits();
  };
  for (int64_t i = 0; i < cos.size(); ++i) cos.set_float(dtype, i, 1.f), sin.set_float(dtype, i, 0.f);
  const std::string apart = run(1, false, true);
  require(run(1, false, false) == apart, "other bits than those of norm and attention");
  require(run(1, true, false) == apart, "a rotation by nothing turns");
  cos.random(dtype), sin.random(dtype);
  require(rows == 0 || run(1, true, false) != apart, "no rotation");
  every_thread_count([&](int threads) { return run(threads, true, false); });
}

void cross_attention() {
  for (const Dtype dtype : kDtypes)
    for (const int64_t nodes : {0, 1, 5, 17})
      for (const int64_t head_dim : {2, 6, 34, 64}) one_cross_attention(dtype, 1 + nodes % 3, 4, nodes % 2 ? 2 : 4, nodes, head_dim);
}

}  // namespace check
