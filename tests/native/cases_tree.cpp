// Draft growth, ranking, verification, the cache and the choice of visual tokens.
#include <algorithm>
#include <cmath>
#include <memory>

#include "cases.h"
#include "dream/expand_tree.h"
#include "dream/keep_path.h"
#include "dream/rank_tree.h"
#include "dream/sample_tree.h"
#include "dream/select_visual.h"
#include "dream/verify_tree.h"

namespace check {

using dream::Dtype;

static void one_expand_tree(Dtype dtype, int64_t rows, int64_t vocab, int64_t width, int64_t gap) {
  at("expand_tree", size_of(dtype), rows, vocab, width, gap);
  Tensor logits(size_of(dtype), {rows, vocab}, {vocab + gap, 1}), scores(4, {rows});
  logits.random(dtype), scores.random(Dtype::f32);
  for (int64_t i = 0; rows > 2 && i < vocab; ++i) logits.set_float(dtype, vocab + i, -INFINITY);  // row 1 knows nothing
  const auto run = [&](int threads) {
    Tensor tokens(8, {rows, width}), cumulative(4, {rows, width}), best(8, {rows ? width : 0});
    dream::ExpandTree call{};
    call.logits = logits.data(), call.dtype = dtype, call.scores = scores.data<float>();
    call.batch = 1, call.rows = rows, call.vocab = vocab, call.row_stride = vocab + gap, call.width = width;
    call.tokens = tokens.data<int64_t>(), call.cumulative = cumulative.data<float>(), call.best = best.data<int64_t>();
    call.threads = threads;
    dream::expand_tree_cpu(call);
    for (int64_t i = 0; i < tokens.size(); ++i)
      require(tokens.get<int64_t>(i) >= 0 && tokens.get<int64_t>(i) < vocab, "a token outside the vocabulary");
    for (int64_t i = 0; i < cumulative.size(); ++i) require(!std::isnan(cumulative.get<float>(i)), "a score is NaN");
    return tokens.bits() + cumulative.bits() + best.bits();
  };
  every_thread_count(run);
  for (const float bad : {INFINITY, NAN}) {
    if (rows == 0) continue;
    logits.set_float(dtype, logits.size() - 1, bad);
    refuses([&] { run(1); });
  }
}

void expand_tree() {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t vocab : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 1000})
      for (const int64_t rows : {0, 1, 3})
        for (const int64_t width : {int64_t{1}, std::min<int64_t>(vocab, 4), std::min<int64_t>(vocab, 17)})
          for (const int64_t gap : {0, 3}) one_expand_tree(dtype, rows, vocab, width, gap);
    one_expand_tree(dtype, 5, 16385, 8, 1);  // enough for a parallel region
  }
}

// Parents of a tree of `nodes`: a chain, or any tree in order.
static std::vector<int64_t> random_parents(int64_t nodes, bool chain) {
  std::vector<int64_t> parents{-1};
  for (int64_t i = 1; i < nodes; ++i) parents.push_back(chain ? i - 1 : pick(i));
  return parents;
}

void rank_tree() {
  for (const int64_t candidates : {0, 1, 2, 62, 63, 64, 65, 200})
    for (const int64_t wanted : {0, 1, 15, 62, 63})
      for (const bool chain : {false, true}) {
        const int64_t picks = std::min(wanted, candidates);
        at("rank_tree", candidates, picks, chain);
        Tensor scores(4, {candidates}), above(8, {candidates});
        const std::vector<int64_t> parents = random_parents(candidates + 1, chain);
        for (int64_t i = 0; i < candidates; ++i) {
          const int64_t parent = parents[i + 1] - 1;
          above.set<int64_t>(i, parent);
          scores.set<float>(i, (parent < 0 ? 0.f : scores.get<float>(parent)) - static_cast<float>(pick(3)) / 4.f);
        }
        Tensor picked(8, {picks}), above_node(8, {picks + 1}), depth(8, {picks + 1}), ancestors(8, {picks + 1});
        dream::RankTree call{};
        call.scores = scores.data<float>(), call.parent_candidates = above.data<int64_t>();
        call.batch = 1, call.candidates = candidates, call.picks = picks, call.picked = picked.data<int64_t>();
        call.parents = above_node.data<int64_t>(), call.depth = depth.data<int64_t>();
        call.ancestors = ancestors.data<int64_t>();
        dream::rank_tree_cpu(call);
        for (int64_t i = 0; i <= picks; ++i)
          require(static_cast<uint64_t>(ancestors.get<int64_t>(i)) >> i & 1, "a node is not its own ancestor");
        if (candidates == 0) continue;
        scores.set<float>(candidates - 1, NAN);
        refuses([&] { dream::rank_tree_cpu(call); });
        scores.set<float>(candidates - 1, 1.f), above.set<int64_t>(candidates - 1, candidates - 1);
        refuses([&] { dream::rank_tree_cpu(call); });
      }
}

