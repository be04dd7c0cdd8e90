// One list of parameters with all their state, what one step must make of it, and the comparison.
//
// A test describes its optimizer:
//   struct Optimizer {
//     using Rule = ...;                                 // update/rules/X.h
//     static Rule::Options options(int group);          // of groups 0, 1 and 2
//   };
// and may add
//     static float moment_at_step_0(float value);       // what a kernel finds in a moment before the first step
// and, for a rule with a stage,
//     static void stage(TestParam&, const std::vector<float>& weights, const std::vector<float>& grads,
//                       std::vector<std::vector<float>>& moments, Rule::Scalars&, uint64_t seed, float step);
//                       // before the first Rule::update of a parameter; by TestParam::expect_moments if it moves them
//     template <kThreads, kPlaces> static Status stage(blocks, call);  // its kernels
#pragma once
#include <cstring>

#include "update_param.h"

namespace ak::test {

template <class Optimizer>
struct Model {
  bool extras = false;  // some parameter may need what the kernel without extras does not have
  uint64_t seed = 0;
  std::vector<std::unique_ptr<TestParam>> params;
  std::vector<ParamGroup<typename Optimizer::Rule::Options>> groups;
  std::vector<float> group_lr;      // NaN: the host's value counts
  std::vector<double> group_decay;  // likewise
  std::vector<std::unique_ptr<emu::Buffer<float>>> lrs;
  std::vector<std::unique_ptr<emu::Buffer<double>>> weight_decays;
  std::unique_ptr<emu::Buffer<float>> steps;

  std::vector<Param> states() {
    std::vector<Param> list;
    for (size_t i = 0; i < params.size(); i++) {
      const TestParam& p = *params[i];
      Param s{};
      s.param = p.param->data();
      s.grad = p.grad->data();
      s.numel = static_cast<int64_t>(p.param->size());
      s.shape = p.shape;
      s.param_dtype = p.param->dtype();
      s.grad_dtype = p.grad->dtype();
      for (size_t m = 0; m < p.moments.size(); m++) {
        s.moments[m] = p.moments[m]->data();
        s.moment_dtypes[m] = p.moments[m]->dtype();
      }
      for (size_t m = 0; m < p.moments8.size(); m++) {
        s.moments[m] = p.moments8[m].codes.buffer->data();
        s.exponents[m] = p.moments8[m].exponents.buffer->data();
      }
      s.step = steps->data() + i;
      s.master_kind = !p.master ? Master::kNone : is_split(p.kind) ? Master::kSplit : Master::kFloat32;
      s.master = p.master ? p.master->data() : nullptr;
      if (is_split24(p.kind)) s.master_kind = Master::kSplit24, s.master = p.remainder8.buffer->data();
      s.shadow = p.shadow ? p.shadow->data() : nullptr;
      s.shadow_dtype = p.shadow ? p.shadow->dtype() : kF32;
      s.ema = p.ema ? static_cast<float*>(p.ema->data()) : nullptr;
      // Without meaning for the other kinds, and so set for some of them.
      s.stochastic =
          is_stochastic(p.kind) || (p.place.index % 2 && p.kind != WeightKind::kFp16 && p.kind != WeightKind::kBf16);
      s.random = p.place.random();
      s.group = p.group;
      list.push_back(s);
    }
    return list;
  }
};

template <class Optimizer>
Model<Optimizer> make_model(Rng& rng, const std::vector<Shape>& shapes, const std::vector<int64_t>& offsets) {
  Model<Optimizer> m;
  m.seed = rng();
  const double ema_decay[] = {0.999, 0.0, 0.5};
  for (int g = 0; g < 3; g++) {
    m.groups.push_back({Optimizer::options(g), nullptr, nullptr, g == 1, ema_decay[g]});
    m.group_lr.push_back(g == 2 ? 0.37f : NAN);
    m.lrs.push_back(std::make_unique<emu::Buffer<float>>("lr", 1));
    if (g == 2) {
      m.lrs.back()->set(0, 0.37f);
      m.groups.back().lr = m.lrs.back()->data();
    }
    m.group_decay.push_back(g == 1 ? 0.21 : NAN);
    m.weight_decays.push_back(std::make_unique<emu::Buffer<double>>("weight_decay", 1));
    if (g == 1) {
      m.weight_decays.back()->set(0, 0.21);
      m.groups.back().weight_decay = m.weight_decays.back()->data();
    }
  }
  for (const Shape& shape : shapes) {
    const bool extra = shape.ema || is_split24(shape.kind) || is_stochastic(shape.kind) ||
                       shape.moments > Kernel<Optimizer>::kCommonMoments;
    m.extras |= extra && !shape.in_8_bits;
    m.params.push_back(make_param<Optimizer>(rng, shape, static_cast<int>(rng() % 3), offsets, rng() % 4 == 0));
  }
  m.steps = std::make_unique<emu::Buffer<float>>("steps", m.params.size());
  for (size_t k = 0; k < m.params.size(); k++) {
    m.steps->set(k, static_cast<float>(rng() % 5 ? rng() % 3 : 1000));
    if ((*m.steps)[k] != 0) continue;
    if constexpr (requires { Optimizer::moment_at_step_0(0.0f); }) {
      for (auto& b : m.params[k]->moments) {
        for (size_t i = 0; i < b->size(); i++) b->set(i, Optimizer::moment_at_step_0(b->get(i)));
      }
    }
  }
  return m;
}

/// The scalars on the device, each present or not.
struct Decisions {
  emu::Buffer<float> grad_scale{"grad_scale", 1}, found_inf{"found_inf", 1}, sum_sq{"sum_sq", 1};
  StepDecisions on_device{};
  float inv_scale = 1, clip = 1;
  bool skip = false;

