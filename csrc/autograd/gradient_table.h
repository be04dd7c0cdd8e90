// Functions of the Python module _nodes for the loops of a step over all its tensors; see gradient_table.cpp.
#pragma once
#include <Python.h>

namespace ak {

/// remember_tensors(params, grads): a capsule with what the tensors are and where the parameters lie.
PyObject* remember_tensors(PyObject*, PyObject* const* args, Py_ssize_t count);

/// refresh_addresses(capsule, params, words, begin, stride): the addresses of the gradients of now into
/// words[begin::stride], a writable buffer of int64, and True; False if a parameter or gradient is not what was
/// remembered.
PyObject* refresh_addresses(PyObject*, PyObject* const* args, Py_ssize_t count);

/// same_objects(first, second): whether two lists or tuples hold the same objects.
PyObject* same_objects(PyObject*, PyObject* const* args, Py_ssize_t count);

/// same_versions(tensors, words), note_versions(tensors, words): whether a buffer of int64 holds the version counters
/// of a list of tensors, one by one; write them into it. Raises for an inference tensor, which has none.
PyObject* same_versions(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* note_versions(PyObject*, PyObject* const* args, Py_ssize_t count);

/// bump_versions(tensors): torch.autograd.graph.increment_version of a list.
PyObject* bump_versions(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace ak
