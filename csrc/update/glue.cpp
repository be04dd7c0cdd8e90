// The update ops on a GPU: checks, scratch and launch of a step of any rule.
#include <vector>

#include "base/op_call.h"
#include "update/call.h"
#include "update/rules.h"

namespace ak {
namespace {

// The parameters with their state, checked and shown to the emulator.
template <typename Rule>
std::vector<Param> params_on_gpu(OpCall& gpu, const UpdateCall& call) {
  std::vector<Param> params =
      checked_params<Rule>(call, [&](ArgName name, const Tensor& tensor) { gpu.check_place(name, tensor); });
  const auto write = [&](const char* name, const TensorList& buffers) {
    for (size_t b = 0; b < buffers.size(); ++b) gpu.write({name, static_cast<int64_t>(b)}, buffers[b]);
  };
  write("moments", call.moments);
  write("steps", call.steps);
  write("masters", call.masters);
  write("shadows", call.shadows);
  write("emas", call.emas);
  int64_t i = 0;
  for (const Param& p : params) {
    gpu.reach({"params", i}, p.param, p.numel * bytes_of(p.param_dtype), true);
    gpu.reach({"grads", i++}, p.grad, p.numel * bytes_of(p.grad_dtype), false);
  }
  return params;
}

template <typename Rule>
std::vector<ParamGroup<typename Rule::Options>> groups_on_gpu(OpCall& gpu, const UpdateCall& call) {
  std::vector<ParamGroup<typename Rule::Options>> groups;
  groups.reserve(call.flags.size());
  for (size_t g = 0; g < call.flags.size(); ++g) {
    const int64_t i = static_cast<int64_t>(g);
    const float* lr = call.lrs.empty() ? nullptr : gpu.scalar({"lrs", i}, call.lrs[g]);
    const void* decay = call.weight_decays.empty() ? nullptr : gpu.read({"weight_decays", i}, call.weight_decays[g]);
    groups.push_back({call.options_of<Rule>(g), lr, static_cast<const double*>(decay), (call.flags[g] & kMaximize) != 0,
                      call.ema_decay[g]});
  }
  return groups;
}

template <typename Rule>
void take_step(const UpdateCall& call) {
  const TensorList& first = call.table ? call.steps : call.params;  // the device of a table's addresses is unknown
  if (first.empty()) return;
  OpCall gpu(call.op(), {call.table ? "steps" : "params", 0}, first[0]);
  const std::vector<Param> params = params_on_gpu<Rule>(gpu, call);
  const auto groups = groups_on_gpu<Rule>(gpu, call);
  const StepDecisions decisions{gpu.scalar({"grad_scale"}, call.grad_scale), gpu.scalar({"found_inf"}, call.found_inf),
                                gpu.scalar({"sum_sq"}, call.sum_sq), gpu.read<float>({"factors"}, call.factors),
                                static_cast<float>(call.max_norm)};
  if (call.squares) gpu.write({"squares"}, *call.squares);
  void* const scratch = gpu.scratch(update_scratch_bytes<Rule>(params));
  gpu.launch(update<Rule>, params, groups, decisions, static_cast<uint64_t>(call.seed), scratch, call.half());
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  ak::for_each_rule([&]<typename Rule>(Rule) { ak::register_update<Rule, ak::take_step<Rule>>(m); });
}
