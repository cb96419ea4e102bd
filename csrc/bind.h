// The parts of the module, each in a file of its own.
#pragma once
#include <pybind11/pybind11.h>

namespace dream {

void bind_tree(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_block(pybind11::module_& m);

}  // namespace dream
