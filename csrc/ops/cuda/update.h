// What adamw_ and sgd_ share on CUDA: from the arguments of the op to those of the kernels (kernels/update.h).
#pragma once

#include <vector>

#include "kernels/update.h"
#include "ops/cuda/arguments.h"
#include "ops/update_arguments.h"

namespace ak {

inline ParamState param_state(const UpdateParam& p) {
  ParamState s{};
  s.param = p.param.data;
  s.grad = p.grad.data;
  s.numel = p.numel;
  s.param_dtype = dtype_of(p.param.dtype);
  s.grad_dtype = dtype_of(p.grad.dtype);
  for (int m = 0; m < 2; ++m) {
    s.moments[m] = p.moments[m].data;
    s.moment_dtypes[m] = dtype_of(p.moments[m].dtype);
  }
  s.step = p.step;
  s.master_kind = !p.master.data                        ? Master::kNone
                  : p.master.dtype == ScalarType::Short ? Master::kSplit
                                                        : Master::kFloat32;
  s.master = p.master.data;
  s.shadow = p.shadow.data;
  s.shadow_dtype = dtype_of(p.shadow.dtype);
  s.group = static_cast<int>(p.group);
  return s;
}

// check_update_arguments for memory of the call's device.
inline std::vector<ParamState> check_update(const CudaCall& call, const UpdateTensors& t, size_t groups) {
  std::vector<ParamState> states;
  states.reserve(t.params.size());
  for (const UpdateParam& p :
       check_update_arguments(t, static_cast<int64_t>(groups),
                              [&](ArgName name, const Tensor& tensor) { call.check_place(name, tensor); })) {
    states.push_back(param_state(p));
  }
  return states;
}

template <typename Options>
ParamGroup<Options> param_group(const Options& options, const TensorList& lrs, size_t group, int64_t flags) {
  return {options, lrs.empty() ? nullptr : static_cast<const float*>(lrs[group].const_data_ptr()),
          (flags & kMaximize) != 0};
}

inline StepDecisions step_decisions(const CudaCall& call, const UpdateTensors& t, double max_norm) {
  return {call.scalar({"grad_scale"}, t.grad_scale), call.scalar({"found_inf"}, t.found_inf),
          call.scalar({"sum_sq"}, t.sum_sq), static_cast<float>(max_norm)};
}

}  // namespace ak
