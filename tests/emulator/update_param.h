// One parameter of a step with all its state, drawn at random: every way to keep a weight, and moments of every dtype.
#pragma once
#include "tensor_lists.h"
#include "update/step.cuh"
#include "update_bytes.h"

namespace ak::test {

/// One parameter with all its state, and what the state should be after the step.
struct TestParam {
  WeightKind kind;
  std::unique_ptr<AnyBuffer> param, grad, master, shadow, ema;  // master: fp32, or remainders as raw 16 bits
  KnownBytes remainder8;                                        // of a 24-bit master
  std::vector<std::unique_ptr<AnyBuffer>> moments;              // none if they are in 8 bits
  std::vector<Moment8> moments8;
  MatrixShape shape;
  int group;
  Place place;
  std::vector<std::vector<char>> expected;

  size_t moment_count() const { return moments.size() + moments8.size(); }
  float moment(size_t m, size_t i) const { return moments8.empty() ? moments[m]->get(i) : moments8[m].get(i); }
  uint32_t random(uint64_t seed, float step, uint64_t i, uint32_t value) const {
    return random_value(seed, place, static_cast<uint32_t>(step), i, value);
  }
  /// The moments after a step, element by element; returns them as the next step finds them.
  std::vector<std::vector<float>> expect_moments(std::vector<std::vector<float>> values, uint64_t seed, float step) {
    for (size_t m = 0; m < values.size(); m++) {
      if (!moments8.empty()) {
        const auto bits = [&](size_t i) { return random(seed, step, i, static_cast<uint32_t>(1 + m)); };
        moments8[m].expect(values[m], bits);
      }
      for (size_t i = 0; i < values[m].size(); i++) {
        if (moments8.empty()) moments[m]->set(i, values[m][i]);
        values[m][i] = moments8.empty() ? moments[m]->get(i) : moments8[m].get_expected(i);
      }
    }
    return values;
  }
  std::vector<KnownBytes*> bytes() {
    std::vector<KnownBytes*> all;
    if (remainder8.buffer) all.push_back(&remainder8);
    for (Moment8& m : moments8) all.insert(all.end(), {&m.codes, &m.exponents});
    return all;
  }

