#include "border.h"

#include "dream/rounded_linear.h"
#include "dream/skinny_linear.h"

#include <cstring>
#include <string>

namespace py = pybind11;

namespace dream {
namespace {

// The parts of the DLPack ABI, version 1.x, that are used here (dmlc/dlpack, include/dlpack/dlpack.h).
struct DLTensor {
  void* data;
  struct { int32_t type, index; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackExchangeApi {
  struct { uint32_t major, minor; } version;
  void* previous;
  void *allocate, *from_object, *to_object;
  int (*view_of_object)(void* object, DLTensor* out);  // not owning, no synchronisation; may be null
  void* current_stream;
};

struct Torch {
  py::object tensor_type;
  const DLPackExchangeApi* api = nullptr;

  Torch() : tensor_type(py::module_::import("torch").attr("Tensor")) {
    if (!py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return;
    const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    const auto* found = static_cast<const DLPackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!found) PyErr_Clear();
    if (found && found->version.major == 1 && found->view_of_object) api = found;
  }
};

const Torch& torch() {
  static const Torch* const found = new Torch;  // never destroyed: the interpreter may be gone by then
  return *found;
}

View from_dlpack(py::handle tensor) {
  DLTensor t;
  if (torch().api->view_of_object(tensor.ptr(), &t) != 0) throw py::error_already_set();
  if (t.ndim > kMaxDims) throw py::value_error("a tensor has more than 8 dimensions");
  View view{static_cast<char*>(t.data) + t.byte_offset, {}, {}, t.ndim, t.device.type, t.device.index,
            (t.dtype.bits * t.dtype.lanes + 7) / 8, static_cast<Kind>(t.dtype.code)};
  std::memcpy(view.shape, t.shape, t.ndim * sizeof(int64_t));
  std::memcpy(view.stride, t.strides, t.ndim * sizeof(int64_t));
  return view;
}

// For a torch without the exchange API.
View from_attributes(py::handle tensor) {
  const py::tuple shape = tensor.attr("shape"), stride = tensor.attr("stride")();
  if (shape.size() > kMaxDims) throw py::value_error("a tensor has more than 8 dimensions");
  const py::object dtype = tensor.attr("dtype"), device = tensor.attr("device");
  View view{};
  view.data = reinterpret_cast<char*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  view.ndim = static_cast<int32_t>(shape.size());
  for (int i = 0; i < view.ndim; ++i) {
    view.shape[i] = shape[i].cast<int64_t>();
    view.stride[i] = stride[i].cast<int64_t>();
  }
  const auto type = device.attr("type").cast<std::string>();
  view.device_type = type == "cpu" ? 1 : type == "cuda" ? 2 : 0;
  view.device_index = device.attr("index").is_none() ? 0 : device.attr("index").cast<int32_t>();
  view.item_bytes = dtype.attr("itemsize").cast<int32_t>();
  const auto name = py::str(dtype).cast<std::string>();
  view.kind = name == "torch.bfloat16"                                  ? Kind::bfloat
              : name == "torch.bool"                                    ? Kind::boolean
              : dtype.attr("is_complex").cast<bool>()                   ? Kind::complex
              : dtype.attr("is_floating_point").cast<bool>()            ? Kind::real
              : name.rfind("torch.uint", 0) == 0                        ? Kind::unsigned_integer
                                                                        : Kind::integer;
  return view;
}

}  // namespace

bool reads_dlpack() { return torch().api != nullptr; }

View read(py::handle tensor) {
  if (!py::isinstance(tensor, torch().tensor_type)) throw py::type_error("wanted a torch tensor");
  return torch().api ? from_dlpack(tensor) : from_attributes(tensor);
}

const View& on_cpu(const View& view, int ndim) {
  if (view.device_type != 1 || view.ndim != ndim) throw py::type_error("wanted a CPU tensor of " + std::to_string(ndim) + " dimensions");
  if (ndim && view.elements() > 0 && view.shape[ndim - 1] > 1 && view.stride[ndim - 1] != 1)
    throw py::type_error("wanted a contiguous last dimension");
  return view;
}

View cpu(py::handle tensor, int ndim) { return on_cpu(read(tensor), ndim); }

Dtype float_type(const View& view) {
  if (view.is(Kind::real, 4)) return Dtype::f32;
  if (view.is(Kind::bfloat, 2)) return Dtype::bf16;
  throw py::type_error("wanted float32 or bfloat16");
}

bool contiguous(const View& view) {
  int64_t stride = 1;
  for (int d = view.ndim - 1; d >= 0; stride *= view.shape[d--])
    if (view.shape[d] > 1 && view.stride[d] != stride) return view.elements() == 0;
  return true;
}

View Arguments::view(py::handle tensor) {
  View view = read(tensor);
#ifdef DREAM_SIMT  // kernels for CUDA run on the host, on its memory
  if (view.device_type == kCpu) view.device_type = kCuda;
#endif
  if (device_type_ == 0) {
    device_type_ = view.device_type, device_index_ = view.device_index;
#ifdef DREAM_CUDA
    if (device_type_ == kCuda) return view;
#endif
    if (device_type_ != kCpu) throw py::type_error(std::string(op_) + ": this build has no kernel for the device of its arguments");
  }
  if (view.device_type != device_type_ || view.device_index != device_index_)
    throw py::type_error(std::string(op_) + ": wanted all tensors on one device");
  return view;
}

View Arguments::view(py::handle tensor, int ndim) {
  const View x = view(tensor);
  if (x.ndim != ndim) throw py::type_error(std::string(op_) + ": wanted a tensor of " + std::to_string(ndim) + " dimensions");
  if (ndim && x.elements() > 0 && x.shape[ndim - 1] > 1 && x.stride[ndim - 1] != 1)
    throw py::type_error(std::string(op_) + ": wanted a contiguous last dimension");
  return x;
}

char* Arguments::whole(py::handle tensor, Kind kind, int bytes, int64_t size) {
  const View x = view(tensor);
  if (!x.is(kind, bytes) || x.elements() != size || !contiguous(x))
    throw py::type_error(std::string(op_) + ": wanted " + std::to_string(size) + " contiguous elements of the right type");
  return x.data;
}

Dtype Arguments::float_type(const View& view) const {
  return cuda() && view.is(Kind::real, 2) ? Dtype::f16 : dream::float_type(view);
}

void* Arguments::workspace(py::handle tensor, int64_t bytes) {
  if (bytes == 0 || !cuda()) return nullptr;
  const View x = view(tensor);
  if (!x.is(Kind::unsigned_integer, 1) || !contiguous(x) || x.elements() < bytes)
    throw py::type_error(std::string(op_) + ": wanted a workspace of " + std::to_string(bytes) + " bytes");
  return x.data;
}

const void* optional_row(py::handle tensor, Dtype dtype, int64_t size) {
  if (tensor.is_none()) return nullptr;
  const View row = cpu(tensor, 1);
  if (float_type(row) != dtype || row.shape[0] != size) throw py::type_error("bias or weight does not fit");
  return row.data;
}

bool packed_fits(const View& packed, py::handle scale, Dtype dtype, int64_t out, int64_t in, const float*& scales) {
  scales = static_cast<const float*>(optional_row(scale, Dtype::f32, out));
  if (!contiguous(packed)) return false;
  if (scale.is_none()) return float_type(packed) == dtype && packed.elements() == packed_elements(dtype, out, in);
  return packed.is(Kind::unsigned_integer, 1) && in <= kMaxRoundedInputs && packed.elements() == (out + 15) / 16 * ((in + 3) / 4) * 64;
}

}  // namespace dream
