// The Python module _nodes: the ops of functions.h in C++ for plain calls, autograd nodes included.
//
// It is optional. torch's C++ interface changes between versions, so the module is compiled against the installed torch
// and loaded by that version alone (amp_kernels/_dispatch/nodes.py). It saves host time: node and checks of a call cost
// 15 us in Python and 3 us here, most of the cost of a small layer on a CPU, and on a GPU that waits for its host.
// The Python functions in amp_kernels/ops are the specification.
#include "autograd/functions.h"
#include "autograd/plain.h"

namespace ak {
namespace {

// bind(name, formula)
PyObject* bind(PyObject*, PyObject* const* args, Py_ssize_t) {
  for (Function* function : functions) {
    if (PyUnicode_CompareWithASCIIString(args[0], function->key) == 0) function->backward = Py_NewRef(args[1]);
  }
  Py_RETURN_NONE;
}

// refuse(+1), refuse(-1). A count, since blocks may end in any order.
PyObject* refuse(PyObject*, PyObject* change) {
  refusals += static_cast<int>(PyLong_AsLong(change));
  Py_RETURN_NONE;
}

// serve_gpu(index)
PyObject* serve_gpu(PyObject*, PyObject* index) {
  const long number = PyLong_AsLong(index);
  if (0 <= number && number < 64) gpus |= uint64_t{1} << number;
  Py_RETURN_NONE;
}

PyMethodDef fast(const char* name, FastCall function, const char* doc = "See csrc/autograd/functions.h.") {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, doc};
}

PyMethodDef methods[] = {
    fast("linear", linear),
    fast("matmul", matmul),
    fast("norm", norm),
    fast("cross_entropy", cross_entropy),
    fast("cast_lists", cast_lists),
    fast("remember_tensors", remember_tensors),
    fast("refresh_addresses", refresh_addresses),
    fast("bind_call", bind_call),
    fast("call_bound", call_bound),
    fast("same_objects", same_objects),
    fast("same_versions", same_versions),
    fast("note_versions", note_versions),
    fast("bump_versions", bump_versions),
    fast("bind", bind, "bind(name, formula): sets the Python backward of a function's nodes."),
    {"refuse", refuse, METH_O, "refuse(+1 or -1): begins or ends a block in which no call is plain."},
    {"serve_gpu", serve_gpu, METH_O, "serve_gpu(index): from now on products on this CUDA device may be plain."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module{PyModuleDef_HEAD_INIT, "_nodes", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ak

PyMODINIT_FUNC PyInit__nodes() { return PyModule_Create(&ak::module); }