  std::vector<AnyBuffer*> state() const {
    std::vector<AnyBuffer*> all = {param.get()};
    for (const auto& m : moments) all.push_back(m.get());
    if (master) all.push_back(master.get());
    if (shadow) all.push_back(shadow.get());
    if (ema) all.push_back(ema.get());
    return all;
  }
};

inline constexpr DType kF16 = DType::kFloat16, kB16 = DType::kBFloat16, kF32 = DType::kFloat32;

inline bool is_split(WeightKind k) { return k == WeightKind::kSplitFp16 || k == WeightKind::kSplitBf16; }

inline bool is_split24(WeightKind k) { return k == WeightKind::kSplit24Fp16 || k == WeightKind::kSplit24Bf16; }
inline float join24(const TestParam& p, size_t i) {
  const auto r = static_cast<int8_t>((*p.remainder8.buffer)[i]);
  return p.param->dtype() == kF16 ? join_master(fp16{p.param->bits(i)}, r) : join_master(bf16{p.param->bits(i)}, r);
}
/// The weight's bits; the remainder goes to `byte`.
inline uint16_t split24(const TestParam& p, float x, uint32_t random, uint8_t& byte) {
  const auto store = [&](const auto& s) {
    byte = static_cast<uint8_t>(static_cast<uint16_t>(s.remainder) >> 8);
    return s.weight.bits;
  };
  const uint32_t random8 = random & 0xff;
  return p.param->dtype() == kF16 ? store(split_master24<fp16>(x, random8)) : store(split_master24<bf16>(x, random8));
}

inline bool is_stochastic(WeightKind k) { return k == WeightKind::kStochasticFp16 || k == WeightKind::kStochasticBf16; }

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

/// The rule as the kernels know it.
template <class Optimizer>
using Kernel = Tuned<typename Optimizer::Rule>;

/// The storage of a parameter; both uses of a kFp32Copy* are drawn: a 16-bit param with an fp32 master, an fp32 param
/// with a shadow.
struct Shape {
  WeightKind kind;
  int64_t n;
  int moments;
  bool ema;
  bool in_8_bits = false;
};

template <class Optimizer>
Shape random_shape(Rng& rng, WeightKind kind, int64_t n, bool extras) {
  using Rule = Kernel<Optimizer>;
  const bool optional = (extras || Rule::kMoments == Rule::kCommonMoments) && rng() % 3 > 0;
  const bool in_8_bits = rng() % 3 == 0;
  const int moments = optional || (in_8_bits && Rule::kRequiredMoments == 0) ? Rule::kMoments : Rule::kRequiredMoments;
  return {kind, n, moments, extras && rng() % 2, in_8_bits};
}

template <class Optimizer>
std::unique_ptr<TestParam> make_param(Rng& rng, const Shape& shape, int group, const std::vector<int64_t>& offsets,
                                      bool shift_state) {
  auto p = std::make_unique<TestParam>();
  const WeightKind kind = shape.kind;
  const size_t n = static_cast<size_t>(shape.n);
  p->kind = kind;
  const int64_t rows = shape.n % 3 == 0 ? 3 : 1;
  p->shape = {rows, shape.n / rows};
  p->group = group;
  p->place = {static_cast<uint32_t>(rng()), rng() % 2 ? 0 : rng() >> 25};  // more than 32 bits
  if (rng() % 2) p->place.width = 2 + rng() % 9, p->place.pitch = p->place.width + rng() % 2 * (rng() >> 38);
  // Half of the parameters have one operand alone that may start anywhere.
  constexpr uint64_t kOperands = 7;
  const uint64_t only = rng() % 2 ? rng() % kOperands : kOperands;
  uint64_t operands = 0;
  auto buffer = [&](const char* name, DType dtype, bool shifted) {
    if (only < kOperands) shifted = operands++ == only;
    return std::make_unique<AnyBuffer>(name, dtype, n, shifted ? static_cast<size_t>(pick(rng, offsets)) : 0);
  };
  const DType grads[] = {kF16, kB16, kF32};
  p->grad = buffer("grad", grads[rng() % 3], true);
  auto bytes = [&](const char* name, size_t size, bool shifted) {
    if (only < kOperands) shifted = operands++ == only;
    return std::make_unique<Bytes>(name, size, shifted ? static_cast<size_t>(pick(rng, offsets)) : 0);
  };
  for (int m = 0; m < shape.moments; m++) {
    if (shape.in_8_bits) {
      Moment8& moment = p->moments8.emplace_back();
      moment.is_unsigned = is_unsigned<typename Optimizer::Rule>(m);
      moment.codes.buffer = bytes("codes", n, shift_state);
      moment.exponents.buffer = std::make_unique<Bytes>("exponents", (n + kBlock8 - 1) / kBlock8, rng() % 4);
    } else {
      p->moments.push_back(buffer("moment", rng() % 2 ? kB16 : kF32, shift_state));
    }
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
    case WeightKind::kStochasticFp16:
      p->param = buffer("param", kF16, true);
      break;
    case WeightKind::kBf16:
    case WeightKind::kStochasticBf16:
      p->param = buffer("param", kB16, true);
      break;
    case WeightKind::kSplitFp16:
    case WeightKind::kSplitBf16:
      p->param = buffer("param", kind == WeightKind::kSplitFp16 ? kF16 : kB16, true);
      p->master = buffer("remainder", kF16, shift_state);
      break;
    case WeightKind::kSplit24Fp16:
    case WeightKind::kSplit24Bf16:
      p->param = buffer("param", kind == WeightKind::kSplit24Fp16 ? kF16 : kB16, true);
      p->remainder8.buffer = bytes("remainder", n, shift_state);
      break;
  }
  if (shape.ema) p->ema = buffer("ema", kF32, shift_state);
  for (size_t i = 0; i < n; i++) {
    const float weight = symmetric(rng, 2.0f);
    if (p->ema) p->ema->set(i, symmetric(rng, 2.0f));
    if (is_split(kind)) {
      split(weight, *p->param, *p->master, i);
    } else if (is_split24(kind)) {
      uint8_t byte;
      p->param->set_bits(i, split24(*p, weight, static_cast<uint32_t>(rng()), byte));
      p->remainder8.buffer->set(i, byte);
    } else {
      // Buffers that are only written stay NaN, so that a kernel that reads it is caught.
      if (!p->master) p->param->set(i, weight);
      if (p->master) p->master->set(i, weight);
    }
    p->grad->set(i, symmetric(rng, 64.0f));
    for (size_t m = 0; m < p->moments.size(); m++) {
      p->moments[m]->set(i, m == 0 ? symmetric(rng, 2.0f) : static_cast<float>(uniform(rng)));  // others are squares
    }
  }
  for (Moment8& moment : p->moments8) {  // any codes, subnormal and zero ones too, and sometimes a block that is NaN
    for (size_t i = 0; i < n; i++) moment.codes.buffer->set(i, static_cast<uint8_t>(rng() % 3 ? rng() : rng() % 9));
    for (size_t b = 0; b < moment.exponents.buffer->size(); b++) {
      moment.exponents.buffer->set(b, static_cast<uint8_t>(rng() % 16 ? 100 + rng() % 40 : 255));
    }
  }
  return p;
}

}  // namespace ak::test
