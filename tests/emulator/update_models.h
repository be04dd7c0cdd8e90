// Models for the tests of the optimizer kernels: every way to keep a weight, every dtype of gradient and moments, all
// alignments, sizes and tails, bit for bit against the formula of csrc/math applied element by element, under many
// schedules.
//
// The test of one optimizer includes its .cu and describes it:
//   struct Optimizer {
//     using Rule = ...;                                           // as the kernel's
//     static Rule::Options options(int group);                    // of groups 0, 1 and 2
//     static bool has_moments(Rng& rng);                          // of one parameter
//     static float moment(Rng& rng, int which);                   // a value that may stand in a moment
//     static float moment_at_step_0(float value);                 // what a kernel finds there before the first step
//     static Rule::Scalars scalars(const Rule::Options&, float step);  // the formulas, from csrc/math
//     static void step(float& weight, float* moments, float grad, const Rule::Scalars&);  // moments: null without
//     static Status shipped(states, groups, decisions, rows);     // the launcher of kernels/X.h
//   };
//   test_updates<Optimizer>(cases);
#pragma once
#include <cstring>

#include "kernels/update_step.cuh"
#include "tensor_lists.h"

namespace ak::test {

/// One parameter with all its state, and what the state should be after the step.
struct Param {
  WeightKind kind;
  std::unique_ptr<AnyBuffer> param, grad, master, shadow;  // master: fp32, or remainders as raw 16 bits
  std::vector<std::unique_ptr<AnyBuffer>> moments;
  int group;
  std::vector<std::vector<char>> expected;

  std::vector<AnyBuffer*> state() const {
    std::vector<AnyBuffer*> all = {param.get()};
    for (const auto& m : moments) all.push_back(m.get());
    if (master) all.push_back(master.get());
    if (shadow) all.push_back(shadow.get());
    return all;
  }
};

inline constexpr DType kF16 = DType::kFloat16, kB16 = DType::kBFloat16, kF32 = DType::kFloat32;

inline bool is_split(WeightKind k) { return k == WeightKind::kSplitFp16 || k == WeightKind::kSplitBf16; }

inline float join(const AnyBuffer& weight, uint16_t remainder, size_t i) {
  const auto r = static_cast<int16_t>(remainder);
  return weight.dtype() == kF16 ? join_master(fp16{weight.bits(i)}, r) : join_master(bf16{weight.bits(i)}, r);
}
inline void split(float x, AnyBuffer& weight, AnyBuffer& remainder, size_t i) {
  if (weight.dtype() == kF16) {
    const auto s = split_master<fp16>(x);
    weight.set_bits(i, s.weight.bits);
    remainder.set_bits(i, static_cast<uint16_t>(s.remainder));
  } else {
    const auto s = split_master<bf16>(x);
    weight.set_bits(i, s.weight.bits);
    remainder.set_bits(i, static_cast<uint16_t>(s.remainder));
  }
}

template <class Optimizer>
struct Model {
  std::vector<std::unique_ptr<Param>> params;
  std::vector<ParamGroup<typename Optimizer::Rule::Options>> groups;
  std::vector<float> group_lr;  // NaN: the host's value counts
  std::vector<std::unique_ptr<emu::Buffer<float>>> lrs;
  std::unique_ptr<emu::Buffer<float>> steps;

