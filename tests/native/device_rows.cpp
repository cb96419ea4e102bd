// select_visual, attention_entropy and attention_mass on the emulated device.
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "device_cases.h"
#include "dream/attention_entropy.h"
#include "dream/attention_mass.h"
#include "dream/select_visual.h"
#include "guarded.h"

namespace device_check {

using check::require;
using check::Tensor;
using dream::Dtype;

static void fold(const std::string& bits) { fold(bits.data(), bits.size()); }

// ---- select_visual

enum class Scores { distinct, tied, equal, special };

static float score(Scores kind, int64_t i) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kTiny = std::numeric_limits<float>::denorm_min();
  constexpr float kSpecial[] = {0.f, -0.f, kTiny, -kTiny, NAN, -NAN, kInf, -kInf, 1.f, -1.f, 3.4e38f, -3.4e38f};
  switch (kind) {
    case Scores::distinct: return std::ldexp(static_cast<float>(check::pick(1 << 24)) - (1 << 23), static_cast<int>(check::pick(40)) - 40);
    case Scores::tied: return static_cast<float>(check::pick(5)) - 2.f;
    case Scores::equal: return 0.25f;
    default: return kSpecial[(i * 7 + check::pick(3)) % 12];
  }
}

// Rows of these sizes, each `lead` bytes off the alignment of malloc.
struct Rows {
  std::vector<int64_t> sizes;
  int64_t lead;
};

static void one_select(int64_t v, int64_t keep, Scores kind, const Rows& rows) {
  check::at("select_visual", v, keep, static_cast<int>(kind), rows.sizes.size(), rows.lead);
  check::lead() = rows.lead;
  Tensor scores(4, {v}), plain(4, {v}), indices(8, {keep}), wanted(8, {keep});
  for (int64_t i = 0; i < v; ++i) {
    const float s = score(kind, i);
    scores.set(i, s), plain.set(i, std::isnan(s) ? -std::numeric_limits<float>::infinity() : s);
  }
  std::vector<std::unique_ptr<Tensor>> memory;
  std::vector<dream::GatherRows> device, host;
  for (const int64_t bytes : rows.sizes) {
    for (int copy = 0; copy < 3; ++copy) memory.push_back(std::make_unique<Tensor>(1, std::vector<int64_t>{copy ? keep : v, bytes}));
    const auto last = memory.end();
    (*(last - 3))->random_bytes();
    device.push_back({(*(last - 3))->data(), (*(last - 2))->data(), bytes});
    host.push_back({(*(last - 3))->data(), (*(last - 1))->data(), bytes});
  }
  const int64_t count = static_cast<int64_t>(device.size());
  dream::select_visual_cpu({plain.data<float>(), v, keep, wanted.data<int64_t>(), host.data(), count});
  dream::select_visual_cuda({scores.data<float>(), v, keep, indices.data<int64_t>(), device.data(), count}, 0, nullptr);
  require(indices.bits() == wanted.bits(), "kept other tokens than the CPU");
  fold(indices.bits());
  for (size_t t = 0; t < memory.size(); t += 3) {
    require(memory[t + 1]->bits() == memory[t + 2]->bits(), "gathered other rows than the CPU");
    fold(memory[t + 1]->bits());
  }
  check::lead() = 0;
}

void select_visual() {
  const Rows none{{}, 0}, all_words{{0, 1, 2, 4, 8, 16, 3, 6, 12, 24, 48, 40}, 0}, unaligned{{16, 32, 5}, 1};
  const Rows wide{{127 * 16, 129 * 16, 4 * 128 * 16 + 16}, 0};  // a block +- 1 word, all words under way + 1
  const Rows many{std::vector<int64_t>(33, 4), 0}, empty{std::vector<int64_t>(20, 0), 0};  // three launches; none
  for (const int64_t v : {0, 1, 2, 31, 32, 33})  // a warp +- 1
    for (const int64_t keep : {int64_t{0}, (v + 1) / 2, v}) one_select(v, keep, Scores::distinct, v == 33 ? all_words : none);
  for (const int64_t v : {127, 129, 1025, 4095, 4096, 4097})  // a warp's step and a block's step +- 1
    for (const int64_t keep : {int64_t{1}, v / 3, v - 1}) one_select(v, keep, keep == 1 ? Scores::equal : Scores::tied, none);
  for (const int64_t keep : {1, 3, 8, 125, 299}) one_select(300, keep, Scores::special, none);  // 125: some of the zeros of both signs
  for (const int64_t keep : {1, 5000, 8999}) one_select(9000, keep, Scores::distinct, none);
  for (const Rows& rows : {all_words, unaligned, many, empty}) one_select(257, 65, Scores::distinct, rows);
  one_select(40, 7, Scores::tied, wide);
}

// ---- attention statistics

