// When a call of the module _nodes is plain (nodes.cpp), and the Python formulas behind its nodes.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdlib>
#include <optional>

namespace ak {

namespace py = pybind11;
using at::ScalarType;
using at::Tensor;
using torch::autograd::SavedVariable;

inline std::atomic<int> refusals{0};   // blocks in which no call is plain, such as those of a chosen backend
inline std::atomic<uint64_t> gpus{0};  // a bit for each one whose products the policy gives to the CUDA kernels

inline bool is_half(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }
inline bool is_narrow(ScalarType type) { return is_half(type) || type == ScalarType::Float; }

inline bool nothing_between() {
  static constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode};
  const char* backend = std::getenv("AMP_KERNELS_BACKEND");
  return refusals == 0 && !(backend && *backend) && !at::globalContext().deterministicAlgorithms() &&
         !c10::impl::dispatch_mode_enabled() && at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         (c10::impl::tls_local_dispatch_key_set().included_ & kTransforms).empty() && !torch::jit::tracer::isTracing();
}

// An uninitialised contiguous tensor on the CPU.
inline Tensor empty_cpu(at::IntArrayRef sizes, ScalarType type) {
  return at::detail::empty_cpu(sizes, type, /*pin_memory=*/false, /*memory_format_opt=*/std::nullopt);
}

// Whether products there are those of the kernels.
inline bool is_served(const at::Device& device) {
  return device.is_cpu() || (device.is_cuda() && device.index() < 64 && (gpus >> device.index() & 1));
}

// A tensor as the kernels know it: not sparse, quantised, nested, conjugate, wrapped, fake.
inline bool is_plain(const Tensor& t) {
  using Key = c10::DispatchKey;
  static constexpr c10::DispatchKeySet kOnCpu{Key::CPU, Key::ADInplaceOrView, Key::AutogradCPU, Key::AutocastCPU};
  static constexpr c10::DispatchKeySet kOnGpu{Key::CUDA, Key::ADInplaceOrView, Key::AutogradCUDA, Key::AutocastCUDA};
  const c10::DispatchKeySet plain = t.device().is_cuda() ? kOnGpu : kOnCpu;
  return (t.key_set() | plain) == plain && t.layout() == at::kStrided;
}

// Whether a gradient is wanted in the dtype of `parameter`: a leaf may ask for another one.
inline bool has_own_grad_dtype(const Tensor& parameter) {
  if (!is_half(parameter.scalar_type()) || !parameter.requires_grad() || !parameter.is_leaf()) return true;
  return parameter.grad_dtype() == parameter.scalar_type();
}

// Which public function a node is of: its key in FORMULAS, and its name in a graph.
struct Function {
  const char *key, *name;
  PyObject* backward = nullptr;  // the Python backward, for what is not plain; lives as long as the interpreter
};
inline Function linear_function{"linear", "_LinearBackward"}, matmul_function{"matmul", "MatmulBackward"},
    norm_function{"norm", "_NormBackward"}, softmax_function{"softmax", "_SoftmaxBackward"},
    cross_entropy_function{"cross_entropy", "_CrossEntropyBackward"};
inline Function* const functions[] = {&linear_function, &matmul_function, &norm_function, &softmax_function,
                                      &cross_entropy_function};

// ---- Python

inline bool is_tensor(PyObject* object) { return THPVariable_CheckExact(object); }
inline bool is_tensor_or_none(PyObject* object) { return object == Py_None || is_tensor(object); }
inline std::optional<Tensor> optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : std::optional<Tensor>(THPVariable_Unpack(object));
}

// A function of rows of at most so many elements takes some microseconds. It keeps the interpreter's lock: to give that
// up and take it back costs as much as the kernel of a small tensor.
inline constexpr int64_t kBriefly = 8192;

// What `run` returns, without the interpreter's lock unless it runs briefly; None where that is undefined or throws:
// the Python function says what is wrong. But what a hook of saved tensors raises goes on: torch.utils.checkpoint ends
// its second forward so.
template <typename Run>
PyObject* wrapped_or_none(const Run& run, bool briefly = false) {
  Tensor out;
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (!briefly) no_gil.emplace();
    try {
      out = run();
    } catch (const python_error&) {
      throw;
    } catch (const std::exception&) {
    }
  }
  if (!out.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(out));
}

// None as a tensor that is not defined.
inline py::tuple objects_of(const std::vector<Tensor>& tensors) {
  py::tuple all(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) all[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::none();
  return all;
}

}  // namespace ak
