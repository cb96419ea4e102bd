// The bindings of the linear operators and the norm, all of them for the CPU.
#include <pybind11/pybind11.h>

#include "bind.h"
#include "border.h"
#include "dream/rms_norm.h"
#include "dream/rounded_linear.h"
#include "dream/skinny_linear.h"

namespace py = pybind11;
using py::handle;

namespace dream {
namespace {

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

}  // namespace

void bind_linear(py::module_& m) {
  m.def("rms_norm", &bind_rms_norm);
  m.def("skinny_linear", &bind_skinny_linear);
  m.def("rounded_linear", &bind_rounded_linear);
  m.def("pack_linear", &bind_pack_linear);
  m.def("unpack_linear", &bind_unpack_linear);
}

}  // namespace dream
