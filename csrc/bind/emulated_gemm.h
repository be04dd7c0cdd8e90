// The GEMM kernels in _emulator: a file of its own, since they have many instances.
#pragma once
#include <pybind11/pybind11.h>

namespace ak {

void bind_gemm(pybind11::module_& m);

}  // namespace ak