// What an acceptance operator writes for one sequence.
struct Taken {
  explicit Taken(int64_t nodes) : path(8, {nodes}), length(8, {1}), bonus(8, {1}) {}
  template <class Call>
  void into(Call& call) const {
    call.path = path.data<int64_t>(), call.length = length.data<int64_t>(), call.bonus = bonus.data<int64_t>();
  }
  int64_t count() const { return length.get<int64_t>(0); }
  void require_path(const std::vector<int64_t>& wanted, const std::vector<int64_t>& choices) const {
    const auto size = static_cast<int64_t>(wanted.size());
    require(count() == size && bonus.get<int64_t>(0) == choices[wanted.back()], "another length or bonus");
    for (int64_t i = 0; i < path.size(); ++i) require(path.get<int64_t>(i) == (i < size ? wanted[i] : -1), "another path");
  }
  Tensor path, length, bonus;
};

static void verify_choices(int64_t nodes, bool chain, int64_t tokens_of) {
  at("verify_tree", nodes, chain, tokens_of);
  Tensor tokens(8, {nodes}), parents(8, {nodes}), choices(8, {nodes});
  Taken taken(nodes);
  const std::vector<int64_t> tree = random_parents(nodes, chain);
  for (int64_t i = 0; i < nodes; ++i)
    tokens.set<int64_t>(i, pick(tokens_of)), choices.set<int64_t>(i, pick(tokens_of)), parents.set<int64_t>(i, tree[i]);
  dream::VerifyTree call{};
  call.tokens = tokens.data<int64_t>(), call.parents = parents.data<int64_t>();
  call.choices = choices.data<int64_t>(), call.batch = 1, call.nodes = nodes;
  taken.into(call);
  dream::verify_tree_cpu(call);
  require(taken.count() >= 1 && taken.count() <= nodes, "length outside the tree");
  require(!chain || tokens_of > 1 || taken.count() == nodes, "a chain of right tokens is not taken whole");
  parents.set<int64_t>(nodes - 1, nodes - 1);
  refuses([&] { dream::verify_tree_cpu(call); });
}

// Tokens (nodes) of which every second is the choice after its parent, and the path through them.
static std::vector<int64_t> walk_of(const std::vector<int64_t>& parents, const std::vector<int64_t>& choices, int64_t vocab, Tensor& tokens) {
  std::vector<int64_t> path{0};
  for (int64_t i = 0; i < tokens.size(); ++i) {
    tokens.set<int64_t>(i, i && pick(4) ? choices[parents[i]] : pick(vocab));
    if (i && parents[i] == path.back() && tokens.get<int64_t>(i) == choices[path.back()]) path.push_back(i);
  }
  return path;
}

static void verify_logits(Dtype dtype, int64_t nodes, int64_t vocab, int64_t gap, bool chain) {
  at("verify_tree with logits", size_of(dtype), nodes, vocab, gap, chain);
  Tensor logits(size_of(dtype), {nodes, vocab}, {vocab + gap, 1}), tokens(8, {nodes}), parents(8, {nodes});
  Taken taken(nodes);
  logits.random(dtype);
  const std::vector<int64_t> tree = random_parents(nodes, chain);
  std::vector<int64_t> choices(nodes, 0);
  for (int64_t n = 0; n < nodes; ++n) {
    parents.set<int64_t>(n, tree[n]);
    // Rows whose greatest is the last, rows of -inf, and NaN, which counts as the greatest.
    if (n % 5 == 1) logits.set_float(dtype, n * vocab + vocab - 1, 3.f);
    for (int64_t i = 0; n % 5 == 2 && i < vocab; ++i) logits.set_float(dtype, n * vocab + i, -INFINITY);
    if (n % 5 == 3) logits.set_float(dtype, n * vocab + pick(vocab), NAN);
    for (int64_t i = 1; i < vocab; ++i) {
      const float high = logits.get_float(dtype, n * vocab + choices[n]), value = logits.get_float(dtype, n * vocab + i);
      if (high == high && !(value <= high)) choices[n] = i;
    }
  }
  const std::vector<int64_t> wanted = walk_of(tree, choices, vocab, tokens);
  dream::VerifyTree call{};
  call.tokens = tokens.data<int64_t>(), call.parents = parents.data<int64_t>(), call.logits = logits.data(), call.dtype = dtype;
  call.batch = 1, call.nodes = nodes, call.vocab = vocab, call.row_stride = vocab + gap;
  taken.into(call);
  dream::verify_tree_cpu(call);
  taken.require_path(wanted, choices);
}

