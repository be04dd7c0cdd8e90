// cast_ of lists of contiguous tensors on the CPU, rounded to nearest. Specification: amp_kernels/ops/cast.py. Python
// and the dispatcher take ten times as long as the cast of a small tensor.
#include "cast/call.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "autograd/functions.h"
#include "autograd/plain.h"

namespace ak {
namespace {

bool is_castable(const Tensor& t) { return is_narrow_on_cpu(t) && t.is_contiguous(); }

// The casts of two tuples; none if some tensor is not plain or does not fit.
std::vector<CastRef> casts_of(PyObject* destinations, PyObject* sources) {
  const Py_ssize_t count = PyTuple_GET_SIZE(destinations);
  if (PyTuple_GET_SIZE(sources) != count) return {};
  std::vector<CastRef> casts;
  casts.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *const to = PyTuple_GET_ITEM(destinations, i), *const from = PyTuple_GET_ITEM(sources, i);
    if (!is_tensor(to) || !is_tensor(from)) return {};
    const Tensor &destination = THPVariable_Unpack(to), &source = THPVariable_Unpack(from);
    if (!is_castable(destination) || !is_castable(source) || destination.sizes() != source.sizes()) return {};
    casts.push_back({destination.mutable_data_ptr(), source.const_data_ptr(), source.numel(), type_of(destination),
                     type_of(source)});
  }
  return casts;
}

// True if no two tensors overlap. Sources may share memory, but that case is left to Python.
bool are_disjoint(const std::vector<CastRef>& casts) {
  std::vector<std::pair<const char*, const char*>> spans;
  spans.reserve(2 * casts.size());
  const auto add = [&](const void* at, int64_t numel, DType type) {
    const char* const begin = static_cast<const char*>(at);
    if (numel > 0) spans.emplace_back(begin, begin + numel * bytes_of(type));
  };
  for (const CastRef& cast : casts) add(cast.destination, cast.numel, cast.to), add(cast.source, cast.numel, cast.from);
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return false;
  }
  return true;
}

}  // namespace

PyObject* cast_lists(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto is_list = [](PyObject* object) { return PyList_CheckExact(object) || PyTuple_CheckExact(object); };
  if (count != 2 || !is_list(args[0]) || !is_list(args[1]) || !nothing_between()) Py_RETURN_NONE;
  // Tuples keep the tensors alive while other threads hold the lock.
  const auto destinations = py::reinterpret_steal<py::object>(PySequence_Tuple(args[0])),
             sources = py::reinterpret_steal<py::object>(PySequence_Tuple(args[1]));
  const std::vector<CastRef> casts = casts_of(destinations.ptr(), sources.ptr());
  if (casts.empty() || !are_disjoint(casts)) Py_RETURN_NONE;
  {
    const py::gil_scoped_release no_gil;
    RECORD_FUNCTION("amp_kernels::cast_", c10::ArrayRef<const c10::IValue>{});
    (void)cast(casts, std::nullopt, nullptr, nullptr);
  }
  for (size_t i = 0; i < casts.size(); ++i) {
    const Tensor& written = THPVariable_Unpack(PyTuple_GET_ITEM(destinations.ptr(), static_cast<Py_ssize_t>(i)));
    if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
