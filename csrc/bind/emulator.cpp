// _emulator: CUDA kernels of the package on CPU memory, checked by the emulator (csrc/emulator). No torch header: the
// Python side (amp_kernels/_emulate) passes addresses, and says which bytes exist; a kernel that touches others is an
// error.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind/emulated_gemm.h"
#include "bind/emulated_memory.h"
#include "emulator/memory.h"
#include "kernels/adamw.cu"
#include "kernels/check_and_norm.cu"
#include "kernels/lamb.cu"
#include "kernels/lion.cu"
#include "kernels/sgd.cu"
#include "kernels/unscale.cu"
#include "kernels/update_scale.cu"

namespace py = pybind11;

namespace ak {
namespace {

void set_options(uint64_t seed, int sm_count, bool truncate_mma) {
  emu::options() = {};
  emu::options().seed = seed;
  emu::options().sm_count = sm_count;
  emu::options().truncate_mma = truncate_mma;
}

using Grad = std::tuple<Address, int64_t, int>;  // address, numel, DType

void run_check_and_norm(const std::vector<Piece>& memory, const std::vector<Grad>& grads, Address grad_scale,
                        Address norms, Address found_infs, bool largest, bool per_tensor) {
  const Visible visible(memory);
  std::vector<GradRef> refs;
  for (const auto& [data, numel, dtype] : grads) refs.push_back({at<void>(data), numel, static_cast<DType>(dtype)});
  const size_t bytes = per_tensor ? check_and_norm_per_tensor_scratch_bytes(refs) : check_and_norm_scratch_bytes(refs);
  emu::Buffer<uint64_t> scratch("scratch", (bytes + 7) / 8);
  if (!per_tensor) {
    for (size_t i = 0; i < kNormScratchZeroed / 8; i++) scratch.set(i, 0);
  }
  const auto run = per_tensor ? check_and_norm_per_tensor : check_and_norm;
  check(run(refs, at<float>(grad_scale), largest ? Norm::kLargest : Norm::kSumOfSquares, scratch.data(),
            at<float>(norms), at<float>(found_infs), nullptr));
}

void run_unscale(const std::vector<Piece>& memory, const std::vector<Grad>& grads, Address found_inf,
                 Address inv_scale) {
  const Visible visible(memory);
  std::vector<MutableGradRef> refs;
  for (const auto& [data, numel, dtype] : grads) refs.push_back({at<void>(data), numel, static_cast<DType>(dtype)});
  check(unscale(refs, at<float>(found_inf), at<float>(inv_scale), nullptr));
}

void run_update_scale(const std::vector<Piece>& memory, Address scale, Address growth_tracker,
                      Address hysteresis_tracker, const std::vector<Address>& found_infs,
                      const LossScaleOptions& options) {
  const Visible visible(memory);
  std::vector<const float*> found;
  for (Address a : found_infs) found.push_back(at<const float>(a));
  emu::Buffer<uint64_t> scratch("scratch", (update_scale_scratch_bytes(found.size()) + 7) / 8);
  const LossScaleRef ref{at<float>(scale), at<int32_t>(growth_tracker), at<int32_t>(hysteresis_tracker)};
  check(update_scale(ref, found, options, scratch.data(), nullptr));
}

/// A parameter, set up step by step from Python.
struct Param {
  ParamState state{};

  Param(Address param, int param_dtype, Address grad, int grad_dtype, int64_t numel, Address step, int group) {
    state.param = at<void>(param);
    state.param_dtype = static_cast<DType>(param_dtype);
    state.grad = at<void>(grad);
    state.grad_dtype = static_cast<DType>(grad_dtype);
    state.numel = numel;
    state.step = at<float>(step);
    state.group = group;
  }
  void set_moment(int which, Address data, int dtype) {
    state.moments[which] = at<void>(data);
    state.moment_dtypes[which] = static_cast<DType>(dtype);
  }
  void set_master(Address data, bool split) {
    state.master = at<void>(data);
    state.master_kind = split ? Master::kSplit : Master::kFloat32;
  }
  void set_shadow(Address data, int dtype) {
    state.shadow = at<void>(data);
    state.shadow_dtype = static_cast<DType>(dtype);
  }
  void set_ema(Address data) { state.ema = at<float>(data); }
  void set_stochastic(uint32_t index) {
    state.stochastic = true;
    state.index = index;
  }
};

/// Runs one of the update kernels: `run(params, groups, decisions, scratch, stream)` is its launcher.
template <class Group, class ScratchBytes, class Run>
void run_update(const std::vector<Piece>& memory, const std::vector<Param>& params, const std::vector<Group>& groups,
                const std::tuple<Address, Address, Address, double>& decided, int64_t seed, ScratchBytes scratch_bytes,
                Run run) {
  const Visible visible(memory);
  std::vector<ParamState> states;
  for (const Param& p : params) states.push_back(p.state);
  const auto& [grad_scale, found_inf, sum_sq, max_norm] = decided;
  const StepDecisions decisions{at<float>(grad_scale), at<float>(found_inf), at<float>(sum_sq),
                                static_cast<float>(max_norm)};
  emu::Buffer<uint64_t> scratch("scratch", (scratch_bytes(states) + 7) / 8);
  check(run(std::span<const ParamState>(states), std::span<const Group>(groups), decisions, static_cast<uint64_t>(seed),
            scratch.data(), nullptr));
}

}  // namespace
}  // namespace ak

