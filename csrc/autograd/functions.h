// The Python functions of the module _nodes. Those of an op return None, having done nothing, if the call is not plain
// (plain.h); the Python function of the same name then serves it.
#pragma once
#include <Python.h>

namespace ak {

using FastCall = PyObject*(PyObject*, PyObject* const* args, Py_ssize_t count);

/// linear(x, weight, bias, shadow, activation)
FastCall linear;
/// matmul(a, b)
FastCall matmul;
/// norm(x, shape, weight, bias, eps, centred, residual): the norm, or with a residual the pair of the norm and the sum.
FastCall norm;
/// cross_entropy(logits, target, ignore_index, reduction, label_smoothing, z_loss)
FastCall cross_entropy;
/// cast_lists(destinations, sources): True if it has cast.
FastCall cast_lists;

// ---- loops of an optimizer step over all its tensors (gradient_table.cpp)

/// remember_tensors(params, grads): a capsule with the metadata of the tensors and the addresses of the parameters.
FastCall remember_tensors;
/// refresh_addresses(capsule, params, grads, words, begin, stride[, mask]): writes the addresses of the gradients, a
/// list or None for those that the parameters have, into words[begin::stride], a writable buffer of int64. False if a
/// parameter or gradient differs from what was remembered. A mask, a writable buffer of a byte a parameter, says which
/// are to take part; the byte of one without a gradient becomes 0. The others get address 0 and, in the word after it,
/// 0 elements.
FastCall refresh_addresses;
/// bind_call(name, overload, arguments, changing): a capsule with a call of an op whose arguments, a tuple, are
/// converted once; number `changing` is a list of floats.
FastCall bind_call;
/// call_bound(capsule, floats): makes the call with these floats, below version counters and without the interpreter's
/// lock.
FastCall call_bound;
/// same_objects(first, second): whether two lists or tuples hold the same objects.
FastCall same_objects;
/// same_versions(tensors, words): whether a buffer of int64 holds the tensors' version counters. Raises for an
/// inference tensor, which has none.
FastCall same_versions;
/// note_versions(tensors, words): writes the version counters into a buffer of int64.
FastCall note_versions;
/// bump_versions(tensors): torch.autograd.graph.increment_version of a list, without its inference tensors.
FastCall bump_versions;

}  // namespace ak
