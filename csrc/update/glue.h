// A step of any rule (update/rule.h) on a GPU: from the arguments of the op to those of the kernels (update/update.h),
// and the call.
#pragma once

#include <vector>

#include "base/op_call.h"
#include "update/arguments.h"
#include "update/update.h"

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

// The parameters with their state, all checked, and named for the kernels.
template <typename Rule>
std::vector<ParamState> check_update(OpCall& call, const UpdateArguments& a) {
  const std::vector<UpdateParam> params =
      check_update_arguments<Rule>(a, [&](ArgName name, const Tensor& tensor) { call.check_place(name, tensor); });
  const auto reach = [&](const char* name, const TensorList& buffers) {
    for (size_t b = 0; b < buffers.size(); ++b) call.write({name, static_cast<int64_t>(b)}, buffers[b]);
  };
  reach("moments", a.moments);
  reach("steps", a.steps);
  reach("masters", a.masters);
  reach("shadows", a.shadows);
  reach("emas", a.emas);
  std::vector<ParamState> states;
  states.reserve(params.size());
  for (const UpdateParam& p : params) {
    const int64_t i = static_cast<int64_t>(states.size());
    states.push_back(param_state(p, (a.flags[static_cast<size_t>(p.group)] & kStochastic) != 0));
    call.reach({"params", i}, p.param.data, p.numel * bytes_of(states.back().param_dtype), true);
    call.reach({"grads", i}, p.grad.data, p.numel * bytes_of(states.back().grad_dtype), false);
  }
  return states;
}

// One step: checks, memory, launch.
template <typename Rule>
void take_step(const UpdateArguments& a) {
  const TensorList& first = a.table ? a.steps : a.params;  // an address does not tell its device
  if (first.empty()) return;
  OpCall call(a.op, {a.table ? "steps" : "params", 0}, first[0]);
  const std::vector<ParamState> states = check_update<Rule>(call, a);
  std::vector<ParamGroup<typename Rule::Options>> groups;
  groups.reserve(a.flags.size());
  for (size_t g = 0; g < a.flags.size(); ++g) {
    const int64_t i = static_cast<int64_t>(g);
    const float* lr = a.lrs.empty() ? nullptr : call.scalar({"lrs", i}, a.lrs[g]);
    const void* weight_decay = a.weight_decays.empty() ? nullptr : call.read({"weight_decays", i}, a.weight_decays[g]);
    groups.push_back({a.options_of<Rule>(g), lr, static_cast<const double*>(weight_decay),
                      (a.flags[g] & kMaximize) != 0, a.ema_decay[g]});
  }
  const StepDecisions decisions{call.scalar({"grad_scale"}, a.grad_scale), call.scalar({"found_inf"}, a.found_inf),
                                call.scalar({"sum_sq"}, a.sum_sq), static_cast<float>(a.max_norm)};
  StepHalf half{.second = a.second};
  if (a.squares) {
    call.write({"squares"}, *a.squares);
    half.squares = static_cast<double*>(a.squares->mutable_data_ptr());
  }
  void* const scratch = call.scratch(update_scratch_bytes<Rule>(states));
  call.launch(update<Rule>, states, groups, decisions, static_cast<uint64_t>(a.seed), scratch, half);
}

}  // namespace ak