PYBIND11_MODULE(_emulator, m) {
  using namespace ak;
  m.doc() = "CUDA kernels of amp_kernels on CPU memory, checked by the emulator. Addresses are integers; 0 is null.";
  m.def("set_options", &set_options, py::arg("seed") = 0, py::arg("sm_count") = 2, py::arg("truncate_mma") = false);
  bind_gemm(m);
  m.def("check_and_norm", &run_check_and_norm);
  m.def("unscale", &run_unscale);
  m.def("update_scale", [](const std::vector<Piece>& memory, Address scale, Address growth, Address hysteresis,
                           const std::vector<Address>& found_infs, double growth_factor, double backoff_factor,
                           int64_t growth_interval, double min_scale, double max_scale, int64_t hysteresis_steps) {
    run_update_scale(memory, scale, growth, hysteresis, found_infs,
                     {growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis_steps});
  });

  py::class_<Param>(m, "Param")
      .def(py::init<Address, int, Address, int, int64_t, Address, int>())
      .def("set_moment", &Param::set_moment)
      .def("set_master", &Param::set_master)
      .def("set_shadow", &Param::set_shadow)
      .def("set_ema", &Param::set_ema)
      .def("set_stochastic", &Param::set_stochastic);
  py::class_<AdamWGroup>(m, "AdamWGroup")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, bool coupled,
                       Address lr_at, bool maximize, double ema_decay) {
        return AdamWGroup{{lr, beta1, beta2, eps, weight_decay, coupled}, at<float>(lr_at), maximize, ema_decay};
      }));
  py::class_<SgdGroup>(m, "SgdGroup")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay, bool nesterov, Address lr_at,
                       bool maximize, double ema_decay) {
        return SgdGroup{{lr, momentum, dampening, weight_decay, nesterov}, at<float>(lr_at), maximize, ema_decay};
      }));
  py::class_<LionGroup>(m, "LionGroup")
      .def(py::init([](double lr, double beta1, double beta2, double weight_decay, Address lr_at, bool maximize,
                       double ema_decay) {
        return LionGroup{{lr, beta1, beta2, weight_decay}, at<float>(lr_at), maximize, ema_decay};
      }));
  py::class_<LambGroup>(m, "LambGroup")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, bool bias_correction,
                       bool adapt_all, Address lr_at, bool maximize, double ema_decay) {
        return LambGroup{
            {lr, beta1, beta2, eps, weight_decay, bias_correction, adapt_all}, at<float>(lr_at), maximize, ema_decay};
      }));
  using Decided = std::tuple<Address, Address, Address, double>;
  m.def("adamw", [](const std::vector<Piece>& memory, const std::vector<Param>& params,
                    const std::vector<AdamWGroup>& groups, const Decided& decided, int64_t seed) {
    run_update(memory, params, groups, decided, seed, adamw_scratch_bytes,
               [](auto... arguments) { return adamw(arguments...); });
  });
  m.def("sgd", [](const std::vector<Piece>& memory, const std::vector<Param>& params,
                  const std::vector<SgdGroup>& groups, const Decided& decided, int64_t seed) {
    run_update(memory, params, groups, decided, seed, sgd_scratch_bytes,
               [](auto... arguments) { return sgd(arguments...); });
  });
  m.def("lion", [](const std::vector<Piece>& memory, const std::vector<Param>& params,
                   const std::vector<LionGroup>& groups, const Decided& decided, int64_t seed) {
    run_update(memory, params, groups, decided, seed, lion_scratch_bytes,
               [](auto... arguments) { return lion(arguments...); });
  });
  m.def("lamb", [](const std::vector<Piece>& memory, const std::vector<Param>& params,
                   const std::vector<LambGroup>& groups, const Decided& decided, int64_t seed) {
    run_update(memory, params, groups, decided, seed, lamb_scratch_bytes,
               [](auto... arguments) { return lamb(arguments...); });
  });
}
