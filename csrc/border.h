// The tensor border: how a Python tensor becomes a pointer with a shape, without torch's headers.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

#include "dream/types.h"

namespace dream {

constexpr int kMaxDims = 8;
enum class Kind : uint8_t { integer = 0, unsigned_integer = 1, real = 2, bfloat = 4, complex = 5, boolean = 6 };  // DLPack codes

struct View {
  char* data;
  int64_t shape[kMaxDims], stride[kMaxDims];  // in elements
  int32_t ndim, device_type, device_index;    // DLPack device types: 1 = CPU, 2 = CUDA
  int32_t item_bytes;
  Kind kind;

  bool is(Kind wanted, int bytes) const { return kind == wanted && item_bytes == bytes; }
  int64_t elements() const {
    int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    return count;
  }
};

// Whether tensors are read through torch's DLPack exchange interface (torch 2.9 has none), else by their attributes.
bool reads_dlpack();

// Reads a torch tensor. The caller holds the GIL and keeps the tensor alive while the pointer is used.
View read(pybind11::handle tensor);

// The same, of a CPU tensor with `ndim` dimensions whose last one is contiguous; `on_cpu` for what was read already.
const View& on_cpu(const View& view, int ndim);
View cpu(pybind11::handle tensor, int ndim);

Dtype float_type(const View& view);
bool contiguous(const View& view);

// The tensors of one call: all on the device of the first one, which chooses the kernel.
class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  View view(pybind11::handle tensor);            // any shape
  View view(pybind11::handle tensor, int ndim);  // and a contiguous last dimension
  template <class T>
  T* elements(pybind11::handle tensor, Kind kind, int64_t size) {  // contiguous, `size` of them in any shape
    return reinterpret_cast<T*>(whole(tensor, kind, sizeof(T), size));
  }
  template <class T>
  T* optional(pybind11::handle tensor, Kind kind, int64_t size) {
    return tensor.is_none() ? nullptr : elements<T>(tensor, kind, size);
  }
  int64_t* ids(pybind11::handle tensor, int64_t size) { return elements<int64_t>(tensor, Kind::integer, size); }
  float* floats(pybind11::handle tensor, int64_t size) { return elements<float>(tensor, Kind::real, size); }
  Dtype float_type(const View& view) const;                       // float16 on CUDA alone
  void* workspace(pybind11::handle tensor, int64_t bytes);        // at least that many; None where none is needed

  bool cuda() const { return device_type_ == kCuda; }
  int device() const { return device_index_; }

 private:
  static constexpr int32_t kCpu = 1, kCuda = 2;
  char* whole(pybind11::handle tensor, Kind kind, int bytes, int64_t size);

  const char* op_;
  int32_t device_type_ = 0, device_index_ = 0;
};

// Runs the kernel of the call's device, without the GIL.
template <class Call>
void run(const Arguments& args, const Call& call, void (*cpu)(const Call&), void (*cuda)(const Call&, int, void*), uintptr_t stream) {
  pybind11::gil_scoped_release released;
  if (args.cuda())
    cuda(call, args.device(), reinterpret_cast<void*>(stream));
  else
    cpu(call);
}
#ifdef DREAM_CUDA
#define DREAM_KERNELS(op) &op##_cpu, &op##_cuda
#define DREAM_WORKSPACE(op, call) op##_workspace(call)
#else  // Arguments refuses tensors of a device without kernels
#define DREAM_KERNELS(op) &op##_cpu, {}
#define DREAM_WORKSPACE(op, call) 0
#endif

// A weight or bias of `size` elements, or null for None.
const void* optional_row(pybind11::handle tensor, Dtype dtype, int64_t size);

// Whether a packed weight has the size and type for rows of `dtype`: as skinny_linear.h says, or as rounded_linear.h with a
// scale (out,), which is returned.
bool packed_fits(const View& packed, pybind11::handle scale, Dtype dtype, int64_t out, int64_t in, const float*& scales);

}  // namespace dream
