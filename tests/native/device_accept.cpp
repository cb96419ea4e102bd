// Both acceptance operators on the device, against plain references.
#include "device_vocab.h"
#include "dream/sample_tree.h"
#include "dream/verify_tree.h"

namespace device_check {

namespace {

struct Trees {
  Trees(int64_t batch, int64_t nodes)
      : batch(batch), nodes(nodes), tokens(8, {batch, nodes}), parents(8, {batch, nodes}), depth(8, {batch, nodes}) {}

  // Trees in order: chains, or of any shape.
  void shape(bool chain) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < nodes; ++i) {
        const int64_t parent = i == 0 ? -1 : chain ? i - 1 : pick(i);
        parents.set(b * nodes + i, parent);
        depth.set(b * nodes + i, i == 0 ? int64_t{0} : depth.get<int64_t>(b * nodes + parent) + 1);
      }
  }
  int64_t levels() const {
    int64_t greatest = 0;
    for (int64_t i = 0; i < depth.size(); ++i) greatest = std::max(greatest, depth.get<int64_t>(i));
    return greatest + 1;
  }
  // Most nodes hold the choice after their parent: siblings often hold the same.
  void name(const std::vector<int64_t>& choices, int64_t tokens_of) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < nodes; ++i)
        tokens.set(b * nodes + i, i && pick(8) ? choices[b * nodes + parents.get<int64_t>(b * nodes + i)] : pick(tokens_of));
  }

  int64_t batch, nodes;
  Tensor tokens, parents, depth;
};

struct Accepted {
  explicit Accepted(const Trees& trees) : path(8, {trees.batch, trees.nodes}), length(8, {trees.batch}), bonus(8, {trees.batch}) {}
  template <class Call>
  void give(Call& call) const {
    call.path = path.data<int64_t>(), call.length = length.data<int64_t>(), call.bonus = bonus.data<int64_t>();
  }
  std::string bits() const { return path.bits() + length.bits() + bonus.bits(); }
  Tensor path, length, bonus;
};

// A choice below 0 ends a path where `ends` says so.
void check_walk(const Trees& trees, const std::vector<int64_t>& choices, bool ends, const Accepted& out) {
  for (int64_t b = 0; b < trees.batch; ++b) {
    const int64_t first = b * trees.nodes;
    std::vector<int64_t> path{0};
    for (int64_t i = 1; i < trees.nodes; ++i) {
      const int64_t chosen = choices[first + path.back()];
      if (!(ends && chosen < 0) && trees.parents.get<int64_t>(first + i) == path.back() && trees.tokens.get<int64_t>(first + i) == chosen)
        path.push_back(i);
    }
    require(out.length.get<int64_t>(b) == static_cast<int64_t>(path.size()), "another length");
    require(out.bonus.get<int64_t>(b) == choices[first + path.back()], "another bonus");
    for (int64_t i = 0; i < trees.nodes; ++i)
      require(out.path.get<int64_t>(first + i) == (i < static_cast<int64_t>(path.size()) ? path[i] : -1), "another path");
  }
}

// On the device, and on the CPU where the trees are in order and the logits of a type it knows.
void run_verify(const Trees& trees, const Tensor* choices, const VocabRows* logits, const Accepted& out, bool on_cpu) {
  dream::VerifyTree call{};
  call.tokens = trees.tokens.data<int64_t>(), call.parents = trees.parents.data<int64_t>();
  call.batch = trees.batch, call.nodes = trees.nodes;
  if (choices) call.choices = choices->data<int64_t>();
  if (logits) {
    call.logits = logits->memory->data(), call.dtype = logits->dtype, call.vocab = logits->vocab;
    call.batch_stride = logits->batch_stride, call.row_stride = logits->row_stride;
  }
  out.give(call);
  Tensor workspace(1, {dream::verify_tree_workspace(call)});
  call.workspace = workspace.data();
  dream::verify_tree_cuda(call, 0, nullptr);
  const std::string bits = out.bits();
  fold_bits(bits);
  if (!on_cpu) return;
  const Accepted by_cpu(trees);
  by_cpu.give(call);
  dream::verify_tree_cpu(call);
  require(bits == by_cpu.bits(), "another path than the CPU's");
}

