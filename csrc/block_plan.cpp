#include "block_plan.h"

#include "bind.h"
#include "border.h"
#include "dream/block_step.h"
#include "dream/skinny_linear.h"

namespace py = pybind11;

namespace dream {
namespace {

// A layer of `in` inputs, as (packed, scale or None, bias or None, out), for rows of `dtype`.
PackedLayer packed_layer(const py::tuple& layer, Dtype dtype, int64_t in) {
  const View packed = cpu(layer[0], 1);
  const auto out = layer[3].cast<int64_t>();
  const float* scale = nullptr;
  if (!packed_fits(packed, layer[1], dtype, out, in, scale)) throw py::type_error("a packed layer does not fit");
  return {packed.data, scale, optional_row(layer[2], dtype, out), out};
}

struct Heads {
  void* data;
  int64_t head, row;
};

// (heads, rows, head_dim); None where there are no heads.
Heads heads_of(py::handle tensor, int64_t heads, int64_t rows, int64_t head_dim, Dtype dtype) {
  if (heads == 0) return {nullptr, 0, 0};
  const View view = cpu(tensor, 3);
  if (view.shape[0] != heads || view.shape[1] != rows || view.shape[2] != head_dim || float_type(view) != dtype)
    throw py::type_error("q, k or v does not fit");
  return {view.data, view.stride[0], view.stride[1]};
}

void set_rows(BlockProject& call, py::handle rows, py::handle cos, py::handle sin, int threads) {
  const View x = cpu(rows, 2);
  if (float_type(x) != call.dtype || x.shape[1] != call.in) throw py::type_error("x does not fit");
  call.x = x.data, call.rows = x.shape[0], call.x_row = x.stride[0], call.threads = threads;
  if (cos.is_none()) return;
  const View c = cpu(cos, 2), s = cpu(sin, 2);
  const bool one = c.shape[0] == 1;
  const bool fits = c.shape[1] == call.head_dim && s.shape[1] == call.head_dim && s.shape[0] == c.shape[0] &&
                    (one || (c.shape[0] == call.rows && c.stride[0] == s.stride[0]));
  if (!fits || float_type(c) != call.dtype || float_type(s) != call.dtype) throw py::type_error("cos and sin do not fit");
  call.cos = c.data, call.sin = s.data, call.table_row = one ? 0 : c.stride[0];
}

// Rows of the residual stream, contiguous.
View stream(py::handle tensor, int64_t rows, const BlockMerge& call) {
  const View view = cpu(tensor, 2);
  if (view.shape[0] != rows || view.shape[1] != call.hidden || !contiguous(view) || float_type(view) != call.dtype)
    throw py::type_error("x or y does not fit");
  return view;
}

}  // namespace

ProjectPlan project_plan(bool wide, const py::tuple& layers, int64_t in, const py::tuple& heads, int64_t head_dim, bool normed, py::handle norm,
                         float eps, bool round_first, py::handle q_norm, py::handle k_norm) {
  BlockProject call{};
  call.dtype = wide ? Dtype::f32 : Dtype::bf16;
  call.in = in, call.normed = normed, call.eps = eps, call.round_first = round_first, call.head_dim = head_dim;
  call.q_heads = heads[0].cast<int64_t>(), call.k_heads = heads[1].cast<int64_t>(), call.v_heads = heads[2].cast<int64_t>();
  call.layer_count = static_cast<int64_t>(layers.size());
  if (call.layer_count < 1 || call.layer_count > 3) throw py::value_error("layers");
  int64_t outputs = 0;
  for (int64_t i = 0; i < call.layer_count; ++i) {
    call.layers[i] = packed_layer(layers[i].cast<py::tuple>(), call.dtype, in);
    outputs += call.layers[i].out;
  }
  if (head_dim < 2 || head_dim % 2 || outputs != (call.q_heads + call.k_heads + call.v_heads) * head_dim) throw py::value_error("heads");
  call.norm_weight = optional_row(norm, call.dtype, in);
  call.q_norm = optional_row(q_norm, call.dtype, head_dim), call.k_norm = optional_row(k_norm, call.dtype, head_dim);
  return {call, py::make_tuple(layers, norm, q_norm, k_norm)};
}

MergePlan merge_plan(bool wide, const py::tuple& output, int64_t attended_size, const py::tuple& gate_up, const py::tuple& down,
                     int64_t intermediate, py::handle norm, float eps, bool round_first, py::handle gates) {
  BlockMerge call{};
  call.dtype = wide ? Dtype::f32 : Dtype::bf16;
  call.attended_size = attended_size, call.intermediate = intermediate, call.eps = eps, call.round_first = round_first;
  call.output = packed_layer(output, call.dtype, attended_size);
  call.hidden = call.output.out;
  call.gate_up_count = static_cast<int64_t>(gate_up.size());
  if (call.gate_up_count < 1 || call.gate_up_count > 2) throw py::value_error("gate_up");
  for (int64_t i = 0; i < call.gate_up_count; ++i) {
    call.gate_up[i] = packed_layer(gate_up[i].cast<py::tuple>(), call.dtype, call.hidden);
    if (call.gate_up[i].out * call.gate_up_count != 2 * intermediate) throw py::value_error("gate_up");
  }
  call.down = packed_layer(down, call.dtype, intermediate);
  if (call.down.out != call.hidden) throw py::value_error("down");
  call.norm_weight = optional_row(norm, call.dtype, call.hidden);
  if (!gates.is_none()) {
    const auto pair = gates.cast<py::tuple>();
    call.gated = true, call.attention_gate = pair[0].cast<float>(), call.mlp_gate = pair[1].cast<float>();
  }
  return {call, py::make_tuple(output, gate_up, down, norm)};
}

void bind_block_project(const ProjectPlan& plan, py::handle rows, py::handle cos, py::handle sin, py::handle q, py::handle k, py::handle v,
                        int threads) {
  BlockProject call = plan.call;
  set_rows(call, rows, cos, sin, threads);
  const Heads to_q = heads_of(q, call.q_heads, call.rows, call.head_dim, call.dtype);
  const Heads to_k = heads_of(k, call.k_heads, call.rows, call.head_dim, call.dtype);
  const Heads to_v = heads_of(v, call.v_heads, call.rows, call.head_dim, call.dtype);
  call.q = to_q.data, call.q_head = to_q.head, call.q_row = to_q.row;
  call.k = to_k.data, call.k_head = to_k.head, call.k_row = to_k.row;
  call.v = to_v.data, call.v_head = to_v.head, call.v_row = to_v.row;
  py::gil_scoped_release released;
  block_project_cpu(call);
}

void bind_block_merge(const MergePlan& plan, py::handle rows, py::handle attended, py::handle out, int threads) {
  BlockMerge call = plan.call;
  const View a = cpu(attended, 2);
  call.rows = a.shape[0], call.attended = a.data, call.threads = threads;
  if (a.shape[1] != call.attended_size || !contiguous(a) || float_type(a) != call.dtype) throw py::type_error("attended does not fit");
  call.x = stream(rows, call.rows, call).data, call.y = stream(out, call.rows, call).data;
  py::gil_scoped_release released;
  block_merge_cpu(call);
}

void bind_block_step(const ProjectPlan& project, const MergePlan& merge, py::handle rows, py::handle cos, py::handle sin, py::handle keys,
                     py::handle values, py::handle lengths, py::handle ancestors, float cap, float scale, py::handle out, int threads) {
  BlockStep call{project.call, {}, merge.call};
  set_rows(call.project, rows, cos, sin, threads);
  const BlockProject& p = call.project;
  const View k = cpu(keys, 4), v = cpu(values, 4), prefix = cpu(lengths, 1), bits = cpu(ancestors, 2);
  const auto fits = [&](const View& cache, int64_t heads) {
    return cache.shape[0] == 1 && cache.shape[1] == heads && cache.shape[2] == k.shape[2] && cache.shape[3] == p.head_dim &&
           float_type(cache) == p.dtype;
  };
  const bool tree = prefix.is(Kind::integer, 8) && prefix.shape[0] == 1 && bits.is(Kind::integer, 8) && bits.shape[1] == p.rows &&
                    contiguous(bits) && p.rows <= 64;
  if (!fits(k, p.k_heads) || !fits(v, p.k_heads) || p.v_heads != p.k_heads || p.k_heads < 1 || p.q_heads % p.k_heads || !tree ||
      merge.call.dtype != p.dtype || merge.call.attended_size != p.q_heads * p.head_dim)
    throw py::type_error("the cache, the tree or the plans do not fit");
  const auto* length = reinterpret_cast<const int64_t*>(prefix.data);
  if (*length < 0 || *length > k.shape[2] - p.rows) throw py::value_error("lengths");
  const int64_t item = k.item_bytes;
  call.project.k = k.data + *length * k.stride[2] * item, call.project.k_head = k.stride[1], call.project.k_row = k.stride[2];
  call.project.v = v.data + *length * v.stride[2] * item, call.project.v_head = v.stride[1], call.project.v_row = v.stride[2];
  call.attention = {nullptr,     k.data,      v.data,      p.dtype,     1,           p.q_heads,  p.k_heads,
                    p.rows,      p.rows,      k.shape[2],  p.head_dim,  0,           0,          0,
                    0,           k.stride[1], k.stride[2], 0,           v.stride[1], v.stride[2], length,
                    reinterpret_cast<const uint64_t*>(bits.data), nullptr, nullptr, 0, scale, cap, nullptr, threads, nullptr};
  call.merge.rows = p.rows, call.merge.threads = threads;
  call.merge.x = stream(rows, p.rows, call.merge).data, call.merge.y = stream(out, p.rows, call.merge).data;
  py::gil_scoped_release released;
  block_step_cpu(call);
}

void bind_block(py::module_& m) {
  py::class_<ProjectPlan>(m, "ProjectPlan", py::module_local()).def(py::init(&project_plan));
  py::class_<MergePlan>(m, "MergePlan", py::module_local()).def(py::init(&merge_plan));
  m.def("block_project", &bind_block_project);
  m.def("block_merge", &bind_block_merge);
  m.def("block_step", &bind_block_step);
}

}  // namespace dream
