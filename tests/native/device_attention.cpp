// tree_attention and cross_attention on the device, against a reference in double precision that the CPU kernels must meet too.
// What no node may see is NaN: slots behind the tree, hidden slots, the memory between rows, workspace and output before the call.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "cuda/simt.cuh"
#include "device_cases.h"
#include "dream/cross_attention.h"
#include "guarded.h"

namespace device_check {

using check::at;
using check::pick;
using check::require;
using check::Tensor;
using dream::Dtype;

namespace {

constexpr Dtype kAll[] = {Dtype::f32, Dtype::bf16, Dtype::f16}, kSixteen[] = {Dtype::bf16, Dtype::f16};

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

double rounded(Dtype dtype, double x) {
  const float value = static_cast<float>(x);
  if (dtype == Dtype::f32) return value;
  return dtype == Dtype::bf16 ? __bfloat162float(__float2bfloat16(value)) : __half2float(__float2half(value));
}

void put(Tensor& tensor, Dtype dtype, int64_t index, double x) {
  if (dtype == Dtype::f32) tensor.set(index, static_cast<float>(x));
  if (dtype == Dtype::bf16) tensor.set(index, __float2bfloat16(static_cast<float>(x)));
  if (dtype == Dtype::f16) tensor.set(index, __float2half(static_cast<float>(x)));
}

double get(const Tensor& tensor, Dtype dtype, int64_t index) {
  if (dtype == Dtype::f32) return tensor.get<float>(index);
  return dtype == Dtype::bf16 ? __bfloat162float(tensor.get<__nv_bfloat16>(index)) : __half2float(tensor.get<__half>(index));
}

double draw() { return static_cast<double>(pick(4001) - 2000) / 1000.0; }  // in [-2, 2]

// Values lie in [-2, 2]. A 16-bit kernel rounds each weight and the result, by at most u = 2^-9 (bf16) or 2^-12 (f16) of them: 4 u
// together. In fp32 a score of up to 256 products in [-4, 4] is off by less than 1e-5, and so is a weight.
double tolerance(Dtype dtype) { return dtype == Dtype::f32 ? 4e-5 : dtype == Dtype::bf16 ? 0x1p-7 : 0x1p-10; }

struct Sizes {
  int64_t batch, heads, kv_heads, nodes, tree, slots, head_dim;
};

enum class Layout { plain, wide, odd, slots_first };  // strides of k and v; rows of `odd` are not aligned to 16 bytes

struct Case {
  Case(Dtype dtype, const Sizes& x, std::vector<int64_t> lengths, Layout layout = Layout::plain)
      : dtype(dtype),
        x(x),
        q_strides(strides(x.heads, x.nodes, x.head_dim, layout)),
        k_strides(strides(x.kv_heads, x.slots, x.head_dim, layout)),
        q(bytes_of(dtype), {x.batch, x.heads, x.nodes, x.head_dim}, q_strides),
        k(bytes_of(dtype), {x.batch, x.kv_heads, x.slots, x.head_dim}, k_strides),
        v(bytes_of(dtype), {x.batch, x.kv_heads, x.slots, x.head_dim}, k_strides),
        lengths(8, {x.batch}),
        ancestors(8, {x.batch, x.nodes}),
        depth(8, {x.batch, x.nodes}),
        padding(1, {x.batch, x.slots}),
        norm(bytes_of(dtype), {x.head_dim}) {
    for (int64_t i = 0; i < q.size(); ++i) put(q, dtype, i, draw());
    for (int64_t b = 0; b < x.batch; ++b) this->lengths.set<int64_t>(b, lengths[b % lengths.size()]);
    for (int64_t i = 0; i < ancestors.size(); ++i) {
      const int64_t node = i % x.nodes;
      const uint64_t own = node < 64 ? uint64_t{1} << node : 0, known = x.tree < 64 ? (uint64_t{1} << x.tree) - 1 : ~uint64_t{0};
      ancestors.set<uint64_t>(i, (static_cast<uint64_t>(pick(1 << 30)) * 0x9e3779b97f4a7c15u | own) & known & (2 * own - 1));
      depth.set<int64_t>(i, pick(std::min<int64_t>(node, 9) + 1));
    }
    for (int64_t i = 0; i < padding.size(); ++i) padding.set<uint8_t>(i, pick(3) ? 255 : 0);
    for (int64_t d = 0; d < x.head_dim; ++d) put(norm, dtype, d, draw());
  }

