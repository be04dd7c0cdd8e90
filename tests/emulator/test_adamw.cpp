// adamw_ on the emulator: models of all kinds of parameters against math/adamw.h.
#include "kernels/adamw.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct AdamW {
  using Rule = AdamWRule;

  static AdamWOptions options(int group) {
    const double weight_decay[] = {0.0, 0.1, 0.05};
    return {0.01 * (group + 1), 0.9 - 0.1 * group, 0.999 - 0.01 * group, 1e-8, weight_decay[group], group == 2};
  }
  static bool has_moments(Rng&) { return true; }
  static float moment(Rng& rng, int which) {
    return which == 0 ? symmetric(rng, 0.5f) : static_cast<float>(uniform(rng));
  }
  static float moment_at_step_0(float value) { return value; }
  static AdamWScalars scalars(const AdamWOptions& options, float step) { return adamw_scalars(options, step); }
  static void step(float& weight, float* moments, float grad, const AdamWScalars& scalars) {
    adamw(weight, moments[0], moments[1], grad, scalars);
  }
  static Status shipped(std::span<const ParamState> states, std::span<const AdamWGroup> groups,
                        const StepDecisions& decisions, void* rows) {
    return adamw(states, groups, decisions, rows, nullptr);
  }
};

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("adamw", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::AdamW>(cases);
  return cases.finish();
}
