// muon_ on the emulator: models of all kinds of parameters, with momentum and without, against update/rules/muon.h, and
// iterates whose memory holds anything.
#include "update/rules/muon.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct MuonTest {
  using Rule = Muon;

  static Muon::Options options(int group) {
    const double momentum[] = {0.95, 0.25, 0.9}, ratio[] = {1.0, 0.4, 3.0}, weight_decay[] = {0.0, 0.1, 0.5};
    return {0.01 * (group + 1), momentum[group], ratio[group], weight_decay[group], group != 1, group == 2};
  }
};

/// The first pass replaces an iterate: NaN that another step left there must not matter. A skipped one leaves it.
void iterates_are_only_written(Cases& cases) {
  cases.check("iterates are only written", []() -> std::string {
    Rng rng(6);
    Model m = make_model<MuonTest>(
        rng, {{WeightKind::kBf16, 19, 1, false}, {WeightKind::kBf16, 64, 1, false}, {WeightKind::kBf16, 8, 1, false}},
        kAligned);
    for (float found : {1.0f, 0.0f}) {
      for (auto& p : m.params) {
        for (size_t i = 0; i < p->param->size(); i++) p->param->set(i, NAN);
      }
      Decisions d;
      d.found(found);
      const std::string wrong = compare(m, d, small_instance<MuonTest, 32, 4, 4>(m, d, 2));
      if (!wrong.empty()) return wrong;
      for (auto& p : m.params) {
        for (size_t i = 0; i < p->param->size(); i++) {
          if (std::isnan(p->param->get(i)) != (found > 0.0f)) return "an iterate depends on its old value";
        }
      }
    }
    return "";
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("muon", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::MuonTest>(cases);
  ak::test::iterates_are_only_written(cases);
  return cases.finish();
}
