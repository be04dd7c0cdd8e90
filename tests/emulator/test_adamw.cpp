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
  static int moments(Rng& rng, bool extras) { return extras && rng() % 2 ? 3 : 2; }
  static float moment(Rng& rng, int which) {
    return which == 0 ? symmetric(rng, 0.5f) : static_cast<float>(uniform(rng));
  }
  static float moment_at_step_0(float value) { return value; }
  static AdamWScalars scalars(const AdamWOptions& options, float step) { return adamw_scalars(options, step); }
  static void step(float& weight, float* moments, size_t count, float grad, const AdamWScalars& scalars) {
    if (count == 3) {
      amsgrad(weight, moments[0], moments[1], moments[2], grad, scalars);
    } else {
      adamw(weight, moments[0], moments[1], grad, scalars);
    }
  }
  static Status shipped(std::span<const ParamState> states, std::span<const AdamWGroup> groups,
                        const StepDecisions& decisions, uint64_t seed, void* rows) {
    return adamw(states, groups, decisions, seed, rows, nullptr);
  }
};

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("adamw", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::AdamW>(cases);
  return cases.finish();
}
