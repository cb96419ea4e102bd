// Draft growth and ranking on the device, against plain references: ids exactly, scores within bounds.
#include "device_vocab.h"
#include "dream/expand_tree.h"
#include "dream/rank_tree.h"

namespace device_check {

namespace {

// ---- expand_tree

// log softmax in double; -inf where the contract says so.
double log_probability(const float* row, int64_t vocab, float value) {
  double high = -INFINITY, sum = 0;
  for (int64_t i = 0; i < vocab; ++i) high = row[i] > high ? row[i] : high;
  if (!std::isfinite(high) || !(value > -INFINITY)) return -INFINITY;
  for (int64_t i = 0; i < vocab; ++i) sum += std::isnan(row[i]) ? 0. : std::exp(row[i] - high);
  return value - high - std::log(sum);
}

struct Expansion {
  Expansion(const VocabRows& logits, int64_t width)
      : tokens(8, {logits.batch, logits.rows, width}),
        cumulative(4, {logits.batch, logits.rows, width}),
        best(8, {logits.batch, logits.rows ? width : 0}) {}
  Tensor tokens, cumulative, best;
};

// On the device, or on the CPU, which refuses NaN and +inf and has no f16.
void run_expand(const VocabRows& logits, const Tensor& scores, int64_t width, Expansion& out, bool on_device) {
  dream::ExpandTree call{};
  call.logits = logits.memory->data(), call.dtype = logits.dtype, call.scores = scores.data<float>();
  call.batch = logits.batch, call.rows = logits.rows, call.vocab = logits.vocab;
  call.batch_stride = logits.batch_stride, call.row_stride = logits.row_stride, call.width = width;
  call.tokens = out.tokens.data<int64_t>(), call.cumulative = out.cumulative.data<float>(), call.best = out.best.data<int64_t>();
  call.threads = 1;
  if (!on_device) return dream::expand_tree_cpu(call);
  Tensor workspace(1, {dream::expand_tree_workspace(call)});
  call.workspace = workspace.data();
  dream::expand_tree_cuda(call, 0, nullptr);
}

void check_expand(const VocabRows& logits, const Tensor& scores, int64_t width, const Expansion& out) {
  // A unit is half the last place of 1. A thread sums at most vocab / 256 + 8 terms, each from an exponential 2 places off; the 13
  // merges that follow cost up to 9 units each; the logarithm and the sums of the result cost 4 units of their sizes.
  constexpr double kUnit = 0x1p-24;
  const double bound = kUnit * (static_cast<double>(logits.vocab) / 256 + 8 + 8 + 120);
  for (int64_t row = 0; row < logits.batch * logits.rows; ++row) {
    const std::vector<int64_t> order = ranking(logits.row(row), logits.vocab);
    const float score = scores.get<float>(row);
    for (int64_t i = 0; i < width; ++i) {
      require(out.tokens.get<int64_t>(row * width + i) == order[i], "another token");
      const float value = logits.row(row)[order[i]], got = out.cumulative.get<float>(row * width + i);
      const double log_p = log_probability(logits.row(row), logits.vocab, value), wanted = std::isnan(score) ? -INFINITY : score + log_p;
      if (wanted > -INFINITY)
        require(std::abs(got - wanted) <= bound + 4 * kUnit * (std::abs(score) + std::abs(log_p)), "another score");
      else
        require(got == -INFINITY, "a score where there is no probability");
    }
  }
  for (int64_t b = 0; b < logits.batch; ++b) {
    std::vector<float> scored;
    for (int64_t i = 0; i < logits.rows * width; ++i) scored.push_back(out.cumulative.get<float>(b * logits.rows * width + i));
    const std::vector<int64_t> order = ranking(scored.data(), logits.rows * width);
    for (int64_t i = 0; i < (logits.rows ? width : 0); ++i) require(out.best.get<int64_t>(b * width + i) == order[i], "another frontier");
  }
}

// Every row of another kind, from `kind` on.
void one_expand(Dtype dtype, int64_t batch, int64_t rows, int64_t vocab, int64_t width, int64_t gap, int64_t lead, int64_t kind) {
  at("expand_tree", static_cast<int>(dtype), batch, rows, vocab, width, gap, lead, kind);
  VocabRows logits(dtype, batch, rows, vocab, gap, lead);
  Tensor scores(4, {batch, rows});
  for (int64_t row = 0; row < batch * rows; ++row) {
    const Kind of = static_cast<Kind>((kind + row) % static_cast<int64_t>(Kind::kinds));
    scores.set<float>(row, static_cast<float>(pick(9)) / -4.f);
    for (int64_t i = 0; i < vocab; ++i) logits.set(row, i, logit(of, i, vocab));
  }
  if (batch * rows > 2) scores.set<float>(2, NAN);
  Expansion out(logits, width), by_cpu(logits, width);
  run_expand(logits, scores, width, out, true);
  check_expand(logits, scores, width, out);
  const bool plain = std::none_of(logits.values.begin(), logits.values.end(), [](float x) { return !(x < INFINITY); });
  if (plain && batch * rows <= 2 && dtype != Dtype::f16) {
    run_expand(logits, scores, width, by_cpu, false);
    require(out.tokens.bits() == by_cpu.tokens.bits(), "other tokens than the CPU's");
  }
  fold_bits(out.tokens.bits() + out.cumulative.bits() + out.best.bits());
}

}  // namespace

void expand_tree() {
  int64_t turn = 0;
  for (const Dtype dtype : kDtypes) {
    const int64_t items = dtype == Dtype::f32 ? 4 : 8, step = 128 * items;  // a split's least words
    for (const int64_t vocab : {int64_t{1}, int64_t{2}, items - 1, items + 1, 32 * items - 1, 32 * items + 1, step - 1, step + 1}) {
      ++turn;
      const int64_t width = std::min(vocab, std::vector<int64_t>{1, 4, 32, 7}[turn % 4]);
      one_expand(dtype, 1, 2, vocab, width, turn % 3, turn % items, turn);
    }
    one_expand(dtype, 2, 3, 2 * step + 5, 4, 3, 1, 0);
    one_expand(dtype, 1, 1, 3 * step - 1, 32, 0, items - 1, 3);
    one_expand(dtype, 1, 1, 2 * step - items, 32, 0, 0, 1);  // the last warp has them all
    one_expand(dtype, 1, 1, 3 * step + 2, 31, 0, 0, 1);
  }
  for (int64_t kind = 0; kind < static_cast<int64_t>(Kind::kinds); ++kind) {
    one_expand(Dtype::bf16, 1, 1, 2500, 5, 0, kind % 8, kind);
    one_expand(Dtype::f32, 1, 1, 700, 32, 0, kind % 4, kind);
  }
  one_expand(Dtype::f16, 1, 1, 33001, 32, 0, 3, 1);    // as many splits as there may be
  one_expand(Dtype::bf16, 1, 1, 262208, 4, 0, 0, 0);  // more words than a block has under way
  one_expand(Dtype::bf16, 1, 176, 40, 1, 0, 0, 0);    // the frontier's best over many turns of a warp
  one_expand(Dtype::f32, 3, 9, 50, 8, 1, 0, 4);       // more rows than warps that merge them
  one_expand(Dtype::bf16, 300, 1, 12, 3, 0, 0, 2);    // a batch
  one_expand(Dtype::f32, 1, 0, 12, 3, 0, 0, 0), one_expand(Dtype::f32, 0, 2, 12, 3, 0, 0, 0);
  at("expand_tree refuses");
  refuses([] { one_expand(Dtype::f32, 1, 1, 40, 33, 0, 0, 0); });
}

// ---- rank_tree

namespace {

struct Ranked {
  std::vector<int64_t> picked, parents, depth, ancestors;
};

Ranked rank(const std::vector<float>& scores, const std::vector<int64_t>& above, int64_t picks) {
  const std::vector<int64_t> order = ranking(scores.data(), static_cast<int64_t>(scores.size()));
  Ranked out{{order.begin(), order.begin() + picks}, {-1}, {0}, {1}};
  std::sort(out.picked.begin(), out.picked.end());
  std::vector<int64_t> node_of(scores.size(), 0);
  for (int64_t i = 0; i < picks; ++i) {
    const int64_t candidate = out.picked[i], from = above[candidate];
    const int64_t parent = from < 0 || from >= candidate ? 0 : node_of[from];
    node_of[candidate] = i + 1;
    out.parents.push_back(parent), out.depth.push_back(out.depth[parent] + 1);
    out.ancestors.push_back(static_cast<int64_t>(static_cast<uint64_t>(out.ancestors[parent]) | uint64_t{1} << (i + 1)));
  }
  return out;
}

enum class Draft { tree, tied, chain, equal, hostile };

// A draft as expand_tree makes it; the same with few different scores; one chain; equal scores; and what no draft holds.
void fill_draft(Draft draft, std::vector<float>& scores, std::vector<int64_t>& above) {
  const int64_t candidates = static_cast<int64_t>(scores.size());
  for (int64_t i = 0; i < candidates; ++i) {
    above[i] = draft == Draft::chain ? i - 1 : pick(i + 1) - 1;
    const float from = above[i] < 0 ? 0.f : scores[above[i]];
    const float step = draft == Draft::tied ? static_cast<float>(pick(3)) / 4.f : static_cast<float>(1 + pick(1000)) / 4096.f;
    scores[i] = draft == Draft::equal ? -0.5f : draft == Draft::chain ? from - 0.25f : from - step;
    if (draft != Draft::hostile) continue;
    const int64_t far = int64_t{1} << 62, wild[] = {i, candidates, far, -far, -2, i - 1};
    const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.f, -0.f, 1.f};
    above[i] = wild[pick(6)], scores[i] = odd[pick(7)];
  }
}

void one_rank(int64_t batch, int64_t candidates, int64_t picks, Draft draft, int64_t gap) {
  at("rank_tree", batch, candidates, picks, static_cast<int>(draft), gap);
  Tensor scores(4, {batch, candidates}), above(8, {batch, candidates});
  const int64_t stride = picks + 1 + gap;
  Tensor picked(8, {batch, picks}, {stride, 1}), parents(8, {batch, picks + 1}, {stride, 1});
  Tensor depth(8, {batch, picks + 1}, {stride, 1}), ancestors(8, {batch, picks + 1}, {stride, 1});
  std::vector<Ranked> wanted;
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<float> score(candidates);
    std::vector<int64_t> from(candidates);
    fill_draft(draft, score, from);
    for (int64_t i = 0; i < candidates; ++i) scores.set(b * candidates + i, score[i]), above.set(b * candidates + i, from[i]);
    wanted.push_back(candidates < picks || picks > 63 ? Ranked{} : rank(score, from, picks));
  }
  dream::RankTree call{};
  call.scores = scores.data<float>(), call.parent_candidates = above.data<int64_t>();
  call.batch = batch, call.candidates = candidates, call.picks = picks, call.out_stride = stride;
  call.picked = picked.data<int64_t>(), call.parents = parents.data<int64_t>();
  call.depth = depth.data<int64_t>(), call.ancestors = ancestors.data<int64_t>();
  dream::rank_tree_cuda(call, 0, nullptr);
  const std::string bits = picked.bits() + parents.bits() + depth.bits() + ancestors.bits();
  fold_bits(bits);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < picks; ++i) require(picked.get<int64_t>(b * picks + i) == wanted[b].picked[i], "another candidate");
    for (int64_t i = 0; i <= picks; ++i) {
      require(parents.get<int64_t>(b * (picks + 1) + i) == wanted[b].parents[i], "another parent");
      require(depth.get<int64_t>(b * (picks + 1) + i) == wanted[b].depth[i], "another depth");
      require(ancestors.get<int64_t>(b * (picks + 1) + i) == wanted[b].ancestors[i], "other ancestors");
    }
  }
  if (draft == Draft::hostile) return;
  dream::rank_tree_cpu(call);
  require(bits == picked.bits() + parents.bits() + depth.bits() + ancestors.bits(), "another tree than the CPU's");
}

}  // namespace

void rank_tree() {
  for (const Draft draft : {Draft::tree, Draft::tied, Draft::chain, Draft::equal, Draft::hostile}) {
    for (const int64_t candidates : {0, 1, 2, 31, 33, 63, 64, 255, 257, 510})
      one_rank(1, candidates, std::min<int64_t>(candidates, std::vector<int64_t>{63, 31, 32, 1}[candidates % 4]), draft, 0);
    one_rank(3, 84, 31, draft, 2), one_rank(2, 84, 0, draft, 0), one_rank(2, 63, 63, draft, 1);
    one_rank(1, 4096, 63, draft, 0), one_rank(1, 4095, 62, draft, 0);
  }
  one_rank(0, 9, 3, Draft::tree, 0);
  at("rank_tree refuses");
  refuses([] { one_rank(1, 4097, 3, Draft::tree, 0); });
  refuses([] { one_rank(1, 80, 64, Draft::tree, 0); });
  refuses([] { one_rank(1, 3, 4, Draft::tree, 0); });
}

}  // namespace device_check
