// Models for the tests of the optimizer kernels: every way to keep a weight, every dtype of gradient and moments, with
// and without an average of the weights, all alignments, sizes and tails, bit for bit against the formula
// applied element by element, under many schedules.
//
// The test of one optimizer includes its .cu and describes it (update_model.h):
//   struct Optimizer {...};
//   test_updates<Optimizer>(cases);
#pragma once
#include "update_model.h"

namespace ak::test {

inline const std::vector<int64_t> kSizes = {0,  1,  1,  2,  3,   7,   8,   9,   15,   16,
                                            17, 31, 64, 65, 127, 250, 511, 513, 1024, 3000};
inline const std::vector<int64_t> kAnyOffset = {0, 0, 1, 2, 3, 4, 5, 7, 8};
inline const std::vector<int64_t> kAligned = {0, 8, 16};

inline WeightKind kind_number(uint64_t i, bool extras) {
  constexpr uint64_t kCommonKinds = 7;
  return static_cast<WeightKind>(i % (extras ? kWeightKinds : kCommonKinds));
}

template <class Optimizer, int kThreads, int kPlaces, int kRows>
auto small_instance(const Model<Optimizer>& m, const Decisions& d, int blocks) {
  using Rule = Kernel<Optimizer>;
  return [&m, &d, blocks](std::span<const Param> states, UpdateRow<Rule>* rows) {
    Status prepared = detail::prepare_rows<Rule, 32, kRows>(states, m.groups, d.on_device, rows, nullptr);
    if (!prepared.ok()) return prepared;
    if constexpr (kHasStage<Rule>) {
      const StageCall<Rule> call{states, d.on_device, m.seed, rows, nullptr, {}, nullptr};
      prepared = Optimizer::template stage<kThreads, kPlaces>(blocks, call);
      if (!prepared.ok()) return prepared;
    }
    const Status in_8_bits =
        detail::update_params8<Rule, kThreads, kPlaces>(blocks, states, d.on_device, m.seed, rows, nullptr);
    if (!in_8_bits.ok()) return in_8_bits;
    return m.extras ? detail::update_params<Rule, true, kThreads, kPlaces>(blocks, states, d.on_device, m.seed, rows,
                                                                           nullptr)
                    : detail::update_params<Rule, false, kThreads, kPlaces>(blocks, states, d.on_device, m.seed, rows,
                                                                            nullptr);
  };
}

/// Two steps of models of random parameters, decisions and launch shapes.
template <class Optimizer>
void random_models(Cases& cases) {
  for (uint64_t number = 0; number < 60; number++) {
    cases.check("random model " + std::to_string(number), [number] {
      Rng rng(number);
      const bool extras = number % 3 != 0;
      std::vector<Shape> shapes;
      const uint64_t count = 1 + rng() % 9;
      for (uint64_t i = 0; i < count; i++) {
        const int64_t n = number % 8 == 0 && i == 1 ? pick(rng, {1, kRunUnits}) * kUnit + pick(rng, {-1, 0, 1, 9})
                                                    : pick(rng, kSizes);
        shapes.push_back(random_shape<Optimizer>(rng, kind_number(rng(), extras), n, extras));
      }
      Model m = make_model<Optimizer>(rng, shapes, number % 2 ? kAnyOffset : kAligned);
      Decisions d;
      if (rng() % 2) d.scale_by(rng() % 2 ? 1024.0f : 3.0f);
      if (rng() % 2) d.clip_to(1.0f, rng() % 2 ? 9.0f : 0.25f);
      if (rng() % 2) d.found(rng() % 3 == 0 ? 1.0f + static_cast<float>(rng() % 2) : 0.0f);
      const int blocks = 1 + static_cast<int>(rng() % 4);
      const std::string first = compare(m, d, small_instance<Optimizer, 64, 3, 4>(m, d, blocks));
      return first.empty() ? compare(m, d, small_instance<Optimizer, 32, 16, 64>(m, d, blocks)) : first;
    });
  }
}

/// Every kind of weight with every number of moments, with and without an average, around the borders of a vector and
/// of a run.
template <class Optimizer>
void every_combination(Cases& cases) {
  using Rule = Kernel<Optimizer>;
  for (uint64_t k = 0; k < kWeightKinds; k++) {
    cases.check("every combination of kind " + std::to_string(k), [k]() -> std::string {
      Rng rng(200 + k);
      for (const auto* offsets : {&kAligned, &kAnyOffset}) {
        std::vector<Shape> shapes;
        for (int moments = Rule::kRequiredMoments; moments <= Rule::kMoments; moments++) {
          for (bool ema : {false, true}) {
            for (int64_t n : {0, 1, 7, 8, 9}) shapes.push_back({kind_number(k, true), n, moments, ema});
          }
        }
        shapes.push_back({kind_number(k, true), kRunUnits * kUnit + 9, Rule::kMoments, true});
        for (int64_t n : {0, 1, 31, 32, 33, 255, 256, 257, 300, 2 * kUnit + 40}) {
          shapes.push_back({kind_number(k, true), n, Rule::kMoments, n % 2 == 0, true});
          if (Rule::kRequiredMoments > 0) {
            shapes.push_back({kind_number(k, true), n, Rule::kRequiredMoments, n % 2 == 1, true});
          }
        }
        Model m = make_model<Optimizer>(rng, shapes, *offsets);
        Decisions d;
        d.scale_by(3.0f);
        const std::string wrong = compare(m, d, small_instance<Optimizer, 64, 8, 64>(m, d, 3));
        if (!wrong.empty()) return wrong;
      }
      return "";
    });
  }
}

/// Each kind of weight alone, with elements that are NaN, infinite or overflow the 16-bit type.
template <class Optimizer>
void extreme_values(Cases& cases) {
  using Rule = Kernel<Optimizer>;
  for (uint64_t k = 0; k < kWeightKinds; k++) {
    cases.check("extreme values of kind " + std::to_string(k), [k] {
      Rng rng(100 + k);
      const WeightKind kind = kind_number(k, true);
      Model m = make_model<Optimizer>(rng,
                                      {{kind, 40, Rule::kCommonMoments, false},
                                       {kind, 33, Rule::kMoments, true},
                                       {kind, 300, Rule::kMoments, true, true}},
                                      kAligned);
      for (auto& p : m.params) {
        p->grad->set(0, INFINITY);
        p->grad->set(5, NAN);
        if (p->ema) {
          p->ema->set(1, NAN);
          p->ema->set(2, -INFINITY);
        }
        if (!p->moments8.empty()) continue;
        p->moments[0]->set(9, 3e38f);
        p->moments[0]->set(17, -1e30f);
        if (p->moments.size() < 2) continue;
        p->moments[1]->set(17, 0);
        p->moments[1]->set(32, 0);
        if (p->moments.size() < 3) continue;
        p->moments[1]->set(18, NAN);
        p->moments[2]->set(17, 0);
        p->moments[2]->set(19, NAN);
        p->moments[2]->set(20, INFINITY);
      }
      const Decisions d;
      return compare(m, d, small_instance<Optimizer, 32, 4, 4>(m, d, 2));
    });
  }
}

template <class Optimizer>
std::string step_as_shipped(Model<Optimizer> m) {
  Decisions d;
  d.scale_by(64.0f);
  d.clip_to(1.0f, 100.0f);
  d.found(0.0f);
  return compare(m, d, [&](std::span<const Param> states, UpdateRow<Kernel<Optimizer>>*) {
    using Rule = typename Optimizer::Rule;
    emu::Buffer<Vec<float, 4>> scratch("scratch", (update_scratch_bytes<Rule>(states) + 15) / 16);
    return update<Rule>(states, m.groups, d.on_device, m.seed, scratch.data(), {}, nullptr);
  });
}

/// As the package calls it, up to more tensors than fit one launch of any kernel.
template <class Optimizer>
void shipped_instance(Cases& cases) {
  using Rule = Kernel<Optimizer>;
  for (bool extras : {false, true}) {
    const int64_t full = (extras ? Rule::kExtrasTensors : Rule::kTensors) + 3;
    for (int64_t count : {int64_t{1}, int64_t{5}, full}) {
      const std::string title = std::to_string(count) + " tensors" + (extras ? " with extras" : "");
      cases.check("shipped instance, " + title, [count, extras] {
        Rng rng(static_cast<uint64_t>(count));
        std::vector<Shape> shapes;
        for (int64_t i = 0; i < count; i++) {
          const int64_t n = count > 100 ? 1 + i % 11 : 2100 + i;
          shapes.push_back(random_shape<Optimizer>(rng, kind_number(rng(), extras), n, extras));
        }
        return step_as_shipped(make_model<Optimizer>(rng, shapes, kAligned));
      });
    }
  }
}

/// More parameters with moments in 8 bits than fit one launch, between others.
template <class Optimizer>
void shipped_in_8_bits(Cases& cases) {
  using Rule = Kernel<Optimizer>;
  for (int64_t count : {int64_t{5}, int64_t{Rule::kTensors8} + 3}) {
    cases.check("shipped instance, " + std::to_string(count) + " tensors in 8 bits", [count] {
      Rng rng(static_cast<uint64_t>(count));
      std::vector<Shape> shapes;
      for (int64_t i = 0; i < count; i++) {
        shapes.push_back(
            {kind_number(rng(), true), count > 100 ? 1 + i % 11 : 2100 + i, Rule::kMoments, i % 3 == 0, true});
        if (i % 8 == 0) shapes.push_back(random_shape<Optimizer>(rng, WeightKind::kFp32, 40, false));
      }
      return step_as_shipped(make_model<Optimizer>(rng, shapes, kAligned));
    });
  }
}

/// One parameter among others is enough for the kernel with extras, whichever extra it has.
template <class Optimizer>
void one_with_an_extra(Cases& cases) {
  using Rule = Kernel<Optimizer>;
  constexpr WeightKind kPlain = WeightKind::kFp32;
  const Shape common{kPlain, 20, Rule::kCommonMoments, false};
  const std::pair<const char*, Shape> extras[] = {
      {"an average", {kPlain, 21, Rule::kCommonMoments, true}},
      {"a 24-bit master", {WeightKind::kSplit24Bf16, 21, Rule::kCommonMoments, false}},
      {"fp16 stochastic rounding", {WeightKind::kStochasticFp16, 21, Rule::kCommonMoments, false}},
      {"bf16 stochastic rounding", {WeightKind::kStochasticBf16, 21, Rule::kCommonMoments, false}},
      {"all moments", {kPlain, 21, Rule::kMoments, false}}};
  for (const auto& [name, shape] : extras) {
    cases.check(std::string("one parameter with ") + name, [shape = shape, common] {
      Rng rng(7);
      return step_as_shipped(make_model<Optimizer>(rng, {common, common, shape}, kAligned));
    });
  }
}

template <class Optimizer>
void test_updates(Cases& cases) {
  random_models<Optimizer>(cases);
  every_combination<Optimizer>(cases);
  extreme_values<Optimizer>(cases);
  shipped_instance<Optimizer>(cases);
  shipped_in_8_bits<Optimizer>(cases);
  one_with_an_extra<Optimizer>(cases);
}

}  // namespace ak::test
