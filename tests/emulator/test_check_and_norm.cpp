// check_and_norm on the emulator with more slots than a block has threads: each thread of the last block looks at
// several, and the first of them counts too. tests/ops has everything else.
#include <cmath>
#include <vector>

#include "emulator/harness.h"
#include "gradients/check_and_norm.cu"

namespace ak::test {
namespace {

std::string nan_in_a_slot(size_t at, Norm norm) {
  using Args = GradListArgs<const void, 1>;  // a launch for each tensor
  constexpr int kTensors = 40, kBlocks = 2, kThreads = 32;
  emu::Buffer<float> bad("bad", std::vector<float>{NAN, 1.0f}), good("good", std::vector<float>{1.0f, 2.0f});
  std::vector<GradRef> grads(kTensors, {good.data(), 2, DType::kFloat32});
  if (at < kTensors) grads[at].data = bad.data();
  emu::Buffer<double> scratch("scratch", (static_cast<size_t>(norm_launches<Args>(grads) * kBlocks) * 12 + 7) / 8);
  emu::Buffer<uint32_t> counter("blocks_done", 1);
  counter.set(0, 0);
  emu::Buffer<float> result("result", 1), found_inf("found_inf", 1);
  const Status status = detail::check_and_norm_on<kThreads, Args>(
      kBlocks, grads, nullptr, norm, scratch.data(), counter.data(), result.data(), found_inf.data(), nullptr);
  if (!status.ok()) return status.message;
  const float want = norm == Norm::kLargest ? 2.0f : 5.0f * kTensors;
  if (at < kTensors ? !std::isnan(result[0]) : result[0] != want) return emu::format("the norm is %g", result[0]);
  return found_inf[0] == (at < kTensors ? 1.0f : 0.0f) ? "" : emu::format("found_inf is %g", found_inf[0]);
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using ak::Norm;
  ak::test::Cases cases("check_and_norm", ak::test::Seeds(argc, argv, 4));
  for (const size_t at : {0, 1, 31, 32, 39, 40}) {
    for (const Norm norm : {Norm::kLargest, Norm::kSumOfSquares})
      cases.check("NaN in slot " + std::to_string(at), [=] { return ak::test::nan_in_a_slot(at, norm); });
  }
  return cases.finish();
}
