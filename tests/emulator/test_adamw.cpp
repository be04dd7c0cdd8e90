// adamw_ on the emulator: models of all kinds of parameters against update/rules/adamw.h.
#include "update/rules/adamw.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct AdamWTest {
  using Rule = AdamW;

  static AdamW::Options options(int group) {
    const double weight_decay[] = {0.0, 0.1, 0.05};
    return {0.01 * (group + 1), 0.9 - 0.1 * group, 0.999 - 0.01 * group, 1e-8, weight_decay[group],
            group == 2,         group == 1};
  }
};

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("adamw", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::AdamWTest>(cases);
  return cases.finish();
}
