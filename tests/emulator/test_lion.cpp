// lion_ on the emulator: models of all kinds of parameters against update/rules/lion.h.
#include "update/rules/lion.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct LionTest {
  using Rule = Lion;

  static Lion::Options options(int group) {
    const double weight_decay[] = {0.0, 0.1, 0.5};
    return {0.01 * (group + 1), 0.9 - 0.1 * group, 0.99 - 0.01 * group, weight_decay[group], group == 1};
  }
};

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("lion", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::LionTest>(cases);
  return cases.finish();
}