  std::vector<ParamState> states() {
    std::vector<ParamState> list;
    for (size_t i = 0; i < params.size(); i++) {
      const Param& p = *params[i];
      ParamState s{};
      s.param = p.param->data();
      s.grad = p.grad->data();
      s.numel = static_cast<int64_t>(p.param->size());
      s.param_dtype = p.param->dtype();
      s.grad_dtype = p.grad->dtype();
      for (size_t m = 0; m < p.moments.size(); m++) {
        s.moments[m] = p.moments[m]->data();
        s.moment_dtypes[m] = p.moments[m]->dtype();
      }
      s.step = steps->data() + i;
      s.master_kind = !p.master ? Master::kNone : is_split(p.kind) ? Master::kSplit : Master::kFloat32;
      s.master = p.master ? p.master->data() : nullptr;
      s.shadow = p.shadow ? p.shadow->data() : nullptr;
      s.shadow_dtype = p.shadow ? p.shadow->dtype() : kF32;
      s.group = p.group;
      list.push_back(s);
    }
    return list;
  }
};

/// A weight of the given kind; both uses of a kFp32Copy* are drawn: a 16-bit param with an fp32 master, an fp32 param
/// with a shadow.
template <class Optimizer>
std::unique_ptr<Param> make_param(Rng& rng, WeightKind kind, size_t n, int group, const std::vector<int64_t>& offsets,
                                  bool shift_state) {
  auto p = std::make_unique<Param>();
  p->kind = kind;
  p->group = group;
  // Half of the parameters have one operand alone that may start anywhere.
  const uint64_t only = rng() % 2 ? rng() % 5 : 5;
  uint64_t operands = 0;
  auto buffer = [&](const char* name, DType dtype, bool shifted) {
    if (only < 5) shifted = operands++ == only;
    return std::make_unique<AnyBuffer>(name, dtype, n, shifted ? static_cast<size_t>(pick(rng, offsets)) : 0);
  };
  const DType grads[] = {kF16, kB16, kF32};
  p->grad = buffer("grad", grads[rng() % 3], true);
  if (Optimizer::has_moments(rng)) {
    for (int m = 0; m < Optimizer::Rule::kMoments; m++)
      p->moments.push_back(buffer("moment", rng() % 2 ? kB16 : kF32, shift_state));
  }
  const DType copy = kind == WeightKind::kFp32CopyFp16 ? kF16 : kB16;
  switch (kind) {
    case WeightKind::kFp32:
      p->param = buffer("param", kF32, true);
      break;
    case WeightKind::kFp32CopyFp16:
    case WeightKind::kFp32CopyBf16:
      if (rng() % 2) {
        p->param = buffer("param", kF32, true);
        p->shadow = buffer("shadow", copy, shift_state);
      } else {
        p->param = buffer("param", copy, true);
        p->master = buffer("master", kF32, shift_state);
      }
      break;
    case WeightKind::kFp16:
    case WeightKind::kBf16:
      p->param = buffer("param", kind == WeightKind::kFp16 ? kF16 : kB16, true);
      break;
    case WeightKind::kSplitFp16:
    case WeightKind::kSplitBf16:
      p->param = buffer("param", kind == WeightKind::kSplitFp16 ? kF16 : kB16, true);
      p->master = buffer("remainder", kF16, shift_state);
      break;
  }
  for (size_t i = 0; i < n; i++) {
    const float weight = symmetric(rng, 2.0f);
    if (is_split(kind)) {
      split(weight, *p->param, *p->master, i);
    } else {
      // What is only written stays NaN, so that a kernel that reads it is caught.
      if (!p->master) p->param->set(i, weight);
      if (p->master) p->master->set(i, weight);
    }
    p->grad->set(i, symmetric(rng, 64.0f));
    for (size_t m = 0; m < p->moments.size(); m++) p->moments[m]->set(i, Optimizer::moment(rng, static_cast<int>(m)));
  }
  return p;
}

template <class Optimizer>
Model<Optimizer> make_model(Rng& rng, const std::vector<std::pair<WeightKind, int64_t>>& shapes,
                            const std::vector<int64_t>& offsets) {
  Model<Optimizer> m;
  for (int g = 0; g < 3; g++) {
    m.groups.push_back({Optimizer::options(g), nullptr, g == 1});
    m.group_lr.push_back(g == 2 ? 0.37f : NAN);
    m.lrs.push_back(std::make_unique<emu::Buffer<float>>("lr", 1));
    if (g == 2) {
      m.lrs.back()->set(0, 0.37f);
      m.groups.back().lr = m.lrs.back()->data();
    }
  }
  for (auto [kind, n] : shapes) {
    m.params.push_back(
        make_param<Optimizer>(rng, kind, static_cast<size_t>(n), static_cast<int>(rng() % 3), offsets, rng() % 4 == 0));
  }
  m.steps = std::make_unique<emu::Buffer<float>>("steps", m.params.size());
  for (size_t k = 0; k < m.params.size(); k++) {
    m.steps->set(k, static_cast<float>(rng() % 5 ? rng() % 3 : 1000));
    if ((*m.steps)[k] != 0) continue;
    for (auto& b : m.params[k]->moments) {
      for (size_t i = 0; i < b->size(); i++) b->set(i, Optimizer::moment_at_step_0(b->get(i)));
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
    Param& p = *m.params[k];
    std::vector<std::vector<char>> before;
    for (AnyBuffer* b : p.state()) before.push_back(b->bytes());
    const auto& group = m.groups[static_cast<size_t>(p.group)];
    const float step = (*m.steps)[k] + (d.skip ? 0.0f : 1.0f);
    steps.push_back(step);
    auto options = group.options;
    if (!is_nan(m.group_lr[static_cast<size_t>(p.group)])) options.lr = m.group_lr[static_cast<size_t>(p.group)];
    const auto scalars = Optimizer::scalars(options, step);
    for (size_t i = 0; i < p.param->size() && !d.skip; i++) {
      float w = is_split(p.kind) ? join(*p.param, p.master->bits(i), i) : p.master ? p.master->get(i) : p.param->get(i);
      float moments[2] = {};
      for (size_t j = 0; j < p.moments.size(); j++) moments[j] = p.moments[j]->get(i);
      const float grad = effective_grad(p.grad->get(i), d.inv_scale, d.clip);
      Optimizer::step(w, p.moments.empty() ? nullptr : moments, group.maximize ? -grad : grad, scalars);
      for (size_t j = 0; j < p.moments.size(); j++) p.moments[j]->set(i, moments[j]);
      if (is_split(p.kind)) {
        split(w, *p.param, *p.master, i);
      } else {
        p.param->set(i, w);
        if (p.master) p.master->set(i, w);
        if (p.shadow) p.shadow->set(i, w);
      }
    }
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
  emu::Buffer<UpdateRow<typename Optimizer::Rule>> rows("rows", m.params.size());
  const std::vector<ParamState> states = m.states();
  const Status status = run(states, rows.data());
  if (!status.ok()) return status.message;
  for (size_t k = 0; k < m.params.size(); k++) {
    const Param& p = *m.params[k];
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
    if (p.grad->bytes() != grads[k]) return param + "the gradient was changed";
  }
  return "";
}

inline const std::vector<int64_t> kSizes = {0,  1,  1,  2,  3,   7,   8,   9,   15,   16,
                                            17, 31, 64, 65, 127, 250, 511, 513, 1024, 3000};
inline const std::vector<int64_t> kAnyOffset = {0, 0, 1, 2, 3, 4, 5, 7, 8};
inline const std::vector<int64_t> kAligned = {0, 8, 16};

inline WeightKind kind_number(uint64_t i) { return static_cast<WeightKind>(i % 7); }

template <class Optimizer, int kThreads, int kPlaces, int kRows>
auto small_instance(const Model<Optimizer>& m, const Decisions& d, int blocks) {
  using Rule = typename Optimizer::Rule;
  return [&m, &d, blocks](std::span<const ParamState> states, UpdateRow<Rule>* rows) {
    const Status prepared = detail::prepare_rows<Rule, 32, kRows>(states, m.groups, d.on_device, rows, nullptr);
    if (!prepared.ok()) return prepared;
    return detail::update_params<Rule, kThreads, kPlaces>(blocks, states, d.on_device, rows, nullptr);
  };
}

/// Two steps of models of random parameters, decisions and launch shapes.
template <class Optimizer>
void random_models(Cases& cases) {
  for (uint64_t number = 0; number < 60; number++) {
    cases.check("random model " + std::to_string(number), [number] {
      Rng rng(number);
      std::vector<std::pair<WeightKind, int64_t>> shapes;
      const uint64_t count = 1 + rng() % 9;
      for (uint64_t i = 0; i < count; i++) {
        const int64_t n = number % 8 == 0 && i == 1 ? kChunk + pick(rng, {-1, 0, 1, 9}) : pick(rng, kSizes);
        shapes.push_back({kind_number(rng()), n});
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

/// Each kind of weight alone, with elements that are NaN, infinite or overflow the 16-bit type.
template <class Optimizer>
void extreme_values(Cases& cases) {
  for (uint64_t k = 0; k < 7; k++) {
    cases.check("extreme values of kind " + std::to_string(k), [k] {
      Rng rng(100 + k);
      Model m = make_model<Optimizer>(rng, {{kind_number(k), 40}, {kind_number(k), 33}}, kAligned);
      for (auto& p : m.params) {
        p->grad->set(0, INFINITY);
        p->grad->set(5, NAN);
        if (p->moments.empty()) continue;
        p->moments.front()->set(9, 3e38f);
        p->moments.front()->set(17, -1e30f);
        if (p->moments.size() < 2) continue;
        p->moments.back()->set(17, 0);
        p->moments.back()->set(32, 0);
      }
      const Decisions d;
      return compare(m, d, small_instance<Optimizer, 32, 4, 4>(m, d, 2));
    });
  }
}

/// As the package calls it, up to more tensors than fit one launch of either kernel.
template <class Optimizer>
void shipped_instance(Cases& cases) {
  for (int64_t count : {int64_t{1}, int64_t{5}, int64_t{Optimizer::Rule::kTensors + 3}}) {
    cases.check("shipped instance, " + std::to_string(count) + " tensors", [count]() -> std::string {
      Rng rng(static_cast<uint64_t>(count));
      std::vector<std::pair<WeightKind, int64_t>> shapes;
      for (int64_t i = 0; i < count; i++) shapes.push_back({kind_number(rng()), count > 100 ? 1 + i % 11 : 2100 + i});
      Model m = make_model<Optimizer>(rng, shapes, kAligned);
      Decisions d;
      d.scale_by(64.0f);
      d.clip_to(1.0f, 100.0f);
      d.found(0.0f);
      using Rule = typename Optimizer::Rule;
      if (update_scratch_bytes<Rule>(m.params.size()) != m.params.size() * sizeof(UpdateRow<Rule>))
        return "scratch is not one row a parameter";
      return compare(m, d, [&](std::span<const ParamState> states, UpdateRow<Rule>* rows) {
        return Optimizer::shipped(states, m.groups, d.on_device, rows);
      });
    });
  }
}

template <class Optimizer>
void test_updates(Cases& cases) {
  random_models<Optimizer>(cases);
  extreme_values<Optimizer>(cases);
  shipped_instance<Optimizer>(cases);
}

}  // namespace ak::test
