// Draft growth, ranking, verification, the cache and the choice of visual tokens.
#include <algorithm>
#include <cmath>
#include <memory>

#include "cases.h"
#include "dream/expand_tree.h"
#include "dream/keep_path.h"
#include "dream/rank_tree.h"
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
    call.rows = rows, call.vocab = vocab, call.row_stride = vocab + gap, call.width = width;
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
        call.candidates = candidates, call.picks = picks, call.picked = picked.data<int64_t>();
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

void verify_tree() {
  for (const int64_t nodes : {1, 2, 3, 63, 64, 65})
    for (const bool chain : {false, true})
      for (const int64_t tokens_of : {1, 3}) {
        at("verify_tree", nodes, chain, tokens_of);
        Tensor tokens(8, {nodes}), parents(8, {nodes}), choices(8, {nodes}), path(8, {nodes});
        const std::vector<int64_t> tree = random_parents(nodes, chain);
        for (int64_t i = 0; i < nodes; ++i)
          tokens.set<int64_t>(i, pick(tokens_of)), choices.set<int64_t>(i, pick(tokens_of)), parents.set<int64_t>(i, tree[i]);
        dream::VerifyTree call{};
        call.tokens = tokens.data<int64_t>(), call.parents = parents.data<int64_t>();
        call.choices = choices.data<int64_t>(), call.nodes = nodes, call.path = path.data<int64_t>();
        dream::verify_tree_cpu(call);
        require(call.length >= 1 && call.length <= nodes, "length outside the tree");
        require(!chain || tokens_of > 1 || call.length == nodes, "a chain of right tokens is not taken whole");
        parents.set<int64_t>(nodes - 1, nodes - 1);
        refuses([&] { dream::verify_tree_cpu(call); });
      }
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
    call.buffers = buffers.data(), call.count = count, call.start = start, call.path = path.data<int64_t>();
    call.length = path.size();
    dream::keep_path_cpu(call, threads);
    std::string bits;
    for (const auto& tensor : tensors) bits += tensor->bits();
    if (count > 0 && capacity > 0) {
      call.start += 1;
      if (call.length) refuses([&] { dream::keep_path_cpu(call, threads); });
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