// A tensor (heads, rows, head_dim) of random numbers, as the kernels get it and as the floats it stands for.
struct Heads {
  Heads(Dtype dtype, int64_t heads, int64_t rows, int64_t head_dim, int64_t row_gap, int64_t head_gap)
      : row_stride(head_dim + row_gap), head_stride(rows * row_stride + head_gap), count(rows), head_dim(head_dim),
        data(dtype == Dtype::f32 ? 4 : 2, {heads, rows, head_dim}, {head_stride, row_stride, 1}), values(heads * rows * head_dim) {
    for (int64_t i = 0; i < data.size(); ++i) {
      const float x = static_cast<float>(check::pick(511) - 255) / 128.f;  // exact in all three types
      values[i] = x;
      if (dtype == Dtype::f16)
        data.set<uint16_t>(i, __half_as_ushort(__float2half(x)));
      else
        data.set_float(dtype, i, x);
    }
  }
  const float* row(int64_t head, int64_t i) const { return values.data() + (head * count + i) * head_dim; }

  int64_t row_stride, head_stride, count, head_dim;
  Tensor data;
  std::vector<float> values;
};

constexpr double kRound = 1. / (1 << 24);  // of fp32

// Softmax of one query row over the keys that it sees, in double, and how far fp32 may be off.
struct RowReference {
  std::vector<double> p;
  double entropy = 0, score_error = 0, spread = 0;

  // scores differ by at most score_error: head_dim + 2 roundings of sums of |q k|.
  RowReference(const float* q, const Heads& k, int64_t head, int64_t visible, double scale) : p(visible) {
    double high = -INFINITY, sum = 0;
    for (int64_t j = 0; j < visible; ++j) {
      double s = 0, size = 0;
      for (int64_t d = 0; d < k.head_dim; ++d) s += double{q[d]} * k.row(head, j)[d], size += std::fabs(double{q[d]} * k.row(head, j)[d]);
      p[j] = s * scale, high = std::max(high, p[j]);
      score_error = std::max(score_error, static_cast<double>(k.head_dim + 2) * kRound * size * std::fabs(scale));
    }
    for (double& x : p) sum += std::exp(x - high);
    for (double& x : p) {
      const double weight = std::exp(x - high) / sum;
      entropy -= weight > 0 ? weight * (x - high - std::log(sum)) : 0, spread += weight * (high - x), x = weight;
    }
  }
  // Of one weight, relative: its exponent twice, exponentials of 4 roundings, and a sum of p.size().
  double weight_error() const { return 2 * score_error + static_cast<double>(p.size() + 16) * kRound; }
};

static void one_attention_entropy(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t n, int64_t head_dim, int64_t gap, float scale) {
  check::at("attention_entropy", static_cast<int>(dtype), heads, kv_heads, n, head_dim, gap, scale);
  const Heads q(dtype, heads, n, head_dim, gap, 2 * gap), k(dtype, kv_heads, n, head_dim, gap, gap);
  Tensor entropy(4, {heads, n});
  dream::AttentionEntropy call{};
  call.q = q.data.data(), call.k = k.data.data(), call.dtype = dtype, call.scale = scale;
  call.heads = heads, call.kv_heads = kv_heads, call.n = n, call.head_dim = head_dim;
  call.q_head_stride = q.head_stride, call.q_row_stride = q.row_stride;
  call.k_head_stride = k.head_stride, call.k_row_stride = k.row_stride;
  call.entropy = entropy.data<float>();
  dream::attention_entropy_cuda(call, 0, nullptr);
  fold(entropy.bits());
  Tensor by_cpu(4, {heads, n});
  call.q = q.values.data(), call.k = k.values.data(), call.dtype = Dtype::f32, call.entropy = by_cpu.data<float>(), call.threads = 1;
  call.q_head_stride = call.k_head_stride = n * head_dim, call.q_row_stride = call.k_row_stride = head_dim;
  dream::attention_entropy_cpu(call);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < n; ++i) {
      const RowReference row(q.row(h, i), k, h / (heads / kv_heads), i + 1, scale);
      // H = ln Z - U / Z: ln Z and each e of U are off by the error of a weight, U / Z = -spread
      const double tolerance = row.weight_error() * (2 + 2 * row.spread);
      require(std::fabs(entropy.get<float>(h * n + i) - row.entropy) <= tolerance, "another entropy than in double");
      require(std::fabs(by_cpu.get<float>(h * n + i) - row.entropy) <= tolerance, "the CPU has another entropy than in double");
    }
}

