// Two rules that the package does not have: the struct of csrc/update/rules/X.h and the tuning of update/rules/X.cu are
// all that the shared kernels need of an optimizer. Adagrad (Duchi et al., JMLR 2011) has one pass. The other rule has
// a stage, which scales the steps of a matrix by its shape.
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
  static constexpr int kBlocksPerSm = 2, kExtrasBlocksPerSm = 2, kBlocksPerSm8 = 2;
  static constexpr int kPrepareTensors = 60, kTensors = 60, kExtrasTensors = 50, kTensors8 = 40;
};

/// p -= lr sqrt(rows / columns) m with the moment m = (m + g) / 2.
struct ByShape {
  static constexpr const char* kName = "by_shape_";
  static constexpr int kMoments = 1, kRequiredMoments = 1, kOptions = 2;
  static constexpr bool kHasStage = true;

  struct Options {
    double lr, weight_decay;
  };
  struct Scalars {
    float rate;
  };
  static AK_HD Scalars scalars(const Options& o, float) { return {static_cast<float>(o.lr)}; }
  static float factor(const MatrixShape& shape) {
    return std::sqrt(static_cast<float>(shape.rows) / static_cast<float>(shape.columns));
  }

  static AK_HD void update(float& p, float (&moments)[1], bool, float g, const Scalars& s) {
    moments[0] = 0.5f * (moments[0] + g);
    p = fma(-s.rate, moments[0], p);
  }
};

template <>
struct Tuned<ByShape> : Untuned<ByShape> {
  static constexpr int kBlocksPerSm = 2, kExtrasBlocksPerSm = 2, kBlocksPerSm8 = 2;
  static constexpr int kPrepareTensors = 60, kTensors = 60, kExtrasTensors = 50, kTensors8 = 40;

  static size_t stage_bytes(std::span<const Param>) { return 0; }
  static Status stage(const StageCall<Tuned<ByShape>>& call);
};

/// The rows of the parameters of one shape; at most 64 of them.
struct ShapeGroup {
  float factor;
  int count;
  uint32_t row[64];
};

AK_KERNEL(64, 1)
scale_rates_kernel(AK_PARAM(ShapeGroup) group, AK_PARAM(StepDecisions) decisions, UpdateRow<Tuned<ByShape>>* rows) {
  if (thread_index() >= group.count || skipped(decisions)) return;
  float* rate = &rows[group.row[thread_index()]].scalars.rate;
  store(rate, load(rate) * group.factor);
}

Status Tuned<ByShape>::stage(const StageCall<Tuned<ByShape>>& call) {
  Status status;
  for (const std::vector<size_t>& members : group_by_shape(call.params)) {
    for (size_t begin = 0; begin < members.size() && status.ok(); begin += 64) {
      ShapeGroup group{factor(call.params[members[0]].shape), 0, {}};
      for (size_t i = begin; i < std::min(begin + 64, members.size()); i++) {
        group.row[group.count++] = static_cast<uint32_t>(members[i]);
      }
      const LaunchConfig config{.name = "scale_rates", .grid = 1, .block = 64, .stream = call.stream};
      status = launch(scale_rates_kernel, config, group, call.decisions, call.rows);
    }
  }
  return status;
}

namespace test {
namespace {

struct AdagradTest {
  using Rule = Adagrad;

  static Adagrad::Options options(int group) { return Adagrad::options(kNumbers + 3 * group, 0); }
  static constexpr double kNumbers[] = {0.01, 1e-10, 0.0, 0.02, 1e-8, 0.1, 0.03, 1e-3, 0.5};
};

struct ByShapeTest {
  using Rule = ByShape;

  static ByShape::Options options(int group) { return {0.01 * (group + 1), 0.0}; }
  static void stage(TestParam& p, const std::vector<float>&, const std::vector<float>&,
                    std::vector<std::vector<float>>&, ByShape::Scalars& s, uint64_t, float) {
    if (p.param->size() > 0) s.rate *= ByShape::factor(p.shape);
  }
  template <int kThreads, int kPlaces>
  static Status stage(int, const StageCall<Tuned<ByShape>>& call) {
    return Tuned<ByShape>::stage(call);
  }
};

}  // namespace
}  // namespace test
}  // namespace ak

AK_UPDATE_KERNELS(ak::Adagrad)
AK_UPDATE_KERNELS(ak::ByShape)

int main(int argc, char** argv) {
  ak::test::Cases cases("new rules", ak::test::Seeds(argc, argv, 2));
  ak::test::test_updates<ak::test::AdagradTest>(cases);
  ak::test::test_updates<ak::test::ByShapeTest>(cases);
  return cases.finish();
}
