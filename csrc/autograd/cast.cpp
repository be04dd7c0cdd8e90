// cast_ of the module _nodes: lists of contiguous tensors on the CPU, rounded to nearest. Specification:
// amp_kernels/ops/cast.py. What Python and the dispatcher do for a small tensor takes ten times as long as its cast.
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "autograd/rows_node.h"
#include "cast/cpu_call.h"

namespace ak {
namespace {

bool is_castable(const Tensor& t) { return is_narrow_on_cpu(t) && t.is_contiguous(); }

// The casts of two tuples; none where something is not plain or not right.
std::vector<Cast> casts_of(PyObject* destinations, PyObject* sources) {
  const Py_ssize_t count = PyTuple_GET_SIZE(destinations);
  if (PyTuple_GET_SIZE(sources) != count) return {};
  std::vector<Cast> casts;
  casts.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *const to = PyTuple_GET_ITEM(destinations, i), *const from = PyTuple_GET_ITEM(sources, i);
    if (!is_tensor(to) || !is_tensor(from)) return {};
    const Tensor &destination = THPVariable_Unpack(to), &source = THPVariable_Unpack(from);
    if (!is_castable(destination) || !is_castable(source) || destination.sizes() != source.sizes()) return {};
    casts.push_back({destination.mutable_data_ptr(), source.const_data_ptr(), source.numel(), destination.scalar_type(),
                     source.scalar_type()});
  }
  return casts;
}

// Whether all tensors lie apart. Sources may share memory: that is for Python to find out.
bool lie_apart(const std::vector<Cast>& casts) {
  std::vector<std::pair<const char*, const char*>> spans;
  spans.reserve(2 * casts.size());
  for (const Cast& cast : casts) {
    if (cast.numel == 0) continue;
    for (const auto& [at, type] :
         {std::pair<const void*, ScalarType>{cast.to, cast.to_type}, {cast.from, cast.from_type}}) {
      const char* const begin = static_cast<const char*>(at);
      spans.emplace_back(begin, begin + cast.numel * static_cast<int64_t>(c10::elementSize(type)));
    }
  }
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
  // Tuples keep the tensors alive while others run.
  const auto destinations = py::reinterpret_steal<py::object>(PySequence_Tuple(args[0])),
             sources = py::reinterpret_steal<py::object>(PySequence_Tuple(args[1]));
  const std::vector<Cast> casts = casts_of(destinations.ptr(), sources.ptr());
  if (casts.empty() || !lie_apart(casts)) Py_RETURN_NONE;
  {
    const py::gil_scoped_release no_gil;
    RECORD_FUNCTION("amp_kernels::cast_", c10::ArrayRef<const c10::IValue>{});
    cast_call(casts);
  }
  for (size_t i = 0; i < casts.size(); ++i) {
    const Tensor& written = THPVariable_Unpack(PyTuple_GET_ITEM(destinations.ptr(), static_cast<Py_ssize_t>(i)));
    if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