void attention_entropy() {
  constexpr Dtype kAll[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
  for (const Dtype dtype : kAll) {
    const int64_t block = dtype == Dtype::f32 ? 32 : 128;
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{31}, int64_t{33}, int64_t{65}, block + 1})
      one_attention_entropy(dtype, 1, 1, n, 64, 0, 0.1f);
    one_attention_entropy(dtype, 2, 1, 2 * block - 1, 40, 8, -0.3f);  // padded head, rows apart but aligned
    one_attention_entropy(dtype, 4, 1, 63, 128, 1, 0.05f);            // no row but the first aligned
    one_attention_entropy(dtype, 7, 7, 17, 96, 0, 2.f);               // weights from 1 down to less than fp32 holds
    one_attention_entropy(dtype, 14, 2, 5, 256, 0, 0.03f);
    one_attention_entropy(dtype, 1, 1, 66, 200, 3, 0.03f);
    one_attention_entropy(dtype, 2, 2, 40, 0, 0, 1.f);                // all scores equal: ln(i + 1)
  }
}

static void one_attention_mass(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys, int64_t head_dim, int64_t gap,
                               const std::vector<int64_t>& positions) {
  check::at("attention_mass", static_cast<int>(dtype), heads, kv_heads, rows, keys, head_dim, gap, positions.size());
  const Heads q(dtype, heads, rows, head_dim, gap, 2 * gap), k(dtype, kv_heads, keys, head_dim, gap, gap);
  Tensor mass(4, {keys}), at(8, {rows});
  for (int64_t r = 0; r < rows; ++r) at.set<int64_t>(r, positions.empty() ? check::pick(keys + 4) - 2 : positions[r % positions.size()]);
  dream::AttentionMass call{};
  call.q = q.data.data(), call.k = k.data.data(), call.dtype = dtype, call.row_positions = at.data<int64_t>(), call.scale = 0.1f;
  call.heads = heads, call.kv_heads = kv_heads, call.rows = rows, call.keys = keys, call.head_dim = head_dim;
  call.q_head_stride = q.head_stride, call.q_row_stride = q.row_stride;
  call.k_head_stride = k.head_stride, call.k_row_stride = k.row_stride;
  call.mass = mass.data<float>();
  Tensor workspace(1, {dream::attention_mass_workspace(call)});
  call.workspace = workspace.data();
  dream::attention_mass_cuda(call, 0, nullptr);
  fold(mass.bits());
  Tensor by_cpu(4, {keys});
  call.q = q.values.data(), call.k = k.values.data(), call.dtype = Dtype::f32, call.mass = by_cpu.data<float>(), call.threads = 1;
  call.q_head_stride = rows * head_dim, call.k_head_stride = keys * head_dim, call.q_row_stride = call.k_row_stride = head_dim;
  dream::attention_mass_cpu(call);
  std::vector<double> wanted(keys), tolerance(keys);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t visible = std::min(std::max<int64_t>(at.get<int64_t>(r) + 1, 0), keys);
      const RowReference row(q.row(h, r), k, h / (heads / kv_heads), visible, call.scale);
      const double error = row.weight_error() + static_cast<double>(heads * rows) * kRound;  // and the sum over rows and heads
      for (int64_t j = 0; j < visible; ++j) wanted[j] += row.p[j], tolerance[j] += row.p[j] * error;
    }
  for (int64_t j = 0; j < keys; ++j) {
    require(std::fabs(mass.get<float>(j) - wanted[j]) <= tolerance[j], "another mass than in double");
    require(std::fabs(by_cpu.get<float>(j) - wanted[j]) <= tolerance[j], "the CPU has another mass than in double");
  }
}

void attention_mass() {
  constexpr int64_t kFar = int64_t{1} << 40;
  constexpr Dtype kAll[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
  for (const Dtype dtype : kAll) {
    for (const int64_t keys : {0, 1, 31, 127, 128, 129}) one_attention_mass(dtype, 1, 1, 3, keys, 64, 0, {kFar});
    one_attention_mass(dtype, 2, 1, 0, 33, 64, 0, {});               // no rows: zeros
    one_attention_mass(dtype, 2, 2, 5, 70, 64, 0, {-1, -kFar});      // rows that see nothing: zeros
    one_attention_mass(dtype, 2, 1, 4, 300, 128, 0, {-1, 0, 127, 128});  // a tile +- 1, splits and tiles that no row sees
    one_attention_mass(dtype, 4, 1, 9, 260, 40, 8, {});              // GQA: rows of four heads in one tile, padded head
    one_attention_mass(dtype, 7, 7, 2, 40, 96, 1, {});               // no row but the first aligned
    one_attention_mass(dtype, 14, 2, 5, 130, 256, 0, {});            // more than one row tile
    one_attention_mass(dtype, 1, 1, 33, 65, 200, 3, {});
    one_attention_mass(dtype, 2, 2, 3, 17, 0, 0, {});                // all scores equal
    one_attention_mass(dtype, 1, 1, 3, 4500, 64, 0, {kFar, 2000});   // splits of two tiles
  }
}

}  // namespace device_check