void verify_choices(int64_t batch, int64_t nodes, bool chain, int64_t tokens_of) {
  at("verify_tree choices", batch, nodes, chain, tokens_of);
  Trees trees(batch, nodes);
  trees.shape(chain);
  Tensor given(8, {batch, nodes});
  std::vector<int64_t> choices;
  for (int64_t i = 0; i < batch * nodes; ++i) choices.push_back(pick(tokens_of) - 1), given.set(i, choices[i]);  // -1 is a token here
  trees.name(choices, tokens_of);
  const Accepted out(trees);
  run_verify(trees, &given, nullptr, out, true);
  check_walk(trees, choices, false, out);
}

// Parents of no tree: the walk ends, its nodes ascend, and nothing outside is touched.
void verify_hostile(int64_t nodes) {
  const int64_t far = int64_t{1} << 62;
  for (const int64_t wild : {int64_t{-1}, int64_t{0}, nodes - 1, nodes, far, -far}) {
    at("verify_tree hostile", nodes, wild);
    Trees trees(1, nodes);
    Tensor given(8, {1, nodes});
    for (int64_t i = 0; i < nodes; ++i)
      trees.parents.set(i, i % 3 ? wild : i), trees.tokens.set<int64_t>(i, 0), given.set<int64_t>(i, 0);
    if (nodes > 2) trees.parents.set<int64_t>(2, 0), trees.parents.set<int64_t>(1, 2);  // a child before its parent
    const Accepted out(trees);
    run_verify(trees, &given, nullptr, out, false);
    const int64_t length = out.length.get<int64_t>(0);
    require(length >= 1 && length <= nodes, "length outside the tree");
    for (int64_t i = 1; i < length; ++i) require(out.path.get<int64_t>(i) > out.path.get<int64_t>(i - 1), "a path that does not ascend");
  }
}

// Rows of every kind in turn, from `first` on.
void verify_logits(Dtype dtype, int64_t batch, int64_t nodes, int64_t vocab, int64_t gap, int64_t lead, bool chain, Kind first) {
  at("verify_tree logits", static_cast<int>(dtype), batch, nodes, vocab, gap, lead, chain);
  Trees trees(batch, nodes);
  trees.shape(chain);
  VocabRows logits(dtype, batch, nodes, vocab, gap, lead);
  std::vector<int64_t> choices(batch * nodes, 0);
  for (int64_t row = 0; row < batch * nodes; ++row) {
    const Kind kind = static_cast<Kind>((static_cast<int64_t>(first) + row) % static_cast<int64_t>(Kind::kinds));
    for (int64_t i = 0; i < vocab; ++i) logits.set(row, i, logit(kind, i, vocab));
    const float* x = logits.row(row);
    for (int64_t i = 1; i < vocab; ++i)
      if (!std::isnan(x[choices[row]]) && !(x[i] <= x[choices[row]])) choices[row] = i;
  }
  trees.name(choices, vocab);
  const Accepted out(trees);
  run_verify(trees, nullptr, &logits, out, dtype != Dtype::f16);
  check_walk(trees, choices, false, out);
}

}  // namespace

