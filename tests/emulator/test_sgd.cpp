// sgd_ on the emulator: models of all kinds of parameters against update/rules/sgd.h, and the first step of a momentum
// buffer.
#include "update/rules/sgd.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct SgdTest {
  using Rule = Sgd;

  static Sgd::Options options(int group) {
    const double momentum[] = {0.9, 0.5, 0.95}, weight_decay[] = {0.0, 0.1, 0.05};
    return {0.01 * (group + 1), momentum[group], group == 1 ? 0.25 : 0.0, weight_decay[group], group == 2, group == 0};
  }
  /// Nobody says what is in a buffer that no step has filled, so it must not matter.
  static float moment_at_step_0(float) { return NAN; }
};

/// A step that is skipped leaves buffers as they were and does not count: the next one starts them.
void first_step_after_a_skip(Cases& cases) {
  cases.check("first step after a skip", []() -> std::string {
    Rng rng(5);
    Model m = make_model<SgdTest>(rng,
                                  {{WeightKind::kFp32, 19, 1, false},
                                   {WeightKind::kSplitBf16, 40, 1, true},
                                   {WeightKind::kFp16, 8, 1, false},
                                   {WeightKind::kFp32CopyFp16, 3, 0, false}},
                                  kAligned);
    for (size_t k = 0; k < m.params.size(); k++) {
      m.steps->set(k, 0);
      for (auto& b : m.params[k]->moments) {
        for (size_t i = 0; i < b->size(); i++) b->set(i, NAN);
      }
    }
    for (float found : {1.0f, 0.0f, 0.0f}) {
      Decisions d;
      d.found(found);
      const std::string wrong = compare(m, d, small_instance<SgdTest, 32, 4, 4>(m, d, 2));
      if (!wrong.empty()) return wrong;
    }
    int started = 0;
    for (const auto& p : m.params) started += !p->moments.empty() && !is_nan(p->moments[0]->get(0));
    if (started < 3) return "the test itself is wrong: " + std::to_string(started) + " buffers were started";
    return (*m.steps)[0] == 2.0f ? "" : "two steps were taken and not counted";
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("sgd", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::SgdTest>(cases);
  ak::test::first_step_after_a_skip(cases);
  return cases.finish();
}
