// activation_forward on the emulator: activations, types, alignments and tails, bit for bit against the formula.
#include "activation/forward.cu"

#include <cmath>
#include <utility>

#include "activation/name.h"
#include "emulator/harness.h"

namespace ak::test {
namespace {

/// `offset`: elements in front of z and out, which so lose their alignment.
template <class Z>
std::string run(Activation activation, int rows, int columns, const int (&offset)[2] = {0, 0}) {
  emu::options().sm_count = 1;
  const bool gated = is_gated(activation);
  const size_t n = static_cast<size_t>(rows) * columns, half = columns / 2, of_out = gated ? n / 2 : n;
  emu::Random random{n};
  emu::Buffer<Z> z("z", n, offset[0]), out("out", of_out, offset[1]);
  for (size_t i = 0; i < n; i++) z.set(i, round_to<Z>((static_cast<float>(random.below(257)) - 128) / 16));
  const std::string error =
      message_of(activation_forward({z.data(), out.data(), kType<Z>, rows, columns, activation}, nullptr));
  if (!error.empty()) return error;
  for (size_t i = 0; i < of_out; i++) {
    const size_t gate = gated ? i / half * columns + i % half : i;
    const float want =
        gated ? swiglu(to_float(z[gate]), to_float(z[gate + half])) : activate(activation, to_float(z[i]));
    const float got = to_float(out[i]), rounded = to_float(round_to<Z>(want));
    if (bits_of(got) != bits_of(rounded)) return emu::format("out[%zu] is %.9g, expected %.9g", i, got, rounded);
  }
  return out.check_written();
}

/// As min.NaN and max.NaN of a GPU.
std::string smaller_and_larger() {
  for (const float x : {1.0f, NAN}) {
    for (const float y : {2.0f, NAN}) {
      const bool nan = is_nan(x) || is_nan(y);
      for (const auto& [a, b] : {std::pair(x, y), {y, x}}) {
        const float least = min_or_nan(a, b), most = max_or_nan(a, b);
        if (nan ? !is_nan(least) || !is_nan(most) : least != 1.0f || most != 2.0f)
          return emu::format("of %g and %g the smaller is %g, the larger %g", a, b, least, most);
      }
    }
  }
  return "";
}

void check_all(Cases& cases) {
  for (int i = 0; i < kActivations; i++) {
    const Activation activation = static_cast<Activation>(i);
    const std::string name = kActivationNames[i];
    cases.check(name + ", whole vectors", [&] { return run<bf16>(activation, 3, 400); });
    cases.check(name + ", tail", [&] { return run<fp16>(activation, 1, 2062); });
    cases.check(name + ", several blocks", [&] { return run<bf16>(activation, 9, 1200); });
    cases.check(name + ", a tail of one", [&] { return run<bf16>(activation, 7, 1800, {1, 0}); });
    cases.check(name + ", fp32", [&] { return run<float>(activation, 7, 26); });
    for (int which = 0; which < 2; which++) {
      int offset[2] = {0, 0};
      offset[which] = 1;
      cases.check(name + ", unaligned", [&] { return run<bf16>(activation, 5, 64, offset); });
    }
  }
  cases.check("the smaller and the larger number", smaller_and_larger);
  cases.check("a thousand blocks", [] { return run<bf16>(Activation::relu, 1024, 2048); });
  cases.check("nothing", [] {
    return message_of(activation_forward({nullptr, nullptr, DType::kFloat16, 0, 8, Activation::gelu}, nullptr));
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("activation_forward", ak::test::Seeds(argc, argv, 2));
  ak::test::check_all(cases);
  return cases.finish();
}
