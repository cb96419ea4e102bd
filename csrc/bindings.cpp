// What Python sees. dream_ext/ops checks the arguments and words the refusals; here each view is checked once more for
// what would otherwise be a wild pointer. Tensors stay alive through the caller's frame while the GIL is released.
#include <pybind11/pybind11.h>

#include <string>

#include "bind.h"
#include "border.h"
#include "cpu/isa.h"
#ifdef DREAM_CUDA
#include "cuda/device.h"
#endif

namespace py = pybind11;

namespace dream {
namespace {

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
  info["tensor_border"] = reads_dlpack() ? "dlpack" : "attributes";
#ifdef _OPENMP
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
#ifdef DREAM_SIMT
  info["simulated"] = true;
#else
  info["simulated"] = false;
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
  dream::bind_tree(m);
  dream::bind_attention(m);
  dream::bind_linear(m);
  dream::bind_block(m);
#ifdef DREAM_CUDA
  m.def("cuda_driver_version", &dream::cuda_driver_version);
  m.def("warm_device", &dream::warm_device, py::call_guard<py::gil_scoped_release>());
#endif
}