void verify_tree() {
  for (const int64_t nodes : {1, 2, 3, 63, 64, 65})
    for (const bool chain : {false, true})
      for (const int64_t tokens_of : {1, 3}) verify_choices(nodes, chain, tokens_of);
  for (const Dtype dtype : kDtypes)
    for (const int64_t nodes : {1, 2, 17, 64})
      for (const int64_t vocab : {1, 2, 15, 255, 256, 257, 511, 512, 513, 1030})
        for (const bool chain : {false, true}) verify_logits(dtype, nodes, vocab, vocab % 2 * 3, chain);
}

static void one_sample_tree(int64_t nodes, int64_t vocab, int64_t gap, bool chain) {
  at("sample_tree", nodes, vocab, gap, chain);
  const std::vector<int64_t> tree = random_parents(nodes, chain);
  Tensor tokens(8, {nodes}), parents(8, {nodes}), depth(8, {nodes});
  Taken taken(nodes);
  int64_t levels = 1;
  for (int64_t n = 0; n < nodes; ++n) {
    parents.set<int64_t>(n, tree[n]), depth.set<int64_t>(n, n ? depth.get<int64_t>(tree[n]) + 1 : 0);
    levels = std::max(levels, depth.get<int64_t>(n) + 1);
  }
  Tensor p(4, {nodes, vocab}, {vocab + gap, 1}), noise(4, {levels, vocab}, {vocab + 2 * gap, 1});
  for (int64_t i = 0; i < p.size(); ++i) p.set<float>(i, pick(3) ? static_cast<float>(pick(1000)) / 1000.f : 0.f);
  for (int64_t i = 0; i < noise.size(); ++i) noise.set<float>(i, static_cast<float>(1 + pick(4000)) / 1000.f);
  std::vector<int64_t> choices(nodes, 0);
  for (int64_t n = 0; n < nodes; ++n) {
    p.set<float>(n * vocab + (n % 2 ? vocab - 1 : pick(vocab)), 1.f);  // no row is without a token, some have it last
    float high = -1;
    for (int64_t i = 0; i < vocab; ++i) {
      const float quotient = p.get<float>(n * vocab + i) / noise.get<float>(depth.get<int64_t>(n) * vocab + i);
      if (quotient > high) high = quotient, choices[n] = i;
    }
  }
  const std::vector<int64_t> wanted = walk_of(tree, choices, vocab, tokens);
  dream::SampleTree call{};
  call.tokens = tokens.data<int64_t>(), call.parents = parents.data<int64_t>(), call.depth = depth.data<int64_t>();
  call.probabilities = p.data<float>(), call.noise = noise.data<float>(), call.nodes = nodes, call.vocab = vocab;
  call.batch = 1, call.levels = levels, call.row_stride = vocab + gap, call.noise_row_stride = vocab + 2 * gap;
  taken.into(call);
  dream::sample_tree_cpu(call);
  taken.require_path(wanted, choices);
  for (int64_t i = 0; i < p.size(); ++i)
    if (std::find(wanted.begin(), wanted.end(), i / vocab) == wanted.end()) p.set<float>(i, NAN);  // off the path
  dream::sample_tree_cpu(call);
  taken.require_path(wanted, choices);
  require(dream::sample_row_cpu(call.probabilities, call.noise, vocab) == choices[0], "another choice for a row alone");

  const auto run = [&] { dream::sample_tree_cpu(call); };
  call.levels = levels - 1;
  refuses(run);
  call.levels = levels;
  for (const float bad : {0.f, -1.f, NAN}) {
    const float good = noise.get<float>(vocab - 1);
    noise.set<float>(vocab - 1, bad);
    refuses(run);
    noise.set<float>(vocab - 1, good);
  }
  for (const float bad : {NAN, INFINITY}) {
    p.set<float>(vocab - 1, bad);
    refuses(run);
  }
  for (const float none : {0.f, -0.5f}) {
    for (int64_t i = 0; i < vocab; ++i) p.set<float>(i, none);
    require(dream::sample_row_cpu(call.probabilities, call.noise, vocab) == -1, "a row without a token has one");
    refuses(run);
  }
  depth.set<int64_t>(nodes - 1, depth.get<int64_t>(nodes - 1) + 1);
  refuses(run);
  parents.set<int64_t>(nodes - 1, nodes - 1);
  refuses(run);
}

void sample_tree() {
  for (const int64_t nodes : {1, 2, 17, 64, 65})
    for (const int64_t vocab : {1, 2, 15, 255, 256, 257, 512, 513, 1030})
      for (const bool chain : {false, true}) one_sample_tree(nodes, vocab, vocab % 2 * 3, chain);
}

