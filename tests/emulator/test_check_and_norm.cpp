// check_and_norm on the emulator: lists of mixed dtypes, sizes, alignments and non-finite elements, bit for bit against
// the same sum formed serially, under many schedules.
#include <sstream>

#include "check_and_norm_model.h"

namespace ak::test {
namespace {

using List = GradList<const void>;

std::vector<std::vector<char>> bytes_of_all(const List& list) {
  std::vector<std::vector<char>> all;
  for (auto& b : list.buffers) all.push_back(b->bytes());
  return all;
}

std::string wrong_result(const std::string& what, const Expected& want, Norm norm, float result, float found_inf) {
  if (!same_bits(result, want.norm(norm))) {
    return what + " is " + std::to_string(result) + ", expected " + std::to_string(want.norm(norm));
  }
  return found_inf == (want.found ? 1.0f : 0.0f) ? "" : "found_inf of " + what + " is " + std::to_string(found_inf);
}

/// Runs `kThreads` threads with `kPlaces` tensors a launch; "" or what is wrong.
template <int kThreads, int kPlaces>
std::string compare(const List& list, const float* scale_value, int blocks, Norm norm = Norm::kSumOfSquares) {
  using Args = GradListArgs<const void, kPlaces>;
  const int launches = norm_launches<Args>(list.grads);
  emu::Buffer<double> scratch("scratch", (static_cast<size_t>(launches * blocks) * 12 + 7) / 8);
  emu::Buffer<uint32_t> counter("blocks_done", 1);
  counter.set(0, 0);
  emu::Buffer<float> scale("grad_scale", 1), result("result", 1), found_inf("found_inf", 1);
  if (scale_value) scale.set(0, *scale_value);
  const auto before = bytes_of_all(list);

  const Status status = detail::check_and_norm_on<kThreads, Args>(
      blocks, list.grads, scale_value ? scale.data() : nullptr, norm, scratch.data(), counter.data(), result.data(),
      found_inf.data(), nullptr);
  if (!status.ok()) return status.message;
  Serial serial(list.grads, scale_value ? inverse_scale(*scale_value) : 1.0f, kThreads, blocks, kPlaces);
  const std::string wrong = wrong_result("the norm", serial.run(), norm, result[0], found_inf[0]);
  if (!wrong.empty()) return wrong;
  // The last rounding hides in which order doubles were added; the slots show it.
  const std::vector<Expected> expected = serial.slots();
  if (expected.size() > static_cast<size_t>(launches * blocks)) return "more slots than there is scratch for";
  for (size_t i = 0; i < expected.size(); i++) {
    if (!same_bits(scratch[i], expected[i].sum)) return "slot " + std::to_string(i) + " differs";
  }
  if (counter[0] != 0) return "the counter of finished blocks was left at " + std::to_string(counter[0]);
  if (bytes_of_all(list) != before) return "a gradient was changed";
  for (const std::string& damage : {scratch.check_red_zones(), result.check_red_zones(), found_inf.check_red_zones()}) {
    if (!damage.empty()) return damage;
  }
  return "";
}

/// The same for the result of each tensor.
template <int kThreads, int kPlaces>
std::string compare_per_tensor(const List& list, const float* scale_value, int blocks, Norm norm) {
  using Args = PlacedGradListArgs<const void, kPlaces>;
  const size_t n = list.grads.size();
  const LaunchPlan<Args, GradRef> plan(list.grads, blocks);
  emu::Buffer<double> scratch("scratch", (most_of(plan, per_tensor_slots<decltype(Args::map)>) * 12 + 7) / 8);
  emu::Buffer<float> scale("grad_scale", 1), results("results", n), found_infs("found_infs", n);
  if (scale_value) scale.set(0, *scale_value);
  const auto before = bytes_of_all(list);
  for (size_t i = 0; i < n; i++) {
    if (list.grads[i].numel > 0) continue;
    results.set(i, -1);
    found_infs.set(i, -1);
  }
  const Status status = detail::check_and_norm_per_tensor_on<kThreads, Args>(
      blocks, list.grads, scale_value ? scale.data() : nullptr, norm, scratch.data(), results.data(), found_infs.data(),
      nullptr);
  if (!status.ok()) return status.message;
  Serial serial(list.grads, scale_value ? inverse_scale(*scale_value) : 1.0f, kThreads, blocks, kPlaces);
  const std::vector<Expected> expected = serial.per_tensor();
  for (size_t i = 0; i < n; i++) {
    if (list.grads[i].numel == 0) {
      if (results[i] != -1 || found_infs[i] != -1) return "the result of an empty tensor was written";
      continue;
    }
    const std::string wrong =
        wrong_result("the norm of grads[" + std::to_string(i) + "]", expected[i], norm, results[i], found_infs[i]);
    if (!wrong.empty()) return wrong;
  }
  if (bytes_of_all(list) != before) return "a gradient was changed";
  for (const std::string& damage :
       {scratch.check_red_zones(), results.check_red_zones(), found_infs.check_red_zones()}) {
    if (!damage.empty()) return damage;
  }
  return "";
}

void random_lists(Cases& cases) {
  const std::vector<float> scales = {1.0f, 8.0f, 3.0f, 65536.0f, 0x1p-20f};
  for (uint64_t number = 0; number < 40; number++) {
    Rng rng(number);
    const List list = random_list<const void>(rng, 1 + static_cast<int>(rng() % 11), number % 4 == 0);
    const float scale = scales[rng() % scales.size()];
    const int blocks = 1 + static_cast<int>(rng() % 4);
    const bool scaled = rng() % 3 != 0;
    const Norm norm = number % 3 == 0 ? Norm::kLargest : Norm::kSumOfSquares;
    const std::string title = "random list " + std::to_string(number);
    cases.check(title + ", 3 tensors a launch",
                [&] { return compare<64, 3>(list, scaled ? &scale : nullptr, blocks, norm); });
    cases.check(title + ", one launch", [&] { return compare<32, 16>(list, &scale, blocks, norm); });
    if (number % 2 == 0) {
      cases.check(title + ", each tensor, 3 a launch",
                  [&] { return compare_per_tensor<64, 3>(list, scaled ? &scale : nullptr, blocks, norm); });
    } else {
      cases.check(title + ", each tensor, one launch",
                  [&] { return compare_per_tensor<32, 16>(list, &scale, blocks, norm); });
    }
  }
}

/// Tensors of many runs: blocks meet several of one tensor, and more blocks meet it than a warp has lanes.
void long_tensors(Cases& cases) {
  Rng rng(5);
  List list;
  list.add(DType::kFloat16, 3, 0);
  list.add(DType::kBFloat16, 40 * kRunUnits * kUnit + 5, 1);
  list.add(DType::kFloat16, kRunUnits * kUnit + 1, 0);
  list.add(DType::kFloat32, 9, 3);
  // Mostly zeros, to be quick; the numbers that decide stand in some units.
  for (auto& b : list.buffers) {
    for (size_t i = 0; i < b->size(); i++) b->set(i, i % 997 == 5 ? symmetric(rng, 4.0f) : 0.0);
  }
  for (int blocks : {2, 37}) {
    const Norm norm = blocks == 2 ? Norm::kSumOfSquares : Norm::kLargest;
    cases.check("long tensors, " + std::to_string(blocks) + " blocks",
                [&] { return compare_per_tensor<32, 4>(list, nullptr, blocks, norm); });
  }
}

/// Squares below fp32's range: a share of them is read again, one of zeros is not, and large ones are not disturbed.
void small_values(Cases& cases) {
  for (uint64_t number = 0; number < 24; number++) {
    Rng rng(500 + number);
    List list;
    for (DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kFloat16}) {
      list.add(dtype, 1 + rng() % 3000, rng() % 5);
    }
    for (auto& b : list.buffers) {
      const double bound = std::ldexp(1.0, -50 - static_cast<int>(rng() % 60));
      for (size_t i = 0; i < b->size(); i++) b->set(i, i % 7 < number % 8 ? 0.0 : symmetric(rng, 1.0f) * bound);
    }
    const std::vector<float> scales = {1.0f, 65536.0f, 0x1p-20f, 0x1p-90f, 0x1p-100f, 0x1p-127f};
    const float scale = scales[number % scales.size()];
    cases.check("small values " + std::to_string(number), [&] { return compare<64, 4>(list, &scale, 2); });
    cases.check("small values " + std::to_string(number) + ", each tensor",
                [&] { return compare_per_tensor<64, 4>(list, &scale, 2, Norm::kSumOfSquares); });
  }
  // By hand: 1,000 squares of 2^-140 are 1.5e-39 together, and each alone is nothing to speak of in fp32.
  List list;
  list.add(DType::kBFloat16, 1000, 3);
  for (size_t i = 0; i < 1000; i++) list.buffers[0]->set(i, 0x1p-80);
  cases.check("1,000 squares of 2^-160", [&]() -> std::string {
    const Expected want = Serial(list.grads, 1.0f, 64, 2, 4).run();
    if (want.sum != 1000 * 0x1p-160) return "the test itself is wrong";
    return compare<64, 4>(list, nullptr, 2);
  });
}

/// One inf, -inf or NaN must be found, wherever it is, and nothing else may be.
void non_finite(Cases& cases) {
  for (uint64_t number = 0; number < 120; number++) {
    Rng rng(1000 + number);
    const auto dtype = static_cast<DType>(number % 4);
    const size_t n = number % 3 == 0 ? 37 : 1 + rng() % 700;
    const size_t at = number % 3 == 0 ? number / 3 % n : rng() % n;
    List list;
    list.add(DType::kFloat32, 5, 0);
    list.add(dtype, n, number % 5);
    list.fill(rng);
    const double bad[] = {INFINITY, -INFINITY, NAN};
    list.buffers[1]->set(at, bad[rng() % 3]);
    cases.check("non-finite element " + std::to_string(at) + " of " + std::to_string(n), [&]() -> std::string {
      if (!Serial(list.grads, 1.0f, 64, 2, 2).run().found) return "the test itself is wrong";
      const std::string wrong = compare_per_tensor<64, 2>(list, nullptr, 2, Norm::kLargest);
      return wrong.empty() ? compare<64, 2>(list, nullptr, 2, number % 2 ? Norm::kLargest : Norm::kSumOfSquares)
                           : wrong;
    });
  }
  // More slots than threads: each thread of the last block looks at several, and the first of them counts too.
  {
    List list;
    for (int i = 0; i < 40; i++) list.add(DType::kFloat16, 3, 0);
    Rng rng(7);
    list.fill(rng);
    list.buffers[0]->set(1, NAN);
    cases.check("non-finite element in the first of 40 slots", [&] { return compare<32, 1>(list, nullptr, 2); });
  }
  // Finite in double, infinite in fp32: the norm is, and nothing is to be skipped.
  for (Norm norm : {Norm::kSumOfSquares, Norm::kLargest}) {
    List list;
    list.add(DType::kFloat64, 40, 1);
    for (size_t i = 0; i < 40; i++) list.buffers[0]->set(i, i == 33 ? -1e60 : 1.0);
    cases.check("1e60 in fp64", [&]() -> std::string {
      const Expected expected = Serial(list.grads, 1.0f, 32, 1, 1).run();
      if (expected.found || std::isfinite(expected.norm(norm))) return "the test itself is wrong";
      const std::string wrong = compare_per_tensor<32, 1>(list, nullptr, 1, norm);
      return wrong.empty() ? compare<32, 1>(list, nullptr, 1, norm) : wrong;
    });
  }
  // A finite gradient that only the scale makes infinite, and finite gradients whose sum is infinite: a skip, and none.
  for (float scale : {0x1p-30f, 1.0f}) {
    List list;
    list.add(DType::kFloat32, 3, 0);
    for (size_t i = 0; i < 3; i++) list.buffers[0]->set(i, 1e30);
    cases.check("1e30 with a scale of " + std::to_string(scale), [&]() -> std::string {
      const Expected expected = Serial(list.grads, inverse_scale(scale), 32, 1, 1).run();
      if (expected.found != (scale < 1) || std::isfinite(static_cast<float>(expected.sum)))
        return "the test itself is wrong";
      return compare<32, 1>(list, &scale, 1);
    });
  }
}

/// "" if the log holds launches of these grids, of few bytes of arguments or of many.
std::string wrong_launches(const std::vector<int>& grids, bool few) {
  std::istringstream log(emu::launch_log());
  std::string line;
  size_t seen = 0;
  for (; std::getline(log, line); seen++) {
    const std::string before = "arguments ";
    const int bytes = std::stoi(line.substr(line.find(before) + before.size()));
    const std::string grid = seen < grids.size() ? " grid " + std::to_string(grids[seen]) + " " : "none";
    if (line.find(grid) == std::string::npos || (bytes <= kFewArgumentBytes) != few) {
      return "not as planned: " + line;
    }
  }
  return seen == grids.size() ? "" : std::to_string(seen) + " launches";
}

/// As the package calls it: the shipped instances and their own scratch sizes, from no element at all to several
/// launches.
void shipped_instance(Cases& cases) {
  const int blocks = device_sm_count() * kNormBlocksPerSm;
  // A short list is that of a launch of few arguments; whether it is, the result does not show.
  for (int tensors :
       {0, 1, 3, kShortGradListTensors, kShortGradListTensors + 1, kGradListTensors, kGradListTensors + 2}) {
    List list = list_of<const void>(tensors);
    cases.check("shipped instance, " + std::to_string(tensors) + " tensors", [&]() -> std::string {
      emu::Buffer<char> scratch("scratch", check_and_norm_scratch_bytes(list.grads));
      emu::Buffer<uint32_t> counter("blocks_done", 1);
      counter.set(0, 0);
      emu::Buffer<float> result("result", 1), found_inf("found_inf", 1);
      emu::launch_log().clear();
      const Status status = check_and_norm(list.grads, nullptr, Norm::kSumOfSquares, scratch.data(), counter.data(),
                                           result.data(), found_inf.data(), nullptr);
      if (!status.ok()) return status.message;
      const bool is_short = tensors <= kShortGradListTensors;
      // Every tensor is a unit.
      std::vector<int> grids = {std::clamp(tensors, 1, blocks)};
      if (tensors > kGradListTensors) grids.push_back(tensors - kGradListTensors);
      const std::string wrong = wrong_launches(grids, is_short);
      if (!wrong.empty()) return wrong;
      const int places = is_short ? kShortGradListTensors : kGradListTensors;
      const Expected expected = Serial(list.grads, 1.0f, kNormThreads, blocks, places).run();
      return wrong_result("the norm", expected, Norm::kSumOfSquares, result[0], found_inf[0]);
    });
  }
  for (int tensors : {1, 3, kPlacedGradListTensors + 2}) {
    List list = list_of<const void>(tensors);
    list.add(DType::kFloat32, 0, 0);
    cases.check("shipped instance, each of " + std::to_string(tensors) + " tensors", [&]() -> std::string {
      const size_t n = list.grads.size();
      emu::Buffer<char> scratch("scratch", check_and_norm_per_tensor_scratch_bytes(list.grads));
      emu::Buffer<float> results("results", n), found_infs("found_infs", n);
      const Status status = check_and_norm_per_tensor(list.grads, nullptr, Norm::kLargest, scratch.data(),
                                                      results.data(), found_infs.data(), nullptr);
      if (!status.ok()) return status.message;
      const auto expected = Serial(list.grads, 1.0f, kNormThreads, blocks, kPlacedGradListTensors).per_tensor();
      for (size_t i = 0; i + 1 < n; i++) {
        const std::string title = "the norm of grads[" + std::to_string(i) + "]";
        const std::string wrong = wrong_result(title, expected[i], Norm::kLargest, results[i], found_infs[i]);
        if (!wrong.empty()) return wrong;
      }
      return "";
    });
  }
  // An empty list per tensor needs no launch and no memory.
  List nothing;
  nothing.add(DType::kFloat32, 0, 0);
  cases.check("shipped instance, each of no tensors", [&]() -> std::string {
    if (check_and_norm_per_tensor_scratch_bytes(nothing.grads) != 0) return "scratch for nothing";
    return message_of(
        check_and_norm_per_tensor(nothing.grads, nullptr, Norm::kSumOfSquares, nullptr, nullptr, nullptr, nullptr));
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("check_and_norm", ak::test::Seeds(argc, argv, 4));
  ak::test::random_lists(cases);
  ak::test::long_tensors(cases);
  ak::test::small_values(cases);
  ak::test::non_finite(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
