// A rule that the package does not have, Adagrad (Duchi et al., JMLR 2011): the struct that csrc/update/rules/X.h would
// hold and the tuning of update/rules/X.cu are all that the shared kernels want to know of an optimizer.
#include "update/rule.h"
#include "update/step.cuh"
#include "update_models.h"

namespace ak {

struct Adagrad {
  static constexpr const char* kName = "adagrad_";
  static constexpr int kMoments = 1, kRequiredMoments = 1, kOptions = 3;

  struct Options {
    double lr, eps, weight_decay;
  };
  static Options options(const double* o, int64_t) { return {o[0], o[1], o[2]}; }

  struct Scalars {
    float lr, eps, decay;
  };
  static AK_HD Scalars scalars(const Options& o, float) {
    return {static_cast<float>(o.lr), static_cast<float>(o.eps), static_cast<float>(o.weight_decay)};
  }

  static AK_HD void update(float& p, float (&moments)[1], bool, float g, const Scalars& s) {
    const float decayed = fma(s.decay, p, g);
    g = s.decay != 0.0f ? decayed : g;
    moments[0] = fma(g, g, moments[0]);
    p = fma(-s.lr, div(g, sqrt(moments[0]) + s.eps), p);
  }
};

template <>
struct Tuned<Adagrad> : Untuned<Adagrad> {
  static constexpr int kBlocksPerSm = 2, kExtrasBlocksPerSm = 2;
  static constexpr int kPrepareTensors = 60, kTensors = 60, kExtrasTensors = 50;
};

namespace test {
namespace {

struct AdagradTest {
  using Rule = Adagrad;

  static Adagrad::Options options(int group) { return Adagrad::options(kNumbers + 3 * group, 0); }
  static constexpr double kNumbers[] = {0.01, 1e-10, 0.0, 0.02, 1e-8, 0.1, 0.03, 1e-3, 0.5};
};

}  // namespace
}  // namespace test
}  // namespace ak

AK_UPDATE_KERNELS(ak::Adagrad)

int main(int argc, char** argv) {
  ak::test::Cases cases("a new rule", ak::test::Seeds(argc, argv, 2));
  ak::test::test_updates<ak::test::AdagradTest>(cases);
  return cases.finish();
}
