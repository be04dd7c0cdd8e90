// activation_backward on the emulator: activations, types, alignments and tails, bit for bit against the formula; sums
// of columns, bit for bit against column_sums.
#include "activation/backward.cu"
#include "activation/name.h"
#include "column_sums/column_sums.cu"
#include "emulator/harness.h"
#include "gemm/column_sums.cu"

namespace ak::test {
namespace {

/// The call's sums, against those of its result.
std::string same_sums(const ActivationBackward& call, const emu::Buffer<float>& sums) {
  const size_t columns = static_cast<size_t>(call.columns);
  emu::Buffer<float> expected("expected", columns), slots("slots", ColumnStrips::kBlocks * columns);
  ColumnSums own = sums_of(call);
  own.sums = expected.data(), own.slots = slots.data();
  const std::string error = message_of(column_sums(own, nullptr));
  if (!error.empty()) return error;
  for (size_t i = 0; i < columns; i++) {
    if (bits_of(sums[i]) != bits_of(expected[i]))
      return emu::format("sums[%zu] is %.9g, expected %.9g", i, sums[i], expected[i]);
  }
  return sums.check_red_zones();
}

/// `offset`: elements in front of grad, z and out, which so lose their alignment.
template <class Z, class G>
std::string run(Activation activation, int rows, int columns, const int (&offset)[3] = {0, 0, 0},
                bool with_sums = false) {
  emu::options().sm_count = 1;
  const bool gated = is_gated(activation);
  const size_t n = static_cast<size_t>(rows) * columns, of_grad = gated ? n / 2 : n, half = columns / 2;
  emu::Random random{n};
  const auto draw = [&] { return (static_cast<float>(random.below(257)) - 128) / 16; };
  emu::Buffer<G> grad("grad", of_grad, offset[0]);
  emu::Buffer<Z> z("z", n, offset[1]), out("out", n, offset[2]);
  for (size_t i = 0; i < of_grad; i++) grad.set(i, round_to<G>(draw()));
  for (size_t i = 0; i < n; i++) z.set(i, round_to<Z>(draw()));
  ActivationBackward call{grad.data(), z.data(), out.data(), kType<G>, kType<Z>, rows, columns, activation};
  const int64_t shares = ColumnStrips(rows, columns).shares;
  emu::Buffer<float> sums("sums", with_sums ? columns : 0), slots("slots", shares > 1 ? shares * columns : 0);
  if (with_sums) call.sums = sums.data(), call.slots = slots.data();
  const std::string error = message_of(activation_backward(call, nullptr));
  if (!error.empty()) return error;
  if (with_sums) {
    const std::string wrong = same_sums(call, sums);
    if (!wrong.empty()) return wrong;
  }
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

template <class Z, class G = Z>
std::string run_with_sums(Activation activation, int rows, int columns, const int (&offset)[3] = {0, 0, 0}) {
  return run<Z, G>(activation, rows, columns, offset, true);
}

void check_sums(Cases& cases) {
  // Around the rows of a team, of a round and of two shares; around the columns of a strip and two.
  for (const int rows : {1, 8, 17, 65, 300}) {
    for (const int columns : {8, 40, 264}) {
      const std::string name = "sums of " + std::to_string(rows) + " x " + std::to_string(columns);
      cases.check(name, [=] { return run_with_sums<bf16>(Activation::gelu, rows, columns); });
    }
  }
  for (int i = 0; i < kActivations; i++) {
    const Activation activation = static_cast<Activation>(i);
    const std::string name = std::string("sums, ") + kActivationNames[i];
    cases.check(name, [=] { return run_with_sums<fp16>(activation, 70, 80); });
    cases.check(name + ", odd columns", [=] { return run_with_sums<bf16>(activation, 70, 42); });
    cases.check(name + ", fp32", [=] { return run_with_sums<float>(activation, 70, 40); });
    cases.check(name + ", fp32 grad", [=] { return run_with_sums<bf16, float>(activation, 70, 40); });
    for (int which = 0; which < 3; which++) {
      int offset[3] = {0, 0, 0};
      offset[which] = 1;
      cases.check(name + ", unaligned", [&] { return run_with_sums<bf16>(activation, 9, 64, offset); });
    }
  }
  cases.check("sums of no rows", [] { return run_with_sums<bf16>(Activation::gelu, 0, 40); });
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
  check_sums(cases);
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