  static std::vector<int64_t> strides(int64_t heads, int64_t rows, int64_t size, Layout layout) {
    const int64_t row = size + (layout == Layout::wide ? 8 : layout == Layout::odd ? 1 : 0);
    if (layout == Layout::slots_first) return {rows * heads * row, row, heads * row, 1};
    return {heads * rows * row + (layout == Layout::odd), rows * row, row, 1};
  }
  int64_t length(int64_t b) const { return std::min(std::max<int64_t>(lengths.get<int64_t>(b), 0), x.slots - x.tree); }
  bool sees(int64_t b, int64_t node, int64_t slot) const {
    const int64_t behind = slot - length(b);
    if (behind >= x.tree || (padded && !padding.get<uint8_t>(b * x.slots + slot))) return false;
    if (behind >= 0) return ancestors.get<uint64_t>(b * x.nodes + node) >> behind & 1;
    return !window || behind > depth.get<int64_t>(b * x.nodes + node) - window;
  }
  // Keys and values where any node sees them.
  void fill() {
    for (int64_t i = 0; i < k.size(); ++i) {
      const int64_t slot = i / x.head_dim % x.slots, b = i / x.head_dim / x.slots / x.kv_heads;
      bool seen = false;
      for (int64_t node = 0; node < x.nodes; ++node) seen = seen || sees(b, node, slot);
      if (seen) put(k, dtype, i, draw()), put(v, dtype, i, draw());
    }
  }
  dream::TreeAttention call(Tensor& out, Tensor& workspace) const {
    dream::TreeAttention c{};
    c.q = q.data(), c.k = k.data(), c.v = v.data(), c.dtype = dtype;
    c.batch = x.batch, c.heads = x.heads, c.kv_heads = x.kv_heads, c.nodes = x.nodes;
    c.tree = x.tree, c.slots = x.slots, c.head_dim = x.head_dim;
    c.q_batch = q_strides[0], c.q_head = q_strides[1], c.q_row = q_strides[2];
    c.k_batch = c.v_batch = k_strides[0], c.k_head = c.v_head = k_strides[1], c.k_row = c.v_row = k_strides[2];
    c.lengths = lengths.data<int64_t>(), c.ancestors = ancestors.data<uint64_t>();
    c.padding = padded ? padding.data<uint8_t>() : nullptr, c.depth = window ? depth.data<int64_t>() : nullptr;
    c.window = window, c.scale = scale, c.cap = cap, c.out = out.data(), c.threads = 1, c.workspace = workspace.data();
    return c;
  }

