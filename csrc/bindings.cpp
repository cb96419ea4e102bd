// What Python sees. dream_ext/ops checks the arguments and words the refusals; here each view is checked once more for
// what would otherwise be a wild pointer. Tensors stay alive through the caller's frame while the GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>
#include <string>
#include <vector>

#include "block_plan.h"
#include "border.h"
#include "cpu/isa.h"
#include "dream/attention_entropy.h"
#include "dream/attention_mass.h"
#include "dream/expand_tree.h"
#include "dream/keep_path.h"
#include "dream/rank_tree.h"
#include "dream/rms_norm.h"
#include "dream/rounded_linear.h"
#include "dream/sample_tree.h"
#include "dream/select_visual.h"
#include "dream/skinny_linear.h"
#include "dream/tree_attention.h"
#include "dream/verify_tree.h"
#ifdef DREAM_CUDA
#include "cuda/device.h"
#endif

namespace py = pybind11;
using py::handle;

namespace dream {
namespace {

template <class T>
T* vector(const View& tensor, Kind kind, int64_t size) {  // contiguous, `size` elements in any shape of one or two dimensions
  const View& view = on_cpu(tensor, tensor.ndim);
  const bool rows = size > 0 && view.ndim == 2 && view.shape[0] > 1 && view.stride[0] != view.shape[1];
  if (!view.is(kind, sizeof(T)) || view.ndim > 2 || rows || view.elements() != size)
    throw py::type_error("wanted " + std::to_string(size) + " contiguous elements of the right type");
  return reinterpret_cast<T*>(view.data);
}
int64_t* ids(const View& view, int64_t size) { return vector<int64_t>(view, Kind::integer, size); }
float* floats(const View& view, int64_t size) { return vector<float>(view, Kind::real, size); }
int64_t* ids(handle tensor, int64_t size) { return ids(read(tensor), size); }
float* floats(handle tensor, int64_t size) { return floats(read(tensor), size); }

void bind_expand_tree(handle logits, handle scores, handle tokens, handle cumulative, handle best, int threads) {
  const View x = cpu(logits, 2);
  const int64_t rows = x.shape[0], width = read(tokens).shape[1];
  if (width < 1 || width > x.shape[1]) throw py::value_error("width");
  const ExpandTree call{x.data,        float_type(x), floats(scores, rows),       rows,
                        x.shape[1],    x.stride[0],   width,                      ids(tokens, rows * width),
                        floats(cumulative, rows * width), ids(best, rows ? width : 0), threads};
  py::gil_scoped_release released;
  expand_tree_cpu(call);
}

// `out` holds picked, parents, depth and ancestors, one behind the other.
void bind_rank_tree(handle scores, handle parents, handle out) {
  const View score = cpu(scores, 1), o = cpu(out, 1);
  const int64_t candidates = score.shape[0], picks = (o.shape[0] - 3) / 4;
  if (o.shape[0] < 3 || picks > candidates || picks > 63) throw py::value_error("picks");
  int64_t* const picked = ids(o, 4 * picks + 3);
  int64_t* const tree = picked + picks;
  const RankTree call{floats(score, candidates), ids(parents, candidates), candidates,        picks,
                      picked,                    tree,                     tree + (picks + 1), tree + 2 * (picks + 1)};
  rank_tree_cpu(call);  // a microsecond or two: to let the GIL go would cost as much
}

template <class Call>
py::tuple accepted(const Call& call) {
  py::list path(call.length);
  for (int64_t i = 0; i < call.length; ++i) path[i] = py::int_(call.path[i]);
  return py::make_tuple(std::move(path), call.bonus);
}

// `choices` are ids (nodes), or logits (nodes, vocab).
py::tuple bind_verify_tree(handle tokens, handle parents, handle choices) {
  const View t = cpu(tokens, 1), c = read(choices);
  const int64_t nodes = t.shape[0];
  if (nodes < 1) throw py::value_error("nodes");
  std::vector<int64_t> path(nodes);
  VerifyTree call{ids(t, nodes), ids(parents, nodes), nullptr, nullptr, Dtype::f32, nodes, 0, 0, path.data(), 0, 0};
  if (c.ndim == 2) {
    on_cpu(c, 2);
    if (c.shape[0] != nodes || c.shape[1] < 1) throw py::type_error("logits do not fit");
    call.logits = c.data, call.dtype = float_type(c), call.vocab = c.shape[1], call.row_stride = c.stride[0];
    py::gil_scoped_release released;
    verify_tree_cpu(call);
  } else {
    call.choices = ids(c, nodes);
    verify_tree_cpu(call);
  }
  return accepted(call);
}

py::tuple bind_sample_tree(handle tokens, handle parents, handle depth, handle probabilities, handle noise) {
  const View t = cpu(tokens, 1), p = cpu(probabilities, 2), e = cpu(noise, 2);
  const int64_t nodes = t.shape[0], vocab = p.shape[1];
  const bool fits = nodes > 0 && vocab > 0 && p.shape[0] == nodes && e.shape[1] == vocab && p.is(Kind::real, 4) && e.is(Kind::real, 4);
  if (!fits) throw py::type_error("tokens, probabilities and noise do not fit");
  std::vector<int64_t> path(nodes);
  SampleTree call{ids(t, nodes), ids(parents, nodes), ids(depth, nodes), reinterpret_cast<const float*>(p.data),
                  reinterpret_cast<const float*>(e.data), nodes, vocab, e.shape[0], p.stride[0], e.stride[0], path.data(), 0, 0};
  {
    py::gil_scoped_release released;
    sample_tree_cpu(call);
  }
  return accepted(call);
}

int64_t bind_sample_row(handle probabilities, handle noise) {
  const View p = read(probabilities);
  const int64_t vocab = p.elements();
  if (vocab < 1) throw py::type_error("probabilities");
  const float *row = floats(p, vocab), *variates = floats(noise, vocab);
  py::gil_scoped_release released;
  return sample_row_cpu(row, variates, vocab);
}

// The cache tensors of one call, checked: four dimensions, one device, contiguous rows, no element twice.
std::vector<CacheBuffer> cache_buffers(const py::sequence& tensors, int32_t device_type, int32_t& device_index) {
  std::vector<CacheBuffer> buffers;
  std::set<const char*> seen;
  device_index = -1;
  for (size_t b = 0; b < tensors.size(); ++b) {
    const View x = read(tensors[b]);
    const auto refuse = [&](const std::string& wanted, const std::string& got) {
      throw py::value_error("keep_path: buffers[" + std::to_string(b) + "]: wanted " + wanted + ", got " + got);
    };
    if (x.ndim != 4) refuse("shape (batch, heads, capacity, head_dim)", std::to_string(x.ndim) + " dimensions");
    if (x.device_type != device_type || (device_index >= 0 && x.device_index != device_index))
      refuse("a tensor on the device of buffers[0]", "another device");
    device_index = x.device_index;
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

void bind_keep_path(const py::sequence& tensors, int64_t start, handle path, int threads) {
  int32_t device = 0;
  const auto buffers = cache_buffers(tensors, 1, device);
  const int64_t length = cpu(path, 1).shape[0];
  const KeepPath call{buffers.data(), static_cast<int64_t>(buffers.size()), start, ids(path, length), length, false};
  py::gil_scoped_release released;
  keep_path_cpu(call, threads);
}

#ifdef DREAM_CUDA
void bind_keep_path_cuda(const py::sequence& tensors, int64_t start, handle path, uintptr_t stream) {
  int32_t device = 0;
  const auto buffers = cache_buffers(tensors, 2, device);
  const View p = read(path);
  if (p.ndim != 1 || !p.is(Kind::integer, 8) || p.shape[0] > kMaxPath || (p.shape[0] > 1 && p.stride[0] != 1))
    throw py::type_error("wanted a contiguous int64 path");
  const bool on_device = p.device_type == 2;
  if (on_device && p.device_index != device) throw py::value_error("keep_path: path: wanted the buffers' device");
  const KeepPath call{buffers.data(), static_cast<int64_t>(buffers.size()), start, reinterpret_cast<const int64_t*>(p.data),
                      p.shape[0],     on_device};
  py::gil_scoped_release released;
  check_path(call);
  keep_path_cuda(call, device, reinterpret_cast<void*>(stream));
}
#endif

int64_t row_bytes(const View& x, int64_t rows) {
  int64_t bytes = x.item_bytes;
  for (int d = x.ndim - 1; d > 0; --d) {
    if (x.elements() > 0 && x.shape[d] > 1 && x.stride[d] * x.item_bytes != bytes) throw py::type_error("wanted a contiguous tensor");
    bytes *= x.shape[d];
  }
  if (x.device_type != 1 || x.ndim < 1 || x.shape[0] != rows || (x.elements() > 0 && rows > 1 && x.stride[0] * x.item_bytes != bytes))
    throw py::type_error("wanted a contiguous CPU tensor of " + std::to_string(rows) + " rows");
  return bytes;
}

void bind_select_visual(handle scores, handle indices, const py::sequence& tensors, const py::sequence& gathered) {
  const int64_t v = cpu(scores, 1).shape[0], keep = cpu(indices, 1).shape[0];
  if (keep > v || tensors.size() != gathered.size()) throw py::value_error("keep");
  std::vector<GatherRows> rows;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const View from = read(tensors[i]), to = read(gathered[i]);
    const int64_t bytes = row_bytes(from, v);
    if (row_bytes(to, keep) != bytes) throw py::type_error("wanted rows of equal size");
    rows.push_back({from.data, to.data, bytes});
  }
  const SelectVisual call{floats(scores, v), v, keep, ids(indices, keep), rows.data(), static_cast<int64_t>(rows.size())};
  py::gil_scoped_release released;
  select_visual_cpu(call);
}

void check_heads(const View& q, const View& k) {
  if (q.shape[2] != k.shape[2] || k.shape[0] < 1 || q.shape[0] % k.shape[0] || float_type(q) != float_type(k))
    throw py::type_error("q and k do not fit");
}

void bind_attention_mass(handle query, handle key, handle positions, float scale, handle mass, int threads) {
  const View q = cpu(query, 3), k = cpu(key, 3);
  check_heads(q, k);
  const AttentionMass call{q.data,      k.data,      float_type(q), ids(positions, q.shape[1]), q.shape[0],  k.shape[0],
                           q.shape[1],  k.shape[1],  q.shape[2],    q.stride[0],                q.stride[1], k.stride[0],
                           k.stride[1], scale,       floats(mass, k.shape[1]), threads};
  py::gil_scoped_release released;
  attention_mass_cpu(call);
}

void bind_attention_entropy(handle query, handle key, float scale, handle entropy, int threads) {
  const View q = cpu(query, 3), k = cpu(key, 3);
  check_heads(q, k);
  if (q.shape[1] != k.shape[1]) throw py::type_error("q and k do not fit");
  const AttentionEntropy call{q.data,      k.data,      float_type(q), q.shape[0],  k.shape[0],
                              q.shape[1],  q.shape[2],  q.stride[0],   q.stride[1], k.stride[0],
                              k.stride[1], scale,       floats(entropy, q.shape[0] * q.shape[1]), threads};
  py::gil_scoped_release released;
  attention_entropy_cpu(call);
}

template <class T>
const T* optional(handle tensor, Kind kind, int64_t size) {
  return tensor.is_none() ? nullptr : vector<T>(read(tensor), kind, size);
}

void bind_tree_attention(handle query, handle key, handle value, handle lengths, handle ancestors, handle padding, handle depth,
                         int64_t window, float cap, float scale, handle out, int64_t tree, int threads) {
  const View q = cpu(query, 4), k = cpu(key, 4), v = cpu(value, 4), o = cpu(out, 4);
  const int64_t batch = q.shape[0], nodes = q.shape[2], slots = k.shape[2];
  const bool fits = k.shape[0] == batch && v.shape[0] == batch && k.shape[1] == v.shape[1] && v.shape[2] == slots &&
                    k.shape[3] == q.shape[3] && v.shape[3] == q.shape[3] && k.shape[1] > 0 && q.shape[1] % k.shape[1] == 0;
  if (!fits || float_type(q) != float_type(k) || float_type(q) != float_type(v)) throw py::type_error("q, k and v do not fit");
  const bool rows = o.shape[0] == batch && o.shape[1] == nodes && o.shape[2] == q.shape[1] && o.shape[3] == q.shape[3];
  if (!rows || float_type(o) != float_type(q) || !contiguous(o)) throw py::type_error("wanted a contiguous out");
  const auto* prefix = static_cast<const int64_t*>(ids(lengths, batch));
  for (int64_t b = 0; b < batch; ++b)
    if (tree < 0 || tree > 64 || prefix[b] < 0 || prefix[b] > slots - tree) throw py::value_error("lengths");
  if (window && depth.is_none()) throw py::type_error("a window needs depth");
  const TreeAttention call{
      q.data,      k.data,      v.data,      float_type(q), batch,       q.shape[1],  k.shape[1],
      nodes,       tree,        slots,       q.shape[3],    q.stride[0], q.stride[1], q.stride[2],
      k.stride[0], k.stride[1], k.stride[2], v.stride[0],   v.stride[1], v.stride[2], prefix,
      reinterpret_cast<const uint64_t*>(ids(ancestors, batch * nodes)), optional<uint8_t>(padding, Kind::boolean, batch * slots),
      optional<int64_t>(depth, Kind::integer, batch * nodes), window, scale, cap, o.data, threads};
  py::gil_scoped_release released;
  tree_attention_cpu(call);
}

// (weight, packed) of one layer.
PackLinear linear_pair(handle weight, handle packed) {
  const View w = cpu(weight, 2), p = cpu(packed, 1);
  const Dtype dtype = float_type(w);
  if (!contiguous(w) || float_type(p) != dtype || !contiguous(p) || p.elements() != packed_elements(dtype, w.shape[0], w.shape[1]))
    throw py::type_error("weight and packed do not fit");
  return {w.data, p.data, dtype, w.shape[0], w.shape[1]};
}

void bind_pack_linear(handle weight, handle packed) {
  const PackLinear call = linear_pair(weight, packed);
  py::gil_scoped_release released;
  pack_linear_cpu(call);
}

void bind_unpack_linear(handle packed, handle weight) {
  const PackLinear call = linear_pair(weight, packed);
  py::gil_scoped_release released;
  unpack_linear_cpu(call);
}

void bind_skinny_linear(handle rows, handle packed, handle bias, handle out, int threads) {
  const View x = cpu(rows, 2), w = cpu(packed, 1), y = cpu(out, 2);
  const Dtype dtype = float_type(x);
  const float* scales = nullptr;
  const bool fits = packed_fits(w, py::none(), dtype, y.shape[1], x.shape[1], scales) && float_type(y) == dtype && contiguous(y) &&
                    x.shape[0] == y.shape[0];
  if (!fits) throw py::type_error("x, packed and y do not fit");
  const SkinnyLinear call{x.data, w.data, optional_row(bias, dtype, y.shape[1]), dtype, x.shape[0], x.shape[1], y.shape[1], x.stride[0], y.shape[1], y.data, threads};
  py::gil_scoped_release released;
  skinny_linear_cpu(call);
}

void bind_rounded_linear(handle rows, handle packed, handle scale, handle bias, handle out, int threads) {
  const View x = cpu(rows, 2), w = cpu(packed, 1), y = cpu(out, 2);
  const Dtype dtype = float_type(x);
  const float* scales = nullptr;
  if (scale.is_none() || !packed_fits(w, scale, dtype, y.shape[1], x.shape[1], scales) || float_type(y) != dtype || !contiguous(y) ||
      x.shape[0] != y.shape[0])
    throw py::type_error("x, packed and y do not fit");
  const RoundedLinear call{x.data,     reinterpret_cast<const uint8_t*>(w.data), scales,     optional_row(bias, dtype, y.shape[1]), dtype,  x.shape[0],
                           x.shape[1], y.shape[1],                               x.stride[0], y.shape[1],                            y.data, threads};
  py::gil_scoped_release released;
  rounded_linear_cpu(call);
}

void bind_rms_norm(handle rows, handle scale, float eps, bool round_first, handle out) {
  const View x = cpu(rows, 2), y = cpu(out, 2);
  const Dtype dtype = float_type(x);
  if (float_type(y) != dtype || !contiguous(y) || y.shape[0] != x.shape[0] || y.shape[1] != x.shape[1])
    throw py::type_error("x and y do not fit");
  const RmsNorm call{x.data, optional_row(scale, dtype, x.shape[1]), dtype, x.shape[0], x.shape[1], x.stride[0], eps, round_first, y.data};
  py::gil_scoped_release released;
  rms_norm_cpu(call);
}

const char* const kIsaNames[] = {"base", "avx2", "avx512", "avx512vnni"};

void bind_use_isa(const std::string& name) {
  for (int i = 0; i < 4; ++i)
    if (name == kIsaNames[i]) return use_isa(static_cast<Isa>(i));
  throw py::value_error("use_isa: wanted base, avx2, avx512 or avx512vnni, got " + name);
}

py::dict build_info() {
  py::dict info;
  info["version"] = DREAM_VERSION;
  info["compiler"] = DREAM_COMPILER;
  info["isa"] = kIsaNames[static_cast<int>(isa())];
  info["best_isa"] = kIsaNames[static_cast<int>(best_isa())];
#ifdef _OPENMP
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
#ifdef DREAM_CUDA
  info["cuda"] = true;
  info["cuda_architectures"] = DREAM_CUDA_ARCHITECTURES;
  info["cuda_runtime"] = cuda_runtime_version();
#else
  info["cuda"] = false;
  info["cuda_architectures"] = "";
  info["cuda_runtime"] = 0;
#endif
  return info;
}

}  // namespace
}  // namespace dream

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled operators of dream_ext; use dream_ext.ops.";
  m.def("build_info", &dream::build_info);
  m.def("use_isa", &dream::bind_use_isa);
  m.def("expand_tree", &dream::bind_expand_tree);
  m.def("rank_tree", &dream::bind_rank_tree);
  m.def("verify_tree", &dream::bind_verify_tree);
  m.def("sample_tree", &dream::bind_sample_tree);
  m.def("sample_row", &dream::bind_sample_row);
  m.def("keep_path", &dream::bind_keep_path);
  m.def("select_visual", &dream::bind_select_visual);
  m.def("attention_mass", &dream::bind_attention_mass);
  m.def("attention_entropy", &dream::bind_attention_entropy);
  m.def("tree_attention", &dream::bind_tree_attention);
  m.def("rms_norm", &dream::bind_rms_norm);
  py::class_<dream::ProjectPlan>(m, "ProjectPlan").def(py::init(&dream::project_plan));
  py::class_<dream::MergePlan>(m, "MergePlan").def(py::init(&dream::merge_plan));
  m.def("block_project", &dream::bind_block_project);
  m.def("block_merge", &dream::bind_block_merge);
  m.def("block_step", &dream::bind_block_step);
  m.def("skinny_linear", &dream::bind_skinny_linear);
  m.def("rounded_linear", &dream::bind_rounded_linear);
  m.def("pack_linear", &dream::bind_pack_linear);
  m.def("unpack_linear", &dream::bind_unpack_linear);
#ifdef DREAM_CUDA
  m.def("keep_path_cuda", &dream::bind_keep_path_cuda);
  m.def("cuda_driver_version", &dream::cuda_driver_version);
#endif
}
