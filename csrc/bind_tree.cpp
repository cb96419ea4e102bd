// The bindings of the operators that draft, rank, accept and keep, and of the choice of visual tokens.
#include <pybind11/pybind11.h>

#include <set>
#include <string>
#include <vector>

#include "bind.h"
#include "border.h"
#include "dream/expand_tree.h"
#include "dream/keep_path.h"
#include "dream/rank_tree.h"
#include "dream/sample_tree.h"
#include "dream/select_visual.h"
#include "dream/verify_tree.h"

namespace py = pybind11;
using py::handle;

namespace dream {
namespace {

void bind_expand_tree(handle logits, handle scores, handle tokens, handle cumulative, handle best, int threads, handle workspace,
                      uintptr_t stream) {
  Arguments args("expand_tree");
  const View any = args.view(logits);
  if (any.ndim != 2 && any.ndim != 3) throw py::type_error("wanted logits ([batch,] rows, vocab)");
  const View x = args.view(logits, any.ndim);
  const int row = x.ndim - 2;  // the dimension of rows; a batch lies before it
  const int64_t batch = row ? x.shape[0] : 1, rows = x.shape[row], vocab = x.shape[row + 1], width = read(tokens).shape[x.ndim - 1];
  if (width < 1 || width > vocab || (args.cuda() && width > kMaxDeviceWidth)) throw py::value_error("width");
  ExpandTree call{x.data, args.float_type(x), args.floats(scores, batch * rows), batch, rows, vocab,
                  row ? x.stride[0] : 0, x.stride[row], width,
                  args.ids(tokens, batch * rows * width), args.floats(cumulative, batch * rows * width),
                  args.ids(best, rows ? batch * width : 0), threads, nullptr};
  call.workspace = args.workspace(workspace, DREAM_WORKSPACE(expand_tree, call));
  run(args, call, DREAM_KERNELS(expand_tree), stream);
}

// scores and parents ([batch,] candidates); `out` ([batch,] 4 picks + 3) holds picked, parents, depth and ancestors of a sequence,
// one behind the other.
void bind_rank_tree(handle scores, handle parents, handle out, uintptr_t stream) {
  Arguments args("rank_tree");
  const View score = args.view(scores), o = args.view(out);
  if (score.ndim < 1 || o.ndim != score.ndim) throw py::type_error("scores and out do not fit");
  const int64_t candidates = score.shape[score.ndim - 1], size = o.shape[o.ndim - 1], picks = (size - 3) / 4;
  if (size < 3 || picks > candidates || picks > 63 || (args.cuda() && candidates > kMaxDeviceCandidates))
    throw py::value_error("picks");
  const int64_t batch = o.elements() / size;
  int64_t* const picked = args.ids(out, batch * (4 * picks + 3));
  int64_t* const tree = picked + picks;
  const RankTree call{args.floats(scores, batch * candidates), args.ids(parents, batch * candidates), batch, candidates, picks,
                      picked, tree, tree + (picks + 1), tree + 2 * (picks + 1), 4 * picks + 3};
  if (args.cuda()) return run(args, call, DREAM_KERNELS(rank_tree), stream);
  rank_tree_cpu(call);  // a microsecond or two: to let the GIL go would cost as much
}

// `choices` are ids (batch, nodes), or logits (batch, nodes, vocab).
VerifyTree verify_call(Arguments& args, handle tokens, handle parents, handle choices, int64_t* path, int64_t* length, int64_t* bonus) {
  const View t = args.view(tokens), c = args.view(choices);
  const int64_t nodes = t.ndim ? t.shape[t.ndim - 1] : 0;
  if (nodes < 1 || t.elements() % nodes || (args.cuda() && nodes > 64)) throw py::value_error("nodes");
  const int64_t batch = t.elements() / nodes;
  VerifyTree call{args.ids(tokens, batch * nodes), args.ids(parents, batch * nodes), nullptr, nullptr, Dtype::f32, batch, nodes, 0, 0, 0,
                  path, length, bonus, nullptr};
  if (c.ndim == 3 || (c.ndim == 2 && t.ndim == 1)) {
    const View x = args.view(choices, c.ndim);
    const int row = x.ndim - 2;
    if (x.shape[row] != nodes || (row && x.shape[0] != batch) || x.shape[row + 1] < 1) throw py::type_error("logits do not fit");
    call.logits = x.data, call.dtype = args.float_type(x), call.vocab = x.shape[row + 1];
    call.batch_stride = row ? x.stride[0] : 0, call.row_stride = x.stride[row];
  } else {
    call.choices = args.ids(choices, batch * nodes);
  }
  return call;
}

void bind_verify_tree(handle tokens, handle parents, handle choices, handle path, handle length, handle bonus, handle workspace,
                      uintptr_t stream) {
  Arguments args("verify_tree");
  VerifyTree call = verify_call(args, tokens, parents, choices, nullptr, nullptr, nullptr);
  call.path = args.ids(path, call.batch * call.nodes);
  call.length = args.ids(length, call.batch), call.bonus = args.ids(bonus, call.batch);
  call.workspace = args.workspace(workspace, DREAM_WORKSPACE(verify_tree, call));
  run(args, call, DREAM_KERNELS(verify_tree), stream);
}

// One sequence on the CPU, for the decoding loop -> (path as a list, bonus).
py::tuple bind_verify_one(handle tokens, handle parents, handle choices) {
  Arguments args("verify_tree");
  int64_t length = 0, bonus = 0;
  VerifyTree call = verify_call(args, tokens, parents, choices, nullptr, &length, &bonus);
  if (args.cuda() || call.batch != 1) throw py::type_error("wanted one sequence on the CPU");
  std::vector<int64_t> nodes(call.nodes);
  call.path = nodes.data();
  if (call.logits)
    run(args, call, DREAM_KERNELS(verify_tree), 0);
  else
    verify_tree_cpu(call);
  py::list path(length);
  for (int64_t i = 0; i < length; ++i) path[i] = py::int_(nodes[i]);
  return py::make_tuple(std::move(path), bonus);
}

void bind_sample_tree(handle tokens, handle parents, handle depth, handle probabilities, handle noise, handle path, handle length,
                      handle bonus, handle workspace, uintptr_t stream) {
  Arguments args("sample_tree");
  const View p = args.view(probabilities, 3), e = args.view(noise, 3);
  const int64_t batch = p.shape[0], nodes = p.shape[1], vocab = p.shape[2];
  const bool fits = nodes > 0 && vocab > 0 && e.shape[0] == batch && e.shape[2] == vocab && p.is(Kind::real, 4) && e.is(Kind::real, 4);
  if (!fits || (args.cuda() && nodes > 64)) throw py::type_error("probabilities and noise do not fit");
  SampleTree call{args.ids(tokens, batch * nodes), args.ids(parents, batch * nodes), args.ids(depth, batch * nodes),
                  reinterpret_cast<const float*>(p.data), reinterpret_cast<const float*>(e.data), batch, nodes, vocab, e.shape[1],
                  p.stride[0], p.stride[1], e.stride[0], e.stride[1],
                  args.ids(path, batch * nodes), args.ids(length, batch), args.ids(bonus, batch), nullptr};
  call.workspace = args.workspace(workspace, DREAM_WORKSPACE(sample_tree, call));
  run(args, call, DREAM_KERNELS(sample_tree), stream);
}

int64_t bind_sample_row(handle probabilities, handle noise) {
  const View p = read(probabilities), e = read(noise);
  const int64_t vocab = p.elements();
  const auto fits = [&](const View& x) { return x.device_type == 1 && x.is(Kind::real, 4) && x.elements() == vocab && contiguous(x); };
  if (vocab < 1 || !fits(p) || !fits(e)) throw py::type_error("probabilities and noise do not fit");
  py::gil_scoped_release released;
  return sample_row_cpu(reinterpret_cast<const float*>(p.data), reinterpret_cast<const float*>(e.data), vocab);
}

// The cache tensors of one call, checked: four dimensions, one device, contiguous rows, no element twice.
std::vector<CacheBuffer> cache_buffers(Arguments& args, const py::sequence& tensors, int64_t sequences) {
  std::vector<CacheBuffer> buffers;
  std::set<const char*> seen;
  for (size_t b = 0; b < tensors.size(); ++b) {
    const View x = args.view(tensors[b]);
    const auto refuse = [&](const std::string& wanted, const std::string& got) {
      throw py::value_error("keep_path: buffers[" + std::to_string(b) + "]: wanted " + wanted + ", got " + got);
    };
    if (x.ndim != 4) refuse("shape (batch, heads, capacity, head_dim)", std::to_string(x.ndim) + " dimensions");
    if (sequences != 1 && x.shape[0] != sequences) refuse("a batch of " + std::to_string(sequences), std::to_string(x.shape[0]));
    if (x.shape[3] > 1 && x.stride[3] != 1) refuse("a contiguous last dimension", "stride " + std::to_string(x.stride[3]));
    for (int d = 0; d < 4; ++d)
      if (x.shape[d] > 1 && x.stride[d] == 0) refuse("memory of its own for every element", "an expanded tensor");
    if (x.elements() > 0 && !seen.insert(x.data).second) refuse("buffers that do not overlap", "the same memory twice");
    const int64_t item = x.item_bytes;
    buffers.push_back({x.data, x.shape[0], x.shape[1], x.shape[2], x.shape[3] * item, x.stride[0] * item, x.stride[1] * item,
                       x.stride[2] * item});
  }
  return buffers;
}

// start (sequences), path (sequences, width), lengths (sequences) or None.
void bind_keep_path(const py::sequence& tensors, handle start, handle path, handle lengths, int threads, uintptr_t stream) {
  Arguments args("keep_path");
  const View p = args.view(path, 2);
  const int64_t sequences = p.shape[0], width = p.shape[1];
  if (width > kMaxPath) throw py::value_error("keep_path: path: wanted at most 64 slots, got " + std::to_string(width));
  const auto buffers = cache_buffers(args, tensors, sequences);
  const KeepPath call{buffers.data(), static_cast<int64_t>(buffers.size()), args.ids(start, sequences), args.ids(path, sequences * width),
                      args.optional<int64_t>(lengths, Kind::integer, sequences), sequences, width};
  py::gil_scoped_release released;
#ifdef DREAM_CUDA
  if (args.cuda()) return keep_path_cuda(call, args.device(), reinterpret_cast<void*>(stream));
#endif
  (void)stream;
  keep_path_cpu(call, threads);
}

int64_t row_bytes(const View& x, int64_t rows) {
  if (x.ndim < 1 || x.shape[0] != rows || !contiguous(x)) throw py::type_error("wanted a contiguous tensor of " + std::to_string(rows) + " rows");
  int64_t bytes = x.item_bytes;
  for (int d = 1; d < x.ndim; ++d) bytes *= x.shape[d];
  return bytes;
}

void bind_select_visual(handle scores, handle indices, const py::sequence& tensors, const py::sequence& gathered, uintptr_t stream) {
  Arguments args("select_visual");
  const int64_t v = args.view(scores, 1).shape[0], keep = args.view(indices, 1).shape[0];
  if (keep > v || tensors.size() != gathered.size()) throw py::value_error("keep");
  std::vector<GatherRows> rows;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const View from = args.view(tensors[i]), to = args.view(gathered[i]);
    const int64_t bytes = row_bytes(from, v);
    if (row_bytes(to, keep) != bytes) throw py::type_error("wanted rows of equal size");
    rows.push_back({from.data, to.data, bytes});
  }
  const SelectVisual call{args.floats(scores, v), v, keep, args.ids(indices, keep), rows.data(), static_cast<int64_t>(rows.size())};
  run(args, call, DREAM_KERNELS(select_visual), stream);
}

#ifdef DREAM_CUDA
int64_t size_expand_tree(int64_t batch, int64_t rows, int64_t vocab, int64_t width) {
  ExpandTree call{};
  call.batch = batch, call.rows = rows, call.vocab = vocab, call.width = width;
  return expand_tree_workspace(call);
}

int64_t size_verify_tree(int64_t batch, int64_t nodes, int64_t vocab) {  // vocab 0: the choices are given
  VerifyTree call{};
  const float any = 0;
  call.batch = batch, call.nodes = nodes, call.vocab = vocab, call.logits = vocab ? &any : nullptr;
  return verify_tree_workspace(call);
}

int64_t size_sample_tree(int64_t batch, int64_t nodes, int64_t vocab) {
  SampleTree call{};
  call.batch = batch, call.nodes = nodes, call.vocab = vocab;
  return sample_tree_workspace(call);
}
#endif

}  // namespace

void bind_tree(py::module_& m) {
  m.def("expand_tree", &bind_expand_tree);
  m.def("rank_tree", &bind_rank_tree);
  m.def("verify_tree", &bind_verify_tree);
  m.def("verify_one", &bind_verify_one);
  m.def("sample_tree", &bind_sample_tree);
  m.def("sample_row", &bind_sample_row);
  m.def("keep_path", &bind_keep_path);
  m.def("select_visual", &bind_select_visual);
#ifdef DREAM_CUDA
  m.def("expand_tree_workspace", &size_expand_tree);
  m.def("verify_tree_workspace", &size_verify_tree);
  m.def("sample_tree_workspace", &size_sample_tree);
#endif
}

}  // namespace dream
