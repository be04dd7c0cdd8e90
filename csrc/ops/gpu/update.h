// What all updates share on a GPU: from the arguments of the op to those of the kernels (kernels/update.h), and the
// call.
#pragma once

#include <vector>

#include "kernels/update.h"
#include "ops/gpu/call.h"
#include "ops/update_arguments.h"

namespace ak {

static_assert(UpdateParam::kMaxMoments == kMaxMoments, "the kernels take as many moments as the ops");

inline ParamState param_state(const UpdateParam& p, bool stochastic) {
  ParamState s{};
  s.param = p.param.data;
  s.grad = p.grad.data;
  s.numel = p.numel;
  s.param_dtype = dtype_of(p.param.dtype);
  s.grad_dtype = dtype_of(p.grad.dtype);
  for (int m = 0; m < kMaxMoments; ++m) {
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
  s.ema = reinterpret_cast<float*>(p.ema.data);
  s.stochastic = stochastic;
  s.index = p.index;
  s.group = static_cast<int>(p.group);
  return s;
}

// check_update_arguments for memory of the call's device.
inline std::vector<ParamState> check_update(GpuCall& call, const UpdateTensors& t, const std::vector<int64_t>& flags) {
  const std::vector<UpdateParam> params =
      check_update_arguments(t, static_cast<int64_t>(flags.size()),
                             [&](ArgName name, const Tensor& tensor) { call.check_place(name, tensor); });
  const auto reach = [&](const char* name, const TensorList& buffers) {
    for (size_t b = 0; b < buffers.size(); ++b) call.write({name, static_cast<int64_t>(b)}, buffers[b]);
  };
  for (const MomentBuffers& m : t.moments) reach(m.name, *m.buffers);
  reach("steps", t.steps);
  reach("masters", t.masters);
  reach("shadows", t.shadows);
  reach("emas", t.emas);
  std::vector<ParamState> states;
  states.reserve(params.size());
  for (const UpdateParam& p : params) {
    const int64_t i = static_cast<int64_t>(states.size());
    states.push_back(param_state(p, (flags[static_cast<size_t>(p.group)] & kStochastic) != 0));
    call.reach({"params", i}, p.param.data, p.numel * bytes_of(states.back().param_dtype), true);
    call.reach({"grads", i}, p.grad.data, p.numel * bytes_of(states.back().grad_dtype), false);
  }
  return states;
}

inline StepDecisions step_decisions(GpuCall& call, const UpdateTensors& t, double max_norm) {
  return {call.scalar({"grad_scale"}, t.grad_scale), call.scalar({"found_inf"}, t.found_inf),
          call.scalar({"sum_sq"}, t.sum_sq), static_cast<float>(max_norm)};
}

// One step: checks, memory, launch. `options_of(group)` are the Options of a group, `scratch_bytes` and `launch` the
// functions of kernels/X.h.
template <typename Options, typename OptionsOf, typename ScratchBytes, typename Launch>
void take_step(const UpdateTensors& t, const UpdateNumbers& numbers, const OptionsOf& options_of,
               const ScratchBytes& scratch_bytes, const Launch& launch) {
  const bool table = has_table(t) && !t.steps.empty();
  if (t.params.empty() && !table) return;
  GpuCall call = table ? GpuCall(t.op, {"steps", 0}, t.steps[0]) : GpuCall(t.op, {"params", 0}, t.params[0]);
  const std::vector<int64_t>& flags = numbers.flags;
  const std::vector<ParamState> states = check_update(call, t, flags);
  std::vector<ParamGroup<Options>> groups;
  groups.reserve(flags.size());
  for (size_t g = 0; g < flags.size(); ++g) {
    const float* lr = t.lrs.empty() ? nullptr : call.scalar({"lrs", static_cast<int64_t>(g)}, t.lrs[g]);
    groups.push_back({options_of(g), lr, (flags[g] & kMaximize) != 0, numbers.ema_decay[g]});
  }
  const StepDecisions decisions = step_decisions(call, t, numbers.max_norm);
  const Tensor scratch = call.scratch(scratch_bytes(states));
  call.launch(launch, states, groups, decisions, static_cast<uint64_t>(numbers.seed), scratch.mutable_data_ptr());
}

}  // namespace ak
