// The host's work for each parameter of a cached step (CachedStep in amp_kernels/optim/_launches.py): check that
// parameter and gradient are unchanged, and note the gradient's address.
//
// Python would ask for each gradient's Python object, which torch creates where nobody holds one, and look at every
// tensor five times; with thousands of small tensors that is most of a step. Here one walk looks at the C++ objects
// alone. They are scattered in memory, half a dozen cache lines a parameter, and each address is found through
// the one before: so a block of parameters is walked in stages, for the misses of one stage to overlap.
#include "autograd/functions.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace ak {
namespace {

using at::Tensor;
using at::TensorImpl;

constexpr char kCapsule[] = "amp_kernels.tensors";
constexpr size_t kBlock = 32;

const Tensor& tensor(PyObject* list, size_t i) {
  return THPVariable_Unpack(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)));
}

// Everything but the address that decides how a kernel reads a tensor.
struct Form {
  c10::DispatchKeySet keys;  // layout, device type, and whether memory says all (no negated view, no subclass)
  c10::Device device;
  c10::ScalarType dtype;
  size_t extents;  // place of sizes, then strides
  int64_t dim;
};

// Owns no tensor: Python's garbage collector could not see that, and a parameter may reach its optimizer.
struct Known {
  std::vector<const void*> addresses;
  std::vector<Form> forms;  // of parameter and gradient in turn
  std::vector<int64_t> extents;

  void remember(const Tensor& t) {
    forms.push_back({t.key_set(), t.device(), t.scalar_type(), extents.size(), t.dim()});
    extents.insert(extents.end(), t.sizes().begin(), t.sizes().end());
    extents.insert(extents.end(), t.strides().begin(), t.strides().end());
  }

  bool has_form(const TensorImpl& t, const Form& form) const {
    if (t.key_set() != form.keys || t.dtype() != c10::scalarTypeToTypeMeta(form.dtype) || t.dim() != form.dim ||
        t.device() != form.device)
      return false;
    const int64_t* expected = extents.data() + form.extents;
    return std::equal(t.sizes().begin(), t.sizes().end(), expected) &&
           std::equal(t.strides().begin(), t.strides().end(), expected + form.dim);
  }

  // The gradients are those of the parameters, or `given`, a list. With a mask a parameter may be without: one whose
  // byte is 0, or has no gradient, which sets the byte to 0, gets no address and, in the word after it, no elements.
  bool refresh(PyObject* list, PyObject* given, int64_t* words, size_t stride, char* mask) const {
    TensorImpl* params[kBlock];
    const TensorImpl* grads[kBlock];
    const size_t count = addresses.size();
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t end = std::min(begin + kBlock, count);
      for (size_t i = begin; i < end; i++) params[i - begin] = tensor(list, i).unsafeGetTensorImpl();
      for (size_t i = begin; i < end; i++) {
        if (!has_form(*params[i - begin], forms[2 * i])) return false;
        if (given != Py_None && !THPVariable_Check(PyList_GET_ITEM(given, static_cast<Py_ssize_t>(i)))) return false;
        const Tensor& grad = given == Py_None ? params[i - begin]->grad() : tensor(given, i);
        grads[i - begin] = grad.unsafeGetTensorImpl();
        if (mask != nullptr && !grad.defined()) mask[i] = 0;
      }
      for (size_t i = begin; i < end; i++) {
        if ((mask == nullptr || mask[i] != 0) && !has_form(*grads[i - begin], forms[2 * i + 1])) return false;
        if (params[i - begin]->mutable_data() != addresses[i]) return false;
      }
      for (size_t i = begin; i < end; i++) {
        const bool there = mask == nullptr || mask[i] != 0;
        words[i * stride] = there ? reinterpret_cast<int64_t>(grads[i - begin]->data()) : 0;
        if (mask != nullptr) words[i * stride + 1] = there ? params[i - begin]->numel() : 0;
      }
    }
    return true;
  }
};

// The version counters of a list of tensors, each of which has one.
std::vector<int64_t> versions(PyObject* list) {
  std::vector<int64_t> found(static_cast<size_t>(PyList_GET_SIZE(list)));
  for (size_t i = 0; i < found.size(); i++)
    found[i] = tensor(list, i).unsafeGetTensorImpl()->version_counter().current_version();
  return found;
}

// True if `use` was given the elements of a buffer.
template <typename T = int64_t, typename Use>
bool with_words(PyObject* object, int flags, Use use) {
  Py_buffer words;
  if (PyObject_GetBuffer(object, &words, flags) != 0) return false;
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&words, PyBuffer_Release);
  use(static_cast<T*>(words.buf), static_cast<size_t>(words.len) / sizeof(T));
  return true;
}

// A call of an op whose arguments are converted once, but for a list of numbers. Owns tensors, from which no Python
// object can be reached.
struct BoundCall {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  size_t changing;
};
constexpr char kCall[] = "amp_kernels.call";

c10::IValue value_of(PyObject* x, const c10::Type& type);

template <typename T>
c10::IValue list_of(PyObject* list, const c10::TypePtr& type) {
  c10::List<T> values;
  const THPObjectPtr items(PySequence_Fast(list, "bind_call: an argument is no list"));
  if (!items) throw python_error();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); i++) {
    const c10::IValue value = value_of(PySequence_Fast_GET_ITEM(items.get(), i), *type);
    values.push_back(value.to<T>());
  }
  return values;
}

