// check_and_norm on the emulator: lists of mixed dtypes, sizes, alignments and non-finite elements, bit for bit against
// the same sum formed serially, under many schedules.
#include <sstream>

#include "gradients/check_and_norm.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

/// The expected contents of a slot or result, formed without the kernel: the order of additions written down once
/// more, thread after thread. The peak is kept as what it means.
struct Expected {
  double sum = 0;
  double largest = 0;  // NaN if there was one
  bool found = false;

  void join(const Expected& part) {
    sum += part.sum;
    see(part.largest);
    found |= part.found;
  }
  void see(double x) {
    if (!(std::fabs(x) <= largest)) largest = std::isnan(largest) ? largest : std::fabs(x);
  }
  float norm(Norm kind) const { return static_cast<float>(kind == Norm::kLargest ? largest : sum); }
};

bool same_bits(double a, double b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

class Serial {
 public:
  Serial(const std::vector<GradRef>& grads, float inv_scale, int threads, int blocks, int places)
      : grads_(grads), inv_scale_(inv_scale), threads_(threads), blocks_(blocks), places_(places) {}

  /// The slots of all blocks of all launches.
  std::vector<Expected> slots() {
    std::vector<Expected> slots;
    for (const auto& list : launches()) {
      const std::vector<std::vector<Piece>> runs = runs_of(list);
      const size_t blocks = grid_;
      for (size_t b = 0; b < blocks; b++) {
        std::vector<Piece> pieces;
        for (size_t r = b; r < runs.size(); r += blocks) pieces.insert(pieces.end(), runs[r].begin(), runs[r].end());
        slots.push_back(block(list, pieces));
      }
    }
    return slots;
  }
  Expected run() {
    const std::vector<Expected> all = slots();
    std::vector<Expected> per_thread(static_cast<size_t>(threads_));
    for (size_t i = 0; i < all.size(); i++) per_thread[i % per_thread.size()].join(all[i]);
    return tree(per_thread);
  }
  /// The result of each tensor, empty ones included: a warp adds up the blocks that met it.
  std::vector<Expected> per_tensor() {
    std::vector<Expected> results(grads_.size());
    size_t next = 0;
    for (const auto& launch : launches()) {
      const std::vector<std::vector<Piece>> runs = runs_of(launch);
      for (size_t g = 0; g < launch.size(); g++) {
        std::vector<std::vector<Piece>> of_block;  // in the order in which blocks meet the tensor
        size_t met = 0;
        for (const auto& run : runs) {
          for (const Piece& piece : run) {
            if (piece.tensor != g) continue;
            if (of_block.size() < grid_) of_block.emplace_back();
            of_block[met++ % grid_].push_back(piece);
          }
        }
        std::vector<Expected> lanes(32);
        for (size_t i = 0; i < of_block.size(); i++) lanes[i % 32].join(block(launch, of_block[i]));
        while (grads_[next].numel == 0) next++;
        results[next++] = tree(lanes);
      }
    }
    return results;
  }

 private:
  struct Piece {
    size_t tensor;
    int64_t begin, count;
  };

  /// The runs of a launch: units one after the other, as many in each run, or one less in the last ones. Sets the grid:
  /// as few blocks as have no more units than with all of them.
  std::vector<std::vector<Piece>> runs_of(const std::vector<GradRef>& list) {
    std::vector<Piece> units;
    for (size_t g = 0; g < list.size(); g++) {
      for (int64_t begin = 0; begin < list[g].numel; begin += kUnit) {
        units.push_back({g, begin, std::min<int64_t>(kUnit, list[g].numel - begin)});
      }
    }
    size_t of_block = 0;
    while (of_block * static_cast<size_t>(blocks_) < units.size()) of_block++;
    for (grid_ = 1; grid_ * of_block < units.size(); grid_++) {
    }
    size_t rounds = 0;
    while (rounds * kRunUnits < of_block) rounds++;
    std::vector<std::vector<Piece>> runs(grid_ * rounds);
    size_t next = 0;
    for (size_t r = 0; r < runs.size(); r++) {
      const size_t rest = runs.size() - r, count = (units.size() - next + rest - 1) / rest;
      for (const size_t end = next + count; next < end; next++) {
        const Piece& unit = units[next];
        if (!runs[r].empty() && runs[r].back().tensor == unit.tensor) {
          runs[r].back().count += unit.count;
        } else {
          runs[r].push_back(unit);
        }
      }
    }
    return runs;
  }

  std::vector<std::vector<GradRef>> launches() const {
    std::vector<std::vector<GradRef>> result;
    for (const GradRef& g : grads_) {
      if (g.numel == 0) continue;
      if (result.empty() || static_cast<int>(result.back().size()) == places_) result.emplace_back();
      result.back().push_back(g);
    }
    if (result.empty()) result.emplace_back();
    return result;
  }

  /// The slot of a block that reads these pieces.
  Expected block(const std::vector<GradRef>& list, const std::vector<Piece>& pieces) {
    std::vector<Expected> per_thread(static_cast<size_t>(threads_));
    for (const auto& [tensor, begin, count] : pieces) {
      const GradRef& g = list[tensor];
      for (int t = 0; t < threads_; t++) {
        auto& to = per_thread[static_cast<size_t>(t)];
        switch (g.dtype) {
          case DType::kFloat16:
            to.join(share(static_cast<const fp16*>(g.data) + begin, count, t));
            break;
          case DType::kBFloat16:
            to.join(share(static_cast<const bf16*>(g.data) + begin, count, t));
            break;
          case DType::kFloat32:
            to.join(share(static_cast<const float*>(g.data) + begin, count, t));
            break;
          case DType::kFloat64:
            to.join(share(static_cast<const double*>(g.data) + begin, count, t));
            break;
        }
      }
    }
    return tree(per_thread);
  }

  /// Thread t's elements in their order: one of those before the first 16-byte boundary, one of those after the last,
  /// then its vectors.
  template <class T>
  Expected share(const T* p, int64_t count, int t) {
    const int64_t wide = 16 / static_cast<int64_t>(sizeof(T));
    int64_t head = 0;
    while (head < count && reinterpret_cast<uintptr_t>(p + head) % 16 != 0) head++;
    const int64_t tail = head + (count - head) / wide * wide;
    std::vector<int64_t> order;
    if (t < head) order.push_back(t);
    if (tail + t < count) order.push_back(tail + t);
    for (int64_t i = head + t * wide; i < tail; i += threads_ * wide) {
      for (int64_t j = 0; j < wide; j++) order.push_back(i + j);
    }
    Expected result;
    if constexpr (std::is_same_v<T, double>) {
      for (int64_t i : order) {
        const double x = unscale(p[i], inv_scale_);
        result.found |= !(x - x == 0);
        result.see(static_cast<float>(x));
        result.sum += x * x;
      }
    } else {
      float sum = 0, lifted = 0;
      for (int64_t i : order) {
        const float x = unscale(to_float(p[i]), inv_scale_);
        const float y = unscale(to_float(p[i]), inv_scale_ * 0x1p32f);
        result.found |= !(x - x == 0);
        result.see(x);
        sum = fma(x, x, sum);
        lifted = fma(y, y, lifted);
      }
      result.sum = sum < 0x1p-120f && result.largest > 0 ? static_cast<double>(lifted) * 0x1p-64 : sum;
    }
    return result;
  }

  /// Warps add by exchanging with the lane 16, 8, 4, 2, 1 away; the block adds its warps in order.
  Expected tree(std::vector<Expected> x) const {
    for (size_t warp = 0; warp < x.size(); warp += 32) {
      for (size_t step = 16; step > 0; step /= 2) {
        for (size_t lane = 0; lane < step; lane++) x[warp + lane].join(x[warp + lane + step]);
      }
      if (warp > 0) x[0].join(x[warp]);
    }
    return x[0];
  }

  const std::vector<GradRef>& grads_;
  float inv_scale_;
  int threads_, blocks_, places_;
  size_t grid_ = 0;
};

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
