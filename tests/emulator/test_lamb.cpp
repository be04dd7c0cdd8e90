// lamb_ on the emulator: models of all kinds of parameters against update/rules/lamb.h; tensors of many units, and the
// trust ratios that are 1.
#include "update/rules/lamb.cu"
#include "update_models.h"

namespace ak::test {
namespace {

struct LambTest {
  using Rule = Lamb;

  static Lamb::Options options(int group) {
    const double weight_decay[] = {0.0, 0.1, 0.0};
    return {0.01 * (group + 1), 0.9 - 0.1 * group, 0.999 - 0.01 * group, 1e-6, weight_decay[group],
            group != 1,         group == 2};
  }
  static void stage(TestParam& p, const std::vector<float>& weights, const std::vector<float>& grads,
                    std::vector<std::vector<float>>& moments, Lamb::Scalars& s, uint64_t seed, float step) {
    for (size_t i = 0; i < weights.size(); i++) Lamb::move_moments(moments[0][i], moments[1][i], grads[i], s);
    moments = p.expect_moments(moments, seed, step);
    long double weight_sq = 0, direction_sq = 0;
    for (size_t i = 0; i < weights.size(); i++) {
      const float direction = Lamb::direction(weights[i], moments[0][i], moments[1][i], s);
      weight_sq += static_cast<long double>(weights[i]) * weights[i];
      direction_sq += static_cast<long double>(direction) * direction;
    }
    s.rate = Lamb::rate_of(static_cast<double>(weight_sq), static_cast<double>(direction_sq), s);
  }
  template <int kThreads, int kPlaces>
  static Status stage(int blocks, StageCall<Tuned<Lamb>> call) {
    const size_t bytes = std::max(detail::lamb_rates_bytes<LambArgs<kPlaces>>(call.params),
                                  detail::lamb_rates_bytes<LambArgs8<kPlaces>>(call.params));
    emu::Buffer<Squares> slots("slots", std::max<size_t>(1, bytes / sizeof(Squares)));
    call.scratch = slots.data();  // exactly as many as this launch shape needs
    const Status status = detail::lamb_rates<kThreads, LambArgs<kPlaces>>(blocks, call);
    return status.ok() ? detail::lamb_rates<kThreads, LambArgs8<kPlaces>>(blocks, call) : status;
  }
};

using LambModel = Model<LambTest>;

/// Tensors of several units, met by one block and by many, and more of them than fit a launch.
void many_units(Cases& cases) {
  for (int blocks : {1, 3, 7}) {
    cases.check("many units, " + std::to_string(blocks) + " blocks", [blocks] {
      Rng rng(300);
      std::vector<Shape> shapes;
      for (int64_t n : std::vector<int64_t>{6 * kUnit + 5, 0, 40, 4 * kUnit, 2 * kUnit + 1, 9}) {
        shapes.push_back({kind_number(rng(), true), n, 2, false});
      }
      LambModel m = make_model<LambTest>(rng, shapes, kAnyOffset);
      const Decisions d;
      return compare(m, d, small_instance<LambTest, 128, 4, 64>(m, d, blocks));
    });
  }
}

/// More units of one tensor than a block of lamb_rates_kernel has threads.
void more_units_than_threads(Cases& cases) {
  cases.check("more units than threads", [] {
    Rng rng(301);
    LambModel m = make_model<LambTest>(rng, {{WeightKind::kBf16, 34 * 2 * kUnit + 3, 2, false}}, kAligned);
    const Decisions d;
    return compare(m, d, small_instance<LambTest, 32, 4, 64>(m, d, 3));
  });
}

/// Elements whose squares fp32 has no numbers for, zeros, and what is not finite, each in a tensor of its own.
void special_norms(Cases& cases) {
  const std::pair<const char*, void (*)(TestParam&, size_t)> fills[] = {
      {"zero weights", [](TestParam& p, size_t i) { p.param->set(i, 0); }},
      {"zero directions",
       [](TestParam& p, size_t i) {
         p.grad->set(i, 0);
         p.moments[0]->set(i, 0);
       }},
      {"large weights", [](TestParam& p, size_t i) { p.param->set(i, i % 2 ? 1e30 : -2e30); }},
      {"small weights", [](TestParam& p, size_t i) { p.param->set(i, i % 2 ? 1e-30 : -2e-30); }},
      {"small directions",
       [](TestParam& p, size_t i) {
         p.grad->set(i, 0);
         p.moments[0]->set(i, 1e-30);
         p.moments[1]->set(i, 1.0);
       }},
      {"an infinite weight", [](TestParam& p, size_t i) { p.param->set(i, i == 3 ? INFINITY : 1.0); }},
      {"a gradient that is NaN", [](TestParam& p, size_t i) { p.grad->set(i, i == 4 ? NAN : 1.0); }},
  };
  for (const auto& [name, fill] : fills) {
    cases.check(std::string("special norms, ") + name, [fill = fill] {
      Rng rng(302);
      const Shape shape{WeightKind::kFp32, 70, 2, false};
      LambModel m = make_model<LambTest>(rng, {shape, shape, shape, shape, shape, shape}, kAligned);
      for (size_t k = 0; k < m.params.size(); k++) {
        m.params[k]->group = static_cast<int>(k % 3);
        for (size_t i = 0; i < 70 && k < 5; i++) fill(*m.params[k], i);  // the last one stays as it is
      }
      const Decisions d;
      return compare(m, d, small_instance<LambTest, 32, 4, 4>(m, d, 2));
    });
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("lamb", ak::test::Seeds(argc, argv, 4));
  ak::test::test_updates<ak::test::LambTest>(cases);
  ak::test::many_units(cases);
  ak::test::more_units_than_threads(cases);
  ak::test::special_norms(cases);
  return cases.finish();
}
