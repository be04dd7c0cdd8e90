// lion_ on the emulator: models of all kinds of parameters against math/lion.h.
#include "kernels/lion.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct Lion {
  using Rule = LionRule;

  static LionOptions options(int group) {
    const double weight_decay[] = {0.0, 0.1, 0.5};
    return {0.01 * (group + 1), 0.9 - 0.1 * group, 0.99 - 0.01 * group, weight_decay[group]};
  }
  static int moments(Rng&, bool) { return 1; }
  static float moment(Rng& rng, int) { return symmetric(rng, 8.0f); }
  static float moment_at_step_0(float value) { return value; }
  static LionScalars scalars(const LionOptions& options, float) { return lion_scalars(options); }
  static void step(float& weight, float* moments, size_t, float grad, const LionScalars& scalars) {
    lion(weight, moments[0], grad, scalars);
  }
  static Status shipped(std::span<const ParamState> states, std::span<const LionGroup> groups,
                        const StepDecisions& decisions, uint64_t seed, void* rows) {
    return lion(states, groups, decisions, seed, rows, nullptr);
  }
};

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("lion", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::Lion>(cases);
  return cases.finish();
}
