// activation_backward on the emulator: activations, types, alignments and tails, bit for bit against the formula.
#include "activation/backward.cu"
#include "activation/name.h"
#include "harness.h"

namespace ak::test {
namespace {

/// `offset`: elements in front of grad, z and out, which so lose their alignment.
template <class Z, class G>
std::string run(Activation activation, int rows, int columns, const int (&offset)[3] = {0, 0, 0}) {
  emu::options().sm_count = 1;
  const bool gated = is_gated(activation);
  const size_t n = static_cast<size_t>(rows) * columns, of_grad = gated ? n / 2 : n, half = columns / 2;
  emu::Random random{n};
  const auto draw = [&] { return (static_cast<float>(random.below(257)) - 128) / 16; };
  emu::Buffer<G> grad("grad", of_grad, offset[0]);
  emu::Buffer<Z> z("z", n, offset[1]), out("out", n, offset[2]);
  for (size_t i = 0; i < of_grad; i++) grad.set(i, round_to<G>(draw()));
  for (size_t i = 0; i < n; i++) z.set(i, round_to<Z>(draw()));
  const std::string error = message_of(
      activation_backward({grad.data(), z.data(), out.data(), kType<G>, kType<Z>, rows, columns, activation}, nullptr));
  if (!error.empty()) return error;
  for (size_t i = 0; i < n; i++) {
    float want;
    if (gated) {
      const size_t row = i / columns, x = i % columns, gate = row * columns + x % half;
      const GatedGradient d =
          swiglu_backward(to_float(grad[row * half + x % half]), to_float(z[gate]), to_float(z[gate + half]));
      want = x < half ? d.gate : d.up;
    } else {
      want = activate_backward(activation, to_float(grad[i]), to_float(z[i]));
    }
    const float got = to_float(out[i]);
    want = to_float(round_to<Z>(want));
    if (bits_of(got) != bits_of(want)) return emu::format("out[%zu] is %.9g, expected %.9g", i, got, want);
  }
  return out.check_written();
}

void check_all(Cases& cases) {
  for (int i = 0; i < kActivations; i++) {
    const Activation activation = static_cast<Activation>(i);
    const std::string name = kActivationNames[i];
    cases.check(name + ", whole vectors", [&] { return run<bf16, bf16>(activation, 3, 400); });
    cases.check(name + ", tail, fp32 grad", [&] { return run<fp16, float>(activation, 1, 2062); });
    cases.check(name + ", several blocks", [&] { return run<bf16, float>(activation, 9, 1200); });
    cases.check(name + ", several rounds", [&] { return run<bf16, bf16>(activation, 7, 1800, {1, 0, 0}); });
    cases.check(name + ", fp32", [&] { return run<float, float>(activation, 7, 26); });
    cases.check(name + ", fp16", [&] { return run<fp16, fp16>(activation, 2, 16); });
    for (int which = 0; which < 3; which++) {
      int offset[3] = {0, 0, 0};
      offset[which] = 1;
      cases.check(name + ", unaligned", [&] { return run<bf16, bf16>(activation, 5, 64, offset); });
    }
  }
  cases.check("nothing", [] {
    return message_of(activation_backward(
        {nullptr, nullptr, nullptr, DType::kFloat16, DType::kFloat16, 0, 8, Activation::gelu}, nullptr));
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("activation_backward", ak::test::Seeds(argc, argv, 2));
  ak::test::check_all(cases);
  return cases.finish();
}
