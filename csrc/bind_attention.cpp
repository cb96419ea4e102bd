// The bindings of the attention operators.
#include <pybind11/pybind11.h>

#include "bind.h"
#include "border.h"
#include "dream/attention_entropy.h"
#include "dream/attention_mass.h"
#include "dream/cross_attention.h"
#include "dream/tree_attention.h"

namespace py = pybind11;
using py::handle;

namespace dream {
namespace {

void check_heads(const Arguments& args, const View& q, const View& k) {
  if (q.shape[2] != k.shape[2] || k.shape[0] < 1 || q.shape[0] % k.shape[0] || args.float_type(q) != args.float_type(k))
    throw py::type_error("q and k do not fit");
}

void bind_attention_mass(handle query, handle key, handle positions, float scale, handle mass, int threads, handle workspace,
                         uintptr_t stream) {
  Arguments args("attention_mass");
  const View q = args.view(query, 3), k = args.view(key, 3);
  check_heads(args, q, k);
  AttentionMass call{q.data,      k.data,      args.float_type(q), args.ids(positions, q.shape[1]), q.shape[0],  k.shape[0],
                     q.shape[1],  k.shape[1],  q.shape[2],         q.stride[0],                     q.stride[1], k.stride[0],
                     k.stride[1], scale,       args.floats(mass, k.shape[1]), threads, nullptr};
  call.workspace = args.workspace(workspace, DREAM_WORKSPACE(attention_mass, call));
  run(args, call, DREAM_KERNELS(attention_mass), stream);
}

void bind_attention_entropy(handle query, handle key, float scale, handle entropy, int threads, uintptr_t stream) {
  Arguments args("attention_entropy");
  const View q = args.view(query, 3), k = args.view(key, 3);
  check_heads(args, q, k);
  if (q.shape[1] != k.shape[1]) throw py::type_error("q and k do not fit");
  const AttentionEntropy call{q.data,      k.data,      args.float_type(q), q.shape[0],  k.shape[0],
                              q.shape[1],  q.shape[2],  q.stride[0],        q.stride[1], k.stride[0],
                              k.stride[1], scale,       args.floats(entropy, q.shape[0] * q.shape[1]), threads};
  run(args, call, DREAM_KERNELS(attention_entropy), stream);
}

// The host sees lengths on the CPU only; on a device the kernel looks after itself.
void check_lengths(const Arguments& args, const TreeAttention& call) {
  if (call.tree < 0 || call.tree > 64 || call.tree > call.slots) throw py::value_error("tree");
  for (int64_t b = 0; !args.cuda() && b < call.batch; ++b)
    if (call.lengths[b] < 0 || call.lengths[b] > call.slots - call.tree) throw py::value_error("lengths");
}

TreeAttention tree_attention_call(Arguments& args, handle query, handle key, handle value, handle lengths, handle ancestors,
                                  handle padding, handle depth, int64_t window, float cap, float scale, handle out, int64_t tree,
                                  int threads) {
  const View q = args.view(query, 4), k = args.view(key, 4), v = args.view(value, 4), o = args.view(out, 4);
  const int64_t batch = q.shape[0], nodes = q.shape[2], slots = k.shape[2];
  const Dtype dtype = args.float_type(q);
  const bool fits = k.shape[0] == batch && v.shape[0] == batch && k.shape[1] == v.shape[1] && v.shape[2] == slots &&
                    k.shape[3] == q.shape[3] && v.shape[3] == q.shape[3] && k.shape[1] > 0 && q.shape[1] % k.shape[1] == 0;
  if (!fits || dtype != args.float_type(k) || dtype != args.float_type(v)) throw py::type_error("q, k and v do not fit");
  const bool rows = o.shape[0] == batch && o.shape[1] == nodes && o.shape[2] == q.shape[1] && o.shape[3] == q.shape[3];
  if (!rows || args.float_type(o) != dtype || !contiguous(o)) throw py::type_error("wanted a contiguous out");
  if (window && depth.is_none()) throw py::type_error("a window needs depth");
  const TreeAttention call{
      q.data,      k.data,      v.data,      dtype,         batch,       q.shape[1],  k.shape[1],
      nodes,       tree,        slots,       q.shape[3],    q.stride[0], q.stride[1], q.stride[2],
      k.stride[0], k.stride[1], k.stride[2], v.stride[0],   v.stride[1], v.stride[2], args.ids(lengths, batch),
      reinterpret_cast<const uint64_t*>(args.ids(ancestors, batch * nodes)), args.optional<uint8_t>(padding, Kind::boolean, batch * slots),
      args.optional<int64_t>(depth, Kind::integer, batch * nodes), window, scale, cap, o.data, threads, nullptr};
  check_lengths(args, call);
  return call;
}

void bind_tree_attention(handle query, handle key, handle value, handle lengths, handle ancestors, handle padding, handle depth,
                         int64_t window, float cap, float scale, handle out, int64_t tree, int threads, handle workspace,
                         uintptr_t stream) {
  Arguments args("tree_attention");
  TreeAttention call =
      tree_attention_call(args, query, key, value, lengths, ancestors, padding, depth, window, cap, scale, out, tree, threads);
  call.workspace = args.workspace(workspace, DREAM_WORKSPACE(tree_attention, call));
  run(args, call, DREAM_KERNELS(tree_attention), stream);
}

// (batch or 1, nodes or 1, head_dim), or None; a dimension of one serves all.
void set_tables(Arguments& args, CrossAttention& call, handle cos, handle sin) {
  if (cos.is_none()) return;
  const View c = args.view(cos, 3), s = args.view(sin, 3);
  const TreeAttention& a = call.attention;
  const auto serves = [](int64_t size, int64_t wanted) { return size == 1 || size == wanted; };
  bool fits = serves(c.shape[0], a.batch) && serves(c.shape[1], a.nodes) && c.shape[2] == a.head_dim;
  for (int d = 0; d < 3; ++d) fits = fits && c.shape[d] == s.shape[d] && (c.shape[d] <= 1 || c.stride[d] == s.stride[d]);
  if (!fits || args.float_type(c) != a.dtype || args.float_type(s) != a.dtype) throw py::type_error("cos and sin do not fit");
  call.cos = c.data, call.sin = s.data;
  call.table_batch = c.shape[0] == 1 ? 0 : c.stride[0], call.table_row = c.shape[1] == 1 ? 0 : c.stride[1];
}

void bind_cross_attention(handle query, handle key, handle value, handle q_norm, float eps, handle cos, handle sin, handle lengths,
                          handle ancestors, float scale, handle out, int64_t tree, int threads, handle workspace, uintptr_t stream) {
  Arguments args("cross_attention");
  const py::none none;
  CrossAttention call{tree_attention_call(args, query, key, value, lengths, ancestors, none, none, 0, 0, scale, out, tree, threads),
                      nullptr, eps, nullptr, nullptr, 0, 0};
  const View norm = args.view(q_norm, 1);
  if (norm.shape[0] != call.attention.head_dim || args.float_type(norm) != call.attention.dtype) throw py::type_error("q_norm does not fit");
  call.q_norm = norm.data;
  set_tables(args, call, cos, sin);
  call.attention.workspace = args.workspace(workspace, DREAM_WORKSPACE(tree_attention, call.attention));
  run(args, call, DREAM_KERNELS(cross_attention), stream);
}

#ifdef DREAM_CUDA
int64_t size_attention_mass(int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys, int64_t head_dim) {
  AttentionMass call{};
  call.heads = heads, call.kv_heads = kv_heads, call.rows = rows, call.keys = keys, call.head_dim = head_dim;
  return attention_mass_workspace(call);
}

int64_t size_tree_attention(int64_t batch, int64_t heads, int64_t kv_heads, int64_t nodes, int64_t slots, int64_t head_dim) {
  TreeAttention call{};
  call.batch = batch, call.heads = heads, call.kv_heads = kv_heads, call.nodes = nodes, call.slots = slots, call.head_dim = head_dim;
  return tree_attention_workspace(call);
}
#endif

}  // namespace

void bind_attention(py::module_& m) {
  m.def("attention_mass", &bind_attention_mass);
  m.def("attention_entropy", &bind_attention_entropy);
  m.def("tree_attention", &bind_tree_attention);
  m.def("cross_attention", &bind_cross_attention);
#ifdef DREAM_CUDA
  m.def("attention_mass_workspace", &size_attention_mass);
  m.def("tree_attention_workspace", &size_tree_attention);
#endif
}

}  // namespace dream