  void scale_by(float scale) {
    grad_scale.set(0, scale);
    on_device.grad_scale = grad_scale.data();
    inv_scale = inverse_scale(scale);
  }
  void clip_to(float max_norm, float norm_sq) {
    sum_sq.set(0, norm_sq);
    on_device.sum_sq = sum_sq.data();
    on_device.max_norm = max_norm;
    clip = clip_factor(norm_sq, max_norm);
  }
  void found(float value) {
    found_inf.set(0, value);
    on_device.found_inf = found_inf.data();
    skip = value > 0;
  }
};

/// The state after one step, element by element, in `expected`; the buffers themselves are put back.
template <class Optimizer>
std::vector<float> expect(Model<Optimizer>& m, const Decisions& d) {
  std::vector<float> steps;
  for (size_t k = 0; k < m.params.size(); k++) {
    TestParam& p = *m.params[k];
    std::vector<std::vector<char>> before;
    for (AnyBuffer* b : p.state()) before.push_back(b->bytes());
    for (KnownBytes* b : p.bytes()) b->expect_the_same();
    const auto& group = m.groups[static_cast<size_t>(p.group)];
    const float step = (*m.steps)[k] + (d.skip ? 0.0f : 1.0f);
    steps.push_back(step);
    auto options = group.options;
    if (!is_nan(m.group_lr[static_cast<size_t>(p.group)])) options.lr = m.group_lr[static_cast<size_t>(p.group)];
    const double decay = m.group_decay[static_cast<size_t>(p.group)];
    if (!std::isnan(decay)) options.weight_decay = decay;
    using Rule = typename Optimizer::Rule;
    auto scalars = Rule::scalars(options, step);
    std::vector<float> weights, grads;
    for (size_t i = 0; i < p.param->size(); i++) {
      weights.push_back(is_split(p.kind)     ? join(*p.param, p.master->bits(i), i)
                        : is_split24(p.kind) ? join24(p, i)
                        : p.master           ? p.master->get(i)
                                             : p.param->get(i));
      const float grad = effective_grad(p.grad->get(i), d.inv_scale, d.clip);
      grads.push_back(group.maximize ? -grad : grad);
    }
    std::vector<std::vector<float>> moments(p.moment_count());
    for (size_t j = 0; j < moments.size(); j++) {
      for (size_t i = 0; i < weights.size(); i++) moments[j].push_back(p.moment(j, i));
    }
    if constexpr (kHasStage<Rule>) {
      if (!d.skip) Optimizer::stage(p, weights, grads, moments, scalars, m.seed, step);
    }
    for (size_t i = 0; i < p.param->size() && !d.skip; i++) {
      float w = weights[i];
      float of_element[Rule::kMoments] = {};
      for (size_t j = 0; j < moments.size(); j++) of_element[j] = moments[j][i];
      Rule::update(w, of_element, moments.size() == Rule::kMoments, grads[i], scalars);
      for (size_t j = 0; j < moments.size(); j++) moments[j][i] = of_element[j];
      if (p.ema) {
        const float average = p.ema->get(i);
        p.ema->set(i, fma(static_cast<float>(1.0 - group.ema_decay), w - average, average));
      }
      if (is_split(p.kind)) {
        split(w, *p.param, *p.master, i);
      } else if (is_split24(p.kind)) {
        p.param->set_bits(i, split24(p, w, p.random(m.seed, step, i, 0), p.remainder8.expected[i]));
      } else if (is_stochastic(p.kind)) {
        const uint32_t random = p.random(m.seed, step, i, 0);
        p.param->set_bits(i, p.kind == WeightKind::kStochasticFp16 ? round_stochastic<fp16>(w, random).bits
                                                                   : round_stochastic<bf16>(w, random).bits);
      } else {
        p.param->set(i, w);
        if (p.master) p.master->set(i, w);
        if (p.shadow) p.shadow->set(i, w);
      }
    }
    if (Kernel<Optimizer>::kMovesMoments && !d.skip) p.expect_moments(moments, m.seed, step);
    p.expected.clear();
    size_t j = 0;
    for (AnyBuffer* b : p.state()) {
      p.expected.push_back(b->bytes());
      std::memcpy(b->data(), before[j].data(), before[j].size());
      j++;
    }
  }
  return steps;
}

/// Equal bits; two NaNs count as equal, since which of two NaNs an addition keeps is nobody's contract.
inline bool same_elements(const AnyBuffer& got, const std::vector<char>& expected, bool is_float, size_t* at) {
  const std::vector<char> bytes = got.bytes();
  const size_t size = static_cast<size_t>(bytes_of(got.dtype()));
  for (size_t i = 0; i < got.size(); i++) {
    if (std::memcmp(bytes.data() + i * size, expected.data() + i * size, size) == 0) continue;
    *at = i;
    float other;
    if (got.dtype() == kF32) {
      std::memcpy(&other, expected.data() + i * size, size);
    } else {
      uint16_t bits;
      std::memcpy(&bits, expected.data() + i * size, size);
      other = got.dtype() == kF16 ? to_float(fp16{bits}) : to_float(bf16{bits});
    }
    if (!is_float || !is_nan(other) || !is_nan(got.get(i))) return false;
  }
  return true;
}

/// Runs a step; "" or what is wrong.
template <class Optimizer, class Run>
std::string compare(Model<Optimizer>& m, const Decisions& d, const Run& run) {
  const std::vector<float> steps = expect(m, d);
  std::vector<std::vector<char>> grads;
  for (auto& p : m.params) grads.push_back(p->grad->bytes());
  emu::Buffer<UpdateRow<Kernel<Optimizer>>> rows("rows", m.params.size());
  const std::vector<Param> states = m.states();
  const Status status = run(states, rows.data());
  if (!status.ok()) return status.message;
  for (size_t k = 0; k < m.params.size(); k++) {
    TestParam& p = *m.params[k];
    const std::string param = "params[" + std::to_string(k) + "]: ";
    if ((*m.steps)[k] != steps[k]) return param + "step is " + std::to_string((*m.steps)[k]);
    size_t j = 0, at = 0;
    for (AnyBuffer* b : p.state()) {
      const bool remainder = is_split(p.kind) && b == p.master.get();
      if (!same_elements(*b, p.expected[j], !remainder, &at)) {
        return param + "element " + std::to_string(at) + " of " + std::to_string(b->size()) + " of state " +
               std::to_string(j);
      }
      if (!b->check_red_zones().empty()) return param + b->check_red_zones();
      j++;
    }
    for (KnownBytes* b : p.bytes()) {
      for (size_t i = 0; i < b->expected.size(); i++) {
        const bool unknown = b == &p.remainder8 && is_nan(p.param->get(i));
        if ((*b->buffer)[i] != b->expected[i] && !unknown) {
          return param + "byte " + std::to_string(i) + " of " + std::to_string(b->expected.size()) + ", of " +
                 std::to_string(p.param->size()) + " elements";
        }
      }
      if (!b->buffer->check_red_zones().empty()) return param + b->buffer->check_red_zones();
    }
    if (p.grad->bytes() != grads[k]) return param + "the gradient was changed";
  }
  return "";
}

}  // namespace ak::test
