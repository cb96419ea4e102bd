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

// Reads a torch tensor. The caller holds the GIL and keeps the tensor alive while the pointer is used.
View read(pybind11::handle tensor);

// The same, of a CPU tensor with `ndim` dimensions whose last one is contiguous; `on_cpu` for what was read already.
const View& on_cpu(const View& view, int ndim);
View cpu(pybind11::handle tensor, int ndim);

Dtype float_type(const View& view);
bool contiguous(const View& view);

// A weight or bias of `size` elements, or null for None.
const void* optional_row(pybind11::handle tensor, Dtype dtype, int64_t size);

// Whether a packed weight has the size and type for rows of `dtype`: as skinny_linear.h says, or as rounded_linear.h with a
// scale (out,), which is returned.
bool packed_fits(const View& packed, pybind11::handle scale, Dtype dtype, int64_t out, int64_t in, const float*& scales);

}  // namespace dream