void verify_tree() {
  for (const int64_t nodes : {1, 2, 31, 32, 33, 63, 64})
    for (const bool chain : {false, true})
      for (const int64_t tokens_of : {1, 3}) verify_choices(nodes % 2 + 1, nodes, chain, tokens_of);
  verify_hostile(1), verify_hostile(40), verify_hostile(64);
  int64_t turn = 0;
  for (const Dtype dtype : kDtypes) {
    const int64_t items = dtype == Dtype::f32 ? 4 : 8, step = 256 * items;  // a block's words
    for (const int64_t vocab : {int64_t{1}, items - 1, items + 1, 32 * items + 1, step - 1, step + 1}) {
      ++turn;
      verify_logits(dtype, 1 + turn % 2, 11, vocab, turn % 3, turn % items, turn % 4, static_cast<Kind>(turn % 11));
    }
    verify_logits(dtype, 2, 11, 2 * step + 5, 3, 1, true, Kind::random);
    verify_logits(dtype, 1, 5, 5 * step + 9, 0, 0, false, Kind::last);
  }
  verify_logits(Dtype::bf16, 1, 64, 70, 1, 3, true, Kind::random);
  // As many splits as there may be, of more words than a block has under way.
  verify_logits(Dtype::f32, 1, 1, 140000, 0, 0, true, Kind::random), verify_logits(Dtype::f32, 1, 1, 140001, 0, 3, true, Kind::last);
  verify_logits(Dtype::f32, 1, 1, 140000, 0, 0, true, Kind::nan);
  Trees none(0, 3);
  run_verify(none, nullptr, nullptr, Accepted(none), true);
  at("verify_tree refuses");
  refuses([] { verify_choices(1, 65, true, 2); });
}

