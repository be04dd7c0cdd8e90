// A plain call is one that the kernels serve directly: eager, on dense tensors of no subclass, with no mode, transform,
// tracer or backend of the user's choice between it and the kernels. Norms, cross-entropy and casts must be on the CPU;
// products (linear.cpp) may also be on a GPU that the CUDA kernels serve. This header says which calls are
// plain, and holds what the functions share.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>

#include "base/scalar_type.h"

namespace ak {

namespace py = pybind11;
using at::Tensor;
using torch::autograd::SavedVariable;

inline std::atomic<int> refusals{0};   // open blocks in which no call is plain, such as those of a chosen backend
inline std::atomic<uint64_t> gpus{0};  // a bit for each one whose products the policy gives to the CUDA kernels

inline bool is_narrow(ScalarType type) { return is_half(type) || type == ScalarType::Float; }

inline bool nothing_between() {
  static constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode};
  const char* backend = std::getenv("AMP_KERNELS_BACKEND");
  return refusals == 0 && !(backend && *backend) && !at::globalContext().deterministicAlgorithms() &&
         !c10::impl::dispatch_mode_enabled() && at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         (c10::impl::tls_local_dispatch_key_set().included_ & kTransforms).empty() && !torch::jit::tracer::isTracing();
}

// True if products on the device are those of the kernels.
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

// A plain tensor of fp16, bf16 or fp32 on the CPU.
inline bool is_narrow_on_cpu(const Tensor& t) { return t.is_cpu() && is_plain(t) && is_narrow(t.scalar_type()); }

// True if the gradient is wanted in the dtype of `parameter`: a leaf may ask for another one.
inline bool has_own_grad_dtype(const Tensor& parameter) {
  if (!is_half(parameter.scalar_type()) || !parameter.requires_grad() || !parameter.is_leaf()) return true;
  return parameter.grad_dtype() == parameter.scalar_type();
}

// True if a function of rows of `x` may be plain; asked before anything that takes time.
inline bool is_plain_input(const Tensor& x) {
  return is_narrow_on_cpu(x) && nothing_between() && has_own_grad_dtype(x);
}

// True if autograd records a function of these.
template <typename... Tensors>
bool is_recorded(const Tensors&... inputs) {
  return torch::autograd::GradMode::is_enabled() && ((inputs.defined() && inputs.requires_grad()) || ...);
}

// The dtype of a result on the CPU: autocast's if that is on, else `own`.
inline ScalarType result_type(ScalarType own) {
  return at::autocast::is_autocast_enabled(at::kCPU) ? at::autocast::get_autocast_dtype(at::kCPU) : own;
}

// ---- memory

// An uninitialised contiguous tensor on the CPU.
inline Tensor empty_cpu(at::IntArrayRef sizes, ScalarType type) {
  return at::detail::empty_cpu(sizes, type, /*pin_memory=*/false, /*memory_format_opt=*/std::nullopt);
}

// `t` itself if it is contiguous, else a contiguous copy, neither recorded nor cast.
inline c10::MaybeOwned<Tensor> dense(const Tensor& t) {
  if (!t.defined() || t.is_contiguous()) return c10::MaybeOwned<Tensor>::borrowed(t);
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return c10::MaybeOwned<Tensor>::owned(t.contiguous());
}

inline const void* address_of(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
inline DType type_of(const Tensor& t) { return t.defined() ? dtype_of(t.scalar_type()) : DType::kFloat32; }

// fp32 numbers that a kernel leaves for its backward: a tensor if there will be one, else memory of this call.
// Allocated after the result: if nothing lay after a large result, malloc would return it to the system page by page.
class RowNumbers {
 public:
  RowNumbers(bool kept, at::IntArrayRef sizes) {
    if (kept) {
      tensor_ = empty_cpu(sizes, ScalarType::Float);
    } else {
      own_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(c10::multiply_integers(sizes)));
    }
  }
  float* data() const { return own_ ? own_.get() : static_cast<float*>(tensor_.mutable_data_ptr()); }
  const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_;
  std::unique_ptr<float[]> own_;
};

// ---- Python

// A public function with nodes: its key in FORMULAS (amp_kernels/_dispatch/nodes.py), and its name in a graph.
struct Function {
  const char *key, *name;
  PyObject* backward = nullptr;  // the formula; lives as long as the interpreter
};
inline Function linear_function{"linear", "_LinearBackward"}, matmul_function{"matmul", "MatmulBackward"},
    norm_function{"norm", "_NormBackward"}, cross_entropy_function{"cross_entropy", "_CrossEntropyBackward"};
inline Function* const functions[] = {&linear_function, &matmul_function, &norm_function, &cross_entropy_function};

inline bool is_tensor(PyObject* object) { return THPVariable_CheckExact(object); }
inline bool is_tensor_or_none(PyObject* object) { return object == Py_None || is_tensor(object); }
inline std::optional<Tensor> optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : std::optional<Tensor>(THPVariable_Unpack(object));
}

// A function of rows of at most so many elements takes microseconds. It keeps the interpreter's lock: giving it up and
// taking it back costs as much as the kernel of a small tensor.
inline constexpr int64_t kBriefly = 8192;

// The result of `run`, without the interpreter's lock unless it runs briefly; None if it is undefined or throws: the
// Python function then says what is wrong. An exception of a hook of saved tensors propagates: torch.utils.checkpoint
// ends its second forward with one.
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

}  // namespace ak