  Dtype dtype;
  Sizes x;
  std::vector<int64_t> q_strides, k_strides;
  Tensor q, k, v, lengths, ancestors, depth, padding, norm;
  bool padded = false;
  int64_t window = 0;
  float scale = 0.25f, cap = 0;
  // Of cross_attention.
  bool cross = false;
  Tensor *cos = nullptr, *sin = nullptr;
  int64_t table_batch = 0, table_row = 0;
  float eps = 1e-5f;
};

// One query row; of cross_attention normed and rotated, rounded where a chain of torch operators rounds.
std::vector<double> query(const Case& c, int64_t b, int64_t head, int64_t node) {
  const int64_t size = c.x.head_dim;
  std::vector<double> row(size), turned(size);
  double square = 0;
  for (int64_t d = 0; d < size; ++d) {
    row[d] = get(c.q, c.dtype, ((b * c.x.heads + head) * c.x.nodes + node) * size + d);
    square += row[d] * row[d];
  }
  if (!c.cross) return row;
  for (int64_t d = 0; d < size; ++d) row[d] = rounded(c.dtype, row[d] / std::sqrt(square / size + c.eps) * get(c.norm, c.dtype, d));
  if (!c.cos) return row;
  for (int64_t d = 0; d < size; ++d) {
    const int64_t at = b * c.table_batch + node * c.table_row + d;
    const double other = d < size / 2 ? -row[d + size / 2] : row[d - size / 2];
    turned[d] = rounded(c.dtype, rounded(c.dtype, row[d] * get(*c.cos, c.dtype, at)) + rounded(c.dtype, other * get(*c.sin, c.dtype, at)));
  }
  return turned;
}

std::vector<double> reference(const Case& c) {
  const Sizes& x = c.x;
  std::vector<double> out(x.batch * x.nodes * x.heads * x.head_dim, 0.0);
  for (int64_t row = 0; row < x.batch * x.nodes * x.heads; ++row) {
    const int64_t head = row % x.heads, node = row / x.heads % x.nodes, b = row / x.heads / x.nodes;
    const std::vector<double> q = query(c, b, head, node);
    const int64_t lane = (b * x.kv_heads + head / (x.heads / x.kv_heads)) * x.slots;
    std::vector<double> scores(x.slots, -INFINITY);
    double high = -INFINITY, total = 0;
    for (int64_t j = 0; j < x.slots; ++j) {
      if (!c.sees(b, node, j)) continue;
      double s = 0;
      for (int64_t d = 0; d < x.head_dim; ++d) s += q[d] * get(c.k, c.dtype, (lane + j) * x.head_dim + d);
      scores[j] = c.cap > 0 ? c.cap * std::tanh(s * c.scale / c.cap) : s * c.scale;
      high = std::max(high, scores[j]);
    }
    for (int64_t j = 0; j < x.slots; ++j) {
      if (!c.sees(b, node, j)) continue;
      const double weight = std::exp(scores[j] - high);
      total += weight;
      for (int64_t d = 0; d < x.head_dim; ++d) out[row * x.head_dim + d] += weight * get(c.v, c.dtype, (lane + j) * x.head_dim + d);
    }
    for (int64_t d = 0; total > 0 && d < x.head_dim; ++d) out[row * x.head_dim + d] /= total;
  }
  return out;
}

void compare(const Case& c, const Tensor& out, const std::vector<double>& wanted, const char* what) {
  // One query element in some thousands lies so near to a tie that fp32 rounds it to the other neighbour.
  const double allowed = tolerance(c.dtype) * (c.cross ? 2 : 1);
  for (int64_t i = 0; i < out.size(); ++i) {
    const double got = get(out, c.dtype, i);
    const bool both_odd = !std::isfinite(got) && !std::isfinite(wanted[i]);
    if (both_odd || std::fabs(got - wanted[i]) <= allowed) continue;
    std::fprintf(stderr, "element %lld: wanted %g, got %g\n", static_cast<long long>(i), wanted[i], got);
    return require(false, what);
  }
}

// Fills, calls the device and, where it knows the dtype and trusts the lengths, the CPU.
void run(Case& c, bool trusted = true) {
  const Sizes& x = c.x;
  Tensor out(bytes_of(c.dtype), {x.batch, x.nodes, x.heads, x.head_dim}), host(bytes_of(c.dtype), {x.batch, x.nodes, x.heads, x.head_dim});
  Tensor none(1, {0});
  dream::CrossAttention call{};
  call.attention = c.call(out, none);
  Tensor workspace(1, {dream::tree_attention_workspace(call.attention)});
  call.attention = c.call(out, workspace);
  call.q_norm = c.norm.data(), call.eps = c.eps, call.table_batch = c.table_batch, call.table_row = c.table_row;
  if (c.cos) call.cos = c.cos->data(), call.sin = c.sin->data();
  c.cross ? dream::cross_attention_cuda(call, 0, nullptr) : dream::tree_attention_cuda(call.attention, 0, nullptr);
  const std::string bits = out.bits();
  fold(bits.data(), bits.size());
  const std::vector<double> wanted = reference(c);
  compare(c, out, wanted, "the device is off");
  if (c.dtype == Dtype::f16 || !trusted) return;
  call.attention.out = host.data();
  c.cross ? dream::cross_attention_cpu(call) : dream::tree_attention_cpu(call.attention);
  compare(c, host, wanted, "the CPU is off");
}

void run_new(Dtype dtype, const Sizes& x, std::vector<int64_t> lengths, const std::function<void(Case&)>& change = {},
             Layout layout = Layout::plain) {
  at("attention", bytes_of(dtype), dtype == Dtype::f16, x.batch, x.heads, x.kv_heads, x.nodes, x.tree, x.slots, x.head_dim,
     static_cast<int64_t>(layout));
  Case c(dtype, x, lengths, layout);
  if (change) change(c);
  c.fill();
  run(c);
}

// Heads, key heads and nodes with 16, 15, 28, 32, 63, 64 and, in two tiles of rows, 66 rows a key head.
struct Rows {
  int64_t heads, kv_heads, nodes;
};
constexpr Rows kRows[] = {{1, 1, 16}, {3, 1, 5}, {8, 2, 7}, {1, 1, 32}, {7, 1, 9}, {4, 1, 16}, {2, 1, 33}};

// Every instance of the kernels: a wrong matrix layout, pitch, row or merge of warps.
void every_instance(bool cross) {
  for (const Dtype dtype : kAll)
    for (const int64_t head_dim : {64, 128, 256})
      for (const Rows& r : {kRows[0], kRows[2], kRows[4]})
        run_new(dtype, {1, r.heads, r.kv_heads, r.nodes, r.nodes, 81, head_dim}, {81 - r.nodes}, [&](Case& c) { c.cross = cross; });
}

// Heads that do not fill their width: columns of zeros that are read, written or counted.
void every_head_dim() {
  for (const int64_t head_dim : {8, 16, 40, 72, 80, 96, 120, 136, 248}) {
    run_new(Dtype::bf16, {1, 2, 1, 3, 3, 24, head_dim}, {20});
    if (head_dim % 40 == 0) run_new(Dtype::f32, {1, 2, 1, 3, 3, 24, head_dim}, {20});
  }
}

// Prefixes around the 16, 32 and 64 slots of a tile, and nothing at all.
void every_length() {
  for (const Rows& r : {kRows[1], kRows[3], kRows[5]})
    run_new(Dtype::f16, {9, r.heads, r.kv_heads, r.nodes, 2, 97, 64}, {0, 1, 15, 16, 31, 33, 62, 63, 95});
  run_new(Dtype::f32, {4, 2, 1, 3, 3, 66, 16}, {0, 1, 29, 63});
  for (const Dtype dtype : kAll) {
    run_new(dtype, {1, 2, 2, 3, 0, 0, 8}, {0});  // no slot: zeros
    run_new(dtype, {1, 2, 2, 0, 0, 5, 8}, {5});
    run_new(dtype, {0, 2, 2, 3, 3, 5, 8}, {0});
  }
}

// Shares of the slots, ragged over the batch: a weight that is missing when they merge, blocks without slots.
void every_split() {
  for (const Dtype dtype : kAll)
    for (const Rows& r : {Rows{4, 1, 3}, Rows{4, 2, 12}})
      run_new(dtype, {3, r.heads, r.kv_heads, r.nodes, 12, 600, 32}, {0, 37, 588});
  run_new(Dtype::bf16, {1, 8, 2, 64, 64, 520, 64}, {400}, [](Case& c) { c.scale = 2.f; });  // peaked: shares of very different weight
}

// Row strides with and without alignment, slots outside of heads, rows in several tiles.
void every_layout() {
  for (const Layout layout : {Layout::wide, Layout::odd, Layout::slots_first})
    for (const Rows& r : {kRows[1], kRows[6]}) {
      run_new(Dtype::bf16, {2, r.heads, r.kv_heads, r.nodes, 4, 40, 72}, {33, 36}, {}, layout);
      run_new(Dtype::f32, {2, r.heads, r.kv_heads, r.nodes, 4, 40, 24}, {33, 36}, {}, layout);
    }
}

// Windows that cut inside and outside of a tile, padding, the soft cap.
void every_mask() {
  for (const Dtype dtype : kAll) {
    for (const int64_t window : {int64_t{1}, int64_t{20}, int64_t{64}, int64_t{1} << 60})
      run_new(dtype, {2, 2, 1, 6, 6, 110, 16}, {45, 104}, [&](Case& c) { c.window = window, c.padded = window == 20; });
    run_new(dtype, {1, 4, 1, 6, 6, 600, 16}, {590}, [](Case& c) { c.window = 300; });
    run_new(dtype, {2, 4, 1, 6, 6, 90, 16}, {30, 84}, [](Case& c) { c.padded = true, c.cap = 1.5f; });
    run_new(dtype, {1, 7, 1, 9, 9, 90, 64}, {70}, [](Case& c) { c.padded = true; });
  }
}

// Nodes that see nothing: zeros, in one share and in several.
void nothing_seen() {
  for (const Dtype dtype : kAll)
    for (const int64_t slots : {int64_t{20}, int64_t{520}})
      run_new(dtype, {2, 2, 1, 5, 5, slots, 16}, {0, 3}, [](Case& c) {
        for (int64_t i = 0; i < c.ancestors.size(); i += 2) c.ancestors.set<uint64_t>(i, 0);
        for (int64_t i = 0; i < c.x.slots; ++i) c.padding.set<uint8_t>(c.x.slots + i, 0);
        c.padded = true;
      });
}

// An overflow in one branch of the tree must not reach another.
void odd_values() {
  for (const Dtype dtype : kAll)
    for (const Rows& r : {kRows[0], kRows[2], kRows[5]}) {
      at("attention: inf in a branch", bytes_of(dtype), r.nodes);
      Case c(dtype, {1, r.heads, r.kv_heads, r.nodes, r.nodes, 50, 24}, {30});
      c.fill();
      for (int64_t d = 0; d < 24; ++d) put(c.v, dtype, 32 * 24 + d, d % 2 ? INFINITY : NAN);
      run(c);
    }
}

// Lengths that device memory may hold: none leads outside.
void hostile() {
  for (const Dtype dtype : kAll) {
    at("attention: lengths", bytes_of(dtype));
    Case c(dtype, {4, 2, 1, 3, 3, 40, 16}, {-1, int64_t{1} << 62, -(int64_t{1} << 62), 38});
    c.window = 9;
    for (int64_t i = 0; i < c.depth.size(); ++i) c.depth.set<int64_t>(i, i % 2 ? -(int64_t{1} << 62) : int64_t{1} << 62);
    Case plain(dtype, c.x, {0, 37, 0, 37});
    const auto seen = [&](int64_t i) { return std::min<int64_t>(std::max<int64_t>(c.depth.get<int64_t>(i), 0), 64); };
    c.fill();
    for (int64_t i = 0; i < c.k.size(); ++i)
      if (std::isnan(get(c.k, dtype, i))) put(c.k, dtype, i, draw()), put(c.v, dtype, i, draw());
    // The reference reads clamped depths.
    Tensor said(8, {c.depth.size()});
    for (int64_t i = 0; i < c.depth.size(); ++i) said.set<int64_t>(i, c.depth.get<int64_t>(i));
    Tensor out(bytes_of(dtype), {4, 3, 2, 16}), none(1, {0});
    dream::TreeAttention call = c.call(out, none);
    call.depth = said.data<int64_t>();
    dream::tree_attention_cuda(call, 0, nullptr);
    for (int64_t i = 0; i < c.depth.size(); ++i) c.depth.set<int64_t>(i, seen(i));
    compare(c, out, reference(c), "lengths or depths are not clamped");
  }
}

void refusals() {
  for (const int64_t head_dim : {4, 12, 264}) {
    at("attention: head_dim", head_dim);
    Case c(Dtype::f32, {1, 1, 1, 1, 1, 2, head_dim}, {1});
    Tensor out(4, {1, 1, 1, head_dim}), none(1, {0});
    check::refuses([&] { dream::tree_attention_cuda(c.call(out, none), 0, nullptr); });
  }
}

// Tables of one row for all, a row a node, and rows of their own for every sequence.
void every_table() {
  for (const Dtype dtype : kAll)
    for (const int64_t batch_rows : {0, 1, 2})
      for (const Rows& r : {kRows[1], kRows[4]})
        run_new(dtype, {2, r.heads, r.kv_heads, r.nodes, r.nodes, 40, r.heads == 7 ? 80 : 16}, {20, 31}, [&](Case& c) {
          const int64_t sequences = batch_rows == 2 ? 2 : 1, rows = batch_rows ? c.x.nodes : 1, size = c.x.head_dim;
          static Tensor *cos = nullptr, *sin = nullptr;
          delete cos, delete sin;
          cos = new Tensor(bytes_of(dtype), {sequences, rows, size}), sin = new Tensor(bytes_of(dtype), {sequences, rows, size});
          for (int64_t i = 0; i < cos->size(); ++i) put(*cos, dtype, i, draw() / 2), put(*sin, dtype, i, draw() / 2);
          c.cross = true, c.cos = cos, c.sin = sin;
          c.table_batch = sequences == 1 ? 0 : rows * size, c.table_row = rows == 1 ? 0 : size;
        });
}

}  // namespace

void tree_attention() {
  every_instance(false);
  every_head_dim();
  every_length();
  every_split();
  every_layout();
  every_mask();
  nothing_seen();
  odd_values();
  hostile();
  refusals();
}

void cross_attention() {
  every_instance(true);
  every_table();
  for (const Dtype dtype : kAll) {
    run_new(dtype, {2, 4, 2, 5, 8, 530, 40}, {300, 522}, [](Case& c) { c.cross = true; }, Layout::odd);
    run_new(dtype, {1, 2, 2, 0, 0, 5, 8}, {5}, [](Case& c) { c.cross = true; });
    run_new(dtype, {1, 2, 2, 5, 0, 0, 8}, {0}, [](Case& c) { c.cross = true; });  // no slot: the norm has no tile to wait for
  }
}

}  // namespace device_check