namespace {

enum class Row { random, ties, late, vanishing, one_vanishes, good, zero, negative, bad_p, infinite_p, bad_noise, noise_zero, depth, rows };

struct Sampling {
  Sampling(int64_t batch, int64_t nodes, int64_t levels, int64_t vocab, int64_t gap, int64_t lead)
      : p(Dtype::f32, batch, nodes, vocab, gap, lead), noise(Dtype::f32, batch, nodes ? levels : 0, vocab, 2 * gap, 0) {}
  VocabRows p, noise;
};

// One row of probabilities, and where it has noise of its own that too; what is refused is refused wherever it stands.
void fill_row(Sampling& x, int64_t row, int64_t noise_row, bool own_noise, Row kind) {
  const int64_t vocab = x.p.vocab, odd = pick(vocab);
  for (int64_t i = 0; i < vocab; ++i) {
    float p = pick(3) ? static_cast<float>(pick(1000)) / 1000.f : 0.f, e = static_cast<float>(1 + pick(4000)) / 1000.f;
    if (kind == Row::ties) p = static_cast<float>(1 + pick(50)), e = p * (pick(20) ? 17.f : 18.f);  // of 50 p (1 / 17 p) 13 are too large
    if (kind == Row::late) p = i == vocab - 1 ? 1.f : p / 5000.f;
    if (kind == Row::vanishing || kind == Row::one_vanishes) e = 1e38f, p = kind == Row::vanishing || i == odd ? 1e-30f : 0.f;
    if (kind == Row::zero) p = pick(2) ? 0.f : -0.f;
    if (kind == Row::negative) p = -0.5f;
    if (kind == Row::good && i == odd) p = 1.f, e = 1e-3f;
    if (i == odd && kind == Row::bad_p) p = NAN;
    if (i == odd && kind == Row::infinite_p) p = INFINITY;
    if (i == odd && kind == Row::bad_noise) e = pick(2) ? NAN : -1.f;
    if (i == odd && kind == Row::noise_zero) e = pick(2) ? 0.f : -0.f;
    x.p.set(row, i, p);
    if (own_noise) x.noise.set(noise_row, i, e);
  }
}

int64_t sampled_choice(const float* p, const float* e, int64_t vocab) {
  float high = -1;
  int64_t best = 0;
  bool positive = false;
  for (int64_t i = 0; i < vocab; ++i) {
    if (p[i] < 0 && e[i] > 0) continue;
    if (!(p[i] >= 0 && p[i] < INFINITY && e[i] > 0)) return -1;
    positive |= p[i] > 0;
    const volatile float quotient = p[i] / e[i];
    if (quotient > high) high = quotient, best = i;
  }
  return positive ? best : -1;
}

void one_sample(int64_t batch, int64_t nodes, int64_t vocab, int64_t gap, int64_t lead, bool chain, int64_t kind) {
  at("sample_tree", batch, nodes, vocab, gap, lead, chain, kind);
  Trees trees(batch, nodes);
  trees.shape(chain);
  const int64_t levels = trees.levels(), kinds = static_cast<int64_t>(Row::rows);
  Sampling x(batch, nodes, levels, vocab, gap, lead);
  std::vector<int64_t> choices;
  std::vector<bool> noisy(batch * levels, false);
  for (int64_t row = 0; row < batch * nodes; ++row) {
    const int64_t noise_row = row / nodes * levels + trees.depth.get<int64_t>(row);
    fill_row(x, row, noise_row, !noisy[noise_row], static_cast<Row>(kind < 0 ? pick(6) : (kind + row) % kinds));
    noisy[noise_row] = true;
  }
  for (int64_t row = 0; row < batch * nodes; ++row)
    choices.push_back(sampled_choice(x.p.row(row), x.noise.row(row / nodes * levels + trees.depth.get<int64_t>(row)), vocab));
  for (int64_t row = 0; row < batch * nodes; ++row) {  // a depth without noise is refused, and nothing outside is read
    const int64_t far = int64_t{1} << 62, wild[] = {-1, levels, far, -far};
    if (static_cast<Row>((kind + row) % kinds) == Row::depth && kind >= 0) trees.depth.set(row, wild[pick(4)]), choices[row] = -1;
  }
  trees.name(choices, vocab);
  dream::SampleTree call{};
  call.tokens = trees.tokens.data<int64_t>(), call.parents = trees.parents.data<int64_t>(), call.depth = trees.depth.data<int64_t>();
  call.probabilities = x.p.memory->data<float>(), call.noise = x.noise.memory->data<float>();
  call.batch = batch, call.nodes = nodes, call.vocab = vocab, call.levels = levels;
  call.batch_stride = x.p.batch_stride, call.row_stride = x.p.row_stride;
  call.noise_batch_stride = x.noise.batch_stride, call.noise_row_stride = x.noise.row_stride;
  const Accepted out(trees);
  out.give(call);
  Tensor workspace(1, {dream::sample_tree_workspace(call)});
  call.workspace = workspace.data();
  dream::sample_tree_cuda(call, 0, nullptr);
  check_walk(trees, choices, true, out);
  const std::string bits = out.bits();
  fold_bits(bits);
  if (std::count(choices.begin(), choices.end(), -1)) return;  // the CPU refuses
  const Accepted by_cpu(trees);
  by_cpu.give(call);
  dream::sample_tree_cpu(call);
  require(bits == by_cpu.bits(), "another path than the CPU's");
}

}  // namespace

void sample_tree() {
  int64_t turn = 0;
  for (const int64_t vocab : {1, 3, 4, 5, 127, 129, 1023, 1024, 1025, 2055, 4101})
    for (const int64_t lead : {0, 3}) {
      ++turn;
      one_sample(1 + turn % 2, 7, vocab, turn % 3, lead, turn % 4 > 0, -1);
    }
  for (int64_t kind = 0; kind < static_cast<int64_t>(Row::rows); ++kind)  // as the root's row, and then as every later one
    one_sample(1, static_cast<int64_t>(Row::rows), kind % 2 ? 9 : 2100, kind % 3, kind % 4, true, kind);
  one_sample(3, 64, 17, 1, 0, true, -1), one_sample(2, 33, 17, 1, 1, false, -1);
  // As many splits as there may be, of more words than a block has under way.
  for (const Row kind : {Row::random, Row::late, Row::noise_zero}) one_sample(1, 1, 70000, 0, 0, true, static_cast<int64_t>(kind));
  one_sample(0, 2, 5, 0, 0, true, -1);
  at("sample_tree refuses");
  refuses([] { one_sample(1, 65, 5, 0, 0, true, -1); });
}

}  // namespace device_check