c10::IValue value_of(PyObject* x, const c10::Type& type) {
  if (x == Py_None) return {};
  if (THPVariable_Check(x)) return THPVariable_Unpack(x);
  if (type.kind() == c10::TypeKind::BoolType) return x == Py_True;
  if (type.kind() == c10::TypeKind::IntType) return static_cast<int64_t>(PyLong_AsLongLong(x));
  if (type.kind() == c10::TypeKind::FloatType) return PyFloat_AsDouble(x);
  const c10::TypePtr element = type.expectRef<c10::ListType>().getElementType();
  if (element->kind() == c10::TypeKind::TensorType) return list_of<Tensor>(x, element);
  if (element->kind() == c10::TypeKind::IntType) return list_of<int64_t>(x, element);
  return list_of<double>(x, element);
}

void drop_call(PyObject* capsule) { delete static_cast<BoundCall*>(PyCapsule_GetPointer(capsule, kCall)); }

void forget(PyObject* capsule) { delete static_cast<Known*>(PyCapsule_GetPointer(capsule, kCapsule)); }

}  // namespace

PyObject* remember_tensors(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto known = std::make_unique<Known>();
  for (size_t i = 0; i < static_cast<size_t>(PyList_GET_SIZE(args[0])); i++) {
    const Tensor& param = tensor(args[0], i);
    known->addresses.push_back(param.mutable_data_ptr());
    known->remember(param);
    known->remember(tensor(args[1], i));
  }
  return PyCapsule_New(known.release(), kCapsule, forget);
  END_HANDLE_TH_ERRORS
}

PyObject* refresh_addresses(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto* known = static_cast<const Known*>(PyCapsule_GetPointer(args[0], kCapsule));
  const size_t begin = PyLong_AsSize_t(args[4]), stride = PyLong_AsSize_t(args[5]);
  if (known == nullptr || PyErr_Occurred()) return nullptr;
  bool same = false;
  char* mask = nullptr;
  const auto refresh = [&](int64_t* words, size_t) {
    same = known->refresh(args[1], args[2], words + begin, stride, mask);
  };
  const auto masked = [&](char* bytes, size_t) {
    mask = bytes;
    with_words(args[3], PyBUF_WRITABLE, refresh);
  };
  if (count > 6)
    with_words<char>(args[6], PyBUF_WRITABLE, masked);
  else
    with_words(args[3], PyBUF_WRITABLE, refresh);
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

PyObject* bind_call(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto call = std::make_unique<BoundCall>(
      BoundCall{c10::Dispatcher::singleton().findSchemaOrThrow(PyUnicode_AsUTF8(args[0]), PyUnicode_AsUTF8(args[1])),
                {},
                PyLong_AsSize_t(args[3])});
  const auto& arguments = call->op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++)
    call->arguments.push_back(
        value_of(PyTuple_GetItem(args[2], static_cast<Py_ssize_t>(i)), *arguments[i].real_type()));
  if (PyErr_Occurred()) return nullptr;
  return PyCapsule_New(call.release(), kCall, drop_call);
  END_HANDLE_TH_ERRORS
}

PyObject* call_bound(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto* call = static_cast<const BoundCall*>(PyCapsule_GetPointer(args[0], kCall));
  if (call == nullptr) return nullptr;
  std::vector<c10::IValue> stack;
  for (const c10::IValue& value : call->arguments)  // the call takes lists apart
    stack.push_back(value.isList() ? c10::IValue(value.toList().copy()) : value);
  stack[call->changing] = list_of<double>(args[1], c10::FloatType::get());
  if (PyErr_Occurred()) return nullptr;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const std::unique_ptr<PyThreadState, void (*)(PyThreadState*)> unlocked(PyEval_SaveThread(), PyEval_RestoreThread);
    call->op.callBoxed(&stack);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* same_objects(PyObject*, PyObject* const* args, Py_ssize_t) {
  for (int i = 0; i < 2; i++) {
    if (!PyList_Check(args[i]) && !PyTuple_Check(args[i])) return PyErr_Format(PyExc_TypeError, "a list or tuple");
  }
  PyObject **const first = PySequence_Fast_ITEMS(args[0]), **const second = PySequence_Fast_ITEMS(args[1]);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(args[0]);
  return PyBool_FromLong(count == PySequence_Fast_GET_SIZE(args[1]) && std::equal(first, first + count, second));
}

PyObject* same_versions(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const std::vector<int64_t> now = versions(args[0]);
  bool same = false;
  const auto compare = [&](const int64_t* words, size_t count) {
    same = std::equal(now.begin(), now.end(), words, words + count);
  };
  return with_words(args[1], PyBUF_SIMPLE, compare) ? PyBool_FromLong(same) : nullptr;
  END_HANDLE_TH_ERRORS
}

PyObject* note_versions(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const std::vector<int64_t> now = versions(args[0]);
  const auto note = [&](int64_t* words, size_t count) {
    TORCH_CHECK(count == now.size(), "note_versions: ", now.size(), " tensors and ", count, " words");
    std::copy(now.begin(), now.end(), words);
  };
  if (!with_words(args[1], PyBUF_WRITABLE, note)) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* bump_versions(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const size_t count = static_cast<size_t>(PyList_GET_SIZE(args[0]));
  for (size_t i = 0; i < count; i++) {
    const Tensor& written = tensor(args[0], i);
    if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