void select_visual() {
  for (const int64_t v : {0, 1, 2, 63, 64, 65})
    for (const int64_t keep : {int64_t{0}, std::min<int64_t>(1, v), std::max<int64_t>(v - 1, 0), v}) {
      at("select_visual", v, keep);
      Tensor scores(4, {v}), indices(8, {keep});
      scores.random(Dtype::f32);
      const int64_t sizes[] = {0, 1, 7, 64};
      Tensor from0(1, {v, sizes[0]}), from1(1, {v, sizes[1]}), from2(1, {v, sizes[2]}), from3(1, {v, sizes[3]});
      Tensor to0(1, {keep, sizes[0]}), to1(1, {keep, sizes[1]}), to2(1, {keep, sizes[2]}), to3(1, {keep, sizes[3]});
      Tensor *from[] = {&from0, &from1, &from2, &from3}, *to[] = {&to0, &to1, &to2, &to3};
      std::vector<dream::GatherRows> rows;
      for (int i = 0; i < 4; ++i) {
        from[i]->random_bytes();
        rows.push_back({from[i]->data(), to[i]->data(), sizes[i]});
      }
      dream::SelectVisual call{};
      call.scores = scores.data<float>(), call.v = v, call.keep = keep, call.indices = indices.data<int64_t>();
      call.tensors = rows.data(), call.count = static_cast<int64_t>(rows.size());
      dream::select_visual_cpu(call);
      for (int64_t i = 0; i < keep; ++i)
        for (int64_t b = 0; b < 7; ++b)
          require(to2.get<char>(i * 7 + b) == from2.get<char>(indices.get<int64_t>(i) * 7 + b), "a row of another token");
      if (v == 0) continue;
      scores.set<float>(v - 1, NAN);
      refuses([&] { dream::select_visual_cpu(call); });
    }
}

// `count` buffers (batch, heads, capacity, row) with gaps: slots of a row and one byte, heads inside or outside of slots.
static void one_keep_path(int64_t count, int64_t heads, int64_t row, int64_t start, const std::vector<int64_t>& steps) {
  at("keep_path", count, heads, row, start, static_cast<int64_t>(steps.size()));
  const int64_t batch = 2, capacity = start + (steps.empty() ? 0 : steps.back() + 1);
  Tensor path(8, {static_cast<int64_t>(steps.size())});
  for (int64_t i = 0; i < path.size(); ++i) path.set<int64_t>(i, steps[i]);
  std::string before;
  const auto run = [&](int threads) {
    dice().seed(7);
    std::vector<std::unique_ptr<Tensor>> tensors;
    std::vector<dream::CacheBuffer> buffers;
    for (int64_t b = 0; b < count; ++b) {
      const bool slots_outside = b % 2;
      const int64_t head_stride = slots_outside ? row + 1 : (row + 1) * capacity;
      const int64_t slot_stride = slots_outside ? (row + 1) * heads : row + 1, batch_stride = (row + 1) * heads * capacity;
      const std::vector<int64_t> shape{batch, heads, capacity, row}, strides{batch_stride, head_stride, slot_stride, 1};
      tensors.push_back(std::make_unique<Tensor>(1, shape, strides));
      tensors.back()->random_bytes();
      buffers.push_back({tensors.back()->data(), batch, heads, capacity, row, batch_stride, head_stride, slot_stride});
    }
    dream::KeepPath call{};
    call.buffers = buffers.data(), call.count = count, call.start = &start, call.path = path.data<int64_t>();
    call.sequences = 1, call.width = path.size();
    dream::keep_path_cpu(call, threads);
    std::string bits;
    for (const auto& tensor : tensors) bits += tensor->bits();
    if (count > 0 && capacity > 0) {
      const int64_t behind = start + 1;
      call.start = &behind;
      if (call.width) refuses([&] { dream::keep_path_cpu(call, threads); });
    }
    return bits;
  };
  every_thread_count(run);
}

void keep_path() {
  std::vector<int64_t> all, odd;
  for (int64_t i = 0; i < 64; ++i) all.push_back(i), odd.push_back(2 * i + 1);
  const std::vector<int64_t> without_last(odd.begin(), odd.end() - 1);
  const std::vector<std::vector<int64_t>> paths{{}, {0}, {5}, {0, 1}, {0, 2, 3, 7}, without_last, odd, all};
  for (const auto& steps : paths)
    for (const int64_t start : {0, 9})
      for (const int64_t row : {0, 1, 15, 128}) one_keep_path(2, 3, row, start, steps);
  one_keep_path(0, 1, 8, 0, {0});
  one_keep_path(3, 3, 1024, 5, odd);  // enough for a parallel region
}

}  // namespace check
