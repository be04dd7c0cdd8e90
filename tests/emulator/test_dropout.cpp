// dropout on the emulator: types, alignments, tails and places, bit for bit against csrc/dropout/formula.h.
#include "dropout/dropout.cu"
#include "emulator/harness.h"

namespace ak::test {
namespace {

/// `offset`: elements in front of x, residual and out, which so lose their alignment.
template <class X, class R, class Out>
std::string run(size_t n, double p, bool adds, const int (&offset)[3] = {0, 0, 0}) {
  emu::options().sm_count = 1;
  emu::Random random{n};
  const auto draw = [&] { return (static_cast<float>(random.below(257)) - 128) / 16; };
  emu::Buffer<X> x("x", n, offset[0]);
  emu::Buffer<R> residual("residual", n, offset[1]);
  emu::Buffer<Out> out("out", n, offset[2]);
  emu::Buffer<int64_t> seed("seed", 1, 0);
  seed.set(0, 0x7edcba9876543210);
  for (size_t i = 0; i < n; i++) {
    x.set(i, round_to<X>(draw()));
    residual.set(i, round_to<R>(draw()));
  }
  const DropoutRate rate = dropout_rate(p);
  const Dropout problem{x.data(),   adds ? residual.data() : nullptr, seed.data(), out.data(), kType<X>, kType<R>,
                        kType<Out>, static_cast<int64_t>(n),          rate};
  const std::string error = message_of(dropout(problem, nullptr));
  if (!error.empty()) return error;
  for (size_t i = 0; i < n; i++) {
    const uint32_t word = philox4x32_10({{static_cast<uint32_t>(i / 4), 0, 0, 0}}, 0x7edcba9876543210).word[i % 4];
    const bool kept = (word >> 8) >= p * 0x1p24;
    const float scaled = kept ? to_float(x[i]) * static_cast<float>(1 / (1 - p)) : 0.0f;
    const float want = to_float(round_to<Out>(scaled + (adds ? to_float(residual[i]) : 0.0f))), got = to_float(out[i]);
    if (bits_of(got) != bits_of(want)) return emu::format("out[%zu] is %.9g, expected %.9g", i, got, want);
  }
  return out.check_written();
}

void check_all(Cases& cases) {
  for (const double p : {0.125, 0.5, 0.75}) {
    const std::string of = ", p = " + std::to_string(p);
    cases.check("whole vectors" + of, [=] { return run<bf16, float, float>(2400, p, true); });
    cases.check("tail" + of, [=] { return run<fp16, bf16, bf16>(2051, p, true); });
    cases.check("several rounds" + of, [=] { return run<bf16, float, fp16>(25003, p, true); });
    cases.check("nothing added" + of, [=] { return run<float, float, bf16>(1030, p, false); });
    cases.check("a few" + of, [=] { return run<float, fp16, float>(5, p, true); });
    for (int which = 0; which < 3; which++) {
      int offset[3] = {0, 0, 0};
      offset[which] = 1;
      cases.check("unaligned" + of, [&] { return run<bf16, bf16, bf16>(160, p, true, offset); });
    }
  }
  cases.check("nothing kept", [] {
    const DropoutRate rate = dropout_rate(1.0);
    return rate.threshold == 1u << 24 && dropped_out(2.0f, 0xffffffffu, rate) == 0.0f ? "" : "something is kept";
  });
  cases.check("everything kept", [] {
    const DropoutRate rate = dropout_rate(0.0);
    return dropped_out(2.0f, 0u, rate) == 2.0f ? "" : "something is dropped";
  });
  cases.check("groups beyond 2^32", [] {
    const Philox4 low = dropout_bits(1, 5), high = dropout_bits(1, 5 + (uint64_t{1} << 32));
    return low.word[0] != high.word[0] ? "" : "places 2^34 elements apart share their bits";
  });
  cases.check("nothing", [] { return message_of(dropout({}, nullptr)); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("dropout", ak::test::Seeds(argc, argv, 2));
  ak::test::check_all(cases);
  return cases.finish();
}
