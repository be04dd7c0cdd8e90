// check_and_norm on the emulator: lists of mixed dtypes, sizes, alignments and non-finite elements, bit for bit against
// the same sum formed serially, under many schedules.
#include "kernels/check_and_norm.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

/// What the kernel should return, formed without it: the order of additions written down once more, thread after
/// thread.
struct Expected {
  double sum = 0;
  bool found = false;
  std::vector<double> slots;  // of all blocks of all launches
};

class Serial {
 public:
  Serial(const std::vector<GradRef>& grads, float inv_scale, int threads, int blocks, int places)
      : grads_(grads), inv_scale_(inv_scale), threads_(threads), blocks_(blocks), places_(places) {}

  Expected run() {
    std::vector<double> slots;
    std::vector<GradRef> launch;
    auto flush = [&] {
      for (int b = 0; b < blocks_; b++) slots.push_back(block(launch, b));
      launch.clear();
    };
    for (const GradRef& g : grads_) {
      if (g.numel == 0) continue;
      launch.push_back(g);
      if (static_cast<int>(launch.size()) == places_) flush();
    }
    if (!launch.empty() || slots.empty()) flush();
    std::vector<double> per_thread(static_cast<size_t>(threads_));
    for (size_t i = 0; i < slots.size(); i++) per_thread[i % per_thread.size()] += slots[i];
    return {tree(per_thread), found_, slots};
  }

 private:
  double block(const std::vector<GradRef>& list, int b) {
    std::vector<double> per_thread(static_cast<size_t>(threads_));
    int64_t index = 0;
    for (const GradRef& g : list) {
      for (int64_t begin = 0; begin < g.numel; begin += kChunk, index++) {
        if (index % blocks_ != b) continue;
        const int64_t count = std::min<int64_t>(kChunk, g.numel - begin);
        for (int t = 0; t < threads_; t++) {
          auto& sum = per_thread[static_cast<size_t>(t)];
          switch (g.dtype) {
            case DType::kFloat16:
              sum += share(static_cast<const fp16*>(g.data) + begin, count, t);
              break;
            case DType::kBFloat16:
              sum += share(static_cast<const bf16*>(g.data) + begin, count, t);
              break;
            case DType::kFloat32:
              sum += share(static_cast<const float*>(g.data) + begin, count, t);
              break;
            case DType::kFloat64:
              sum += share(static_cast<const double*>(g.data) + begin, count, t);
              break;
          }
        }
      }
    }
    return tree(per_thread);
  }

  /// Thread t's elements in their order: one of those before the first 16-byte boundary, one of those after the last,
  /// then its vectors.
  template <class T>
  double share(const T* p, int64_t count, int t) {
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
    if constexpr (std::is_same_v<T, double>) {
      double sum = 0;
      for (int64_t i : order) {
        const double x = unscale(p[i], inv_scale_);
        found_ |= !(x - x == 0);
        sum += x * x;
      }
      return sum;
    } else {
      float sum = 0;
      for (int64_t i : order) {
        const float x = unscale(to_float(p[i]), inv_scale_);
        found_ |= !(x - x == 0);
        sum = fma(x, x, sum);
      }
      return sum;
    }
  }

  /// Warps add by exchanging with the lane 16, 8, 4, 2, 1 away; the block adds its warps in order.
  double tree(std::vector<double> x) const {
    double total = 0;
    for (size_t warp = 0; warp < x.size(); warp += 32) {
      for (size_t step = 16; step > 0; step /= 2) {
        for (size_t lane = 0; lane < step; lane++) x[warp + lane] += x[warp + lane + step];
      }
      total = warp == 0 ? x[0] : total + x[warp];
    }
    return total;
  }

  const std::vector<GradRef>& grads_;
  float inv_scale_;
  int threads_, blocks_, places_;
  bool found_ = false;
};

using List = GradList<const void>;

/// Runs `kThreads` threads with `kPlaces` tensors a launch; "" or what is wrong.
template <int kThreads, int kPlaces>
std::string compare(const List& list, const float* scale_value, int blocks) {
  using Args = GradListArgs<const void, kPlaces>;
  const int launches = norm_launches<Args>(list.grads);
  const size_t scratch_bytes = kNormScratchZeroed + static_cast<size_t>(launches * blocks) * 12;
  emu::Buffer<uint32_t> scratch("scratch", scratch_bytes / 4);
  for (size_t i = 0; i < kNormScratchZeroed / 4; i++) scratch.set(i, 0);
  emu::Buffer<float> scale("grad_scale", 1), sum_sq("sum_sq", 1), found_inf("found_inf", 1);
  if (scale_value) scale.set(0, *scale_value);
  std::vector<std::vector<char>> before;
  for (auto& b : list.buffers) before.push_back(b->bytes());

  const Status status =
      detail::check_and_norm_on<kThreads, Args>(blocks, list.grads, scale_value ? scale.data() : nullptr,
                                                scratch.data(), sum_sq.data(), found_inf.data(), nullptr);
  if (!status.ok()) return status.message;
  const float inv_scale = scale_value ? inverse_scale(*scale_value) : 1.0f;
  const Expected expected = Serial(list.grads, inv_scale, kThreads, blocks, kPlaces).run();
  const float want = static_cast<float>(expected.sum);
  const bool same = bits_of(sum_sq[0]) == bits_of(want) || (is_nan(sum_sq[0]) && is_nan(want));
  if (!same) return "sum_sq is " + std::to_string(sum_sq[0]) + ", expected " + std::to_string(want);
  // The last rounding hides in which order doubles were added; the slots show it.
  const auto* slots = reinterpret_cast<const double*>(scratch.data() + kNormScratchZeroed / sizeof(uint32_t));
  if (expected.slots.size() != static_cast<size_t>(launches * blocks)) return "wrong number of launches";
  for (size_t i = 0; i < expected.slots.size(); i++) {
    const bool nan = std::isnan(slots[i]) && std::isnan(expected.slots[i]);
    if (!nan && bits_of(slots[i]) != bits_of(expected.slots[i])) return "slot " + std::to_string(i) + " differs";
  }
  if (found_inf[0] != (expected.found ? 1.0f : 0.0f)) return "found_inf is " + std::to_string(found_inf[0]);
  if (scratch[0] != 0) return "the counter of finished blocks was left at " + std::to_string(scratch[0]);
  for (size_t i = 0; i < list.buffers.size(); i++) {
    if (list.buffers[i]->bytes() != before[i]) return "grads[" + std::to_string(i) + "] was changed";
  }
  for (const std::string& damage : {scratch.check_red_zones(), sum_sq.check_red_zones(), found_inf.check_red_zones()}) {
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
    const std::string title = "random list " + std::to_string(number);
    cases.check(title + ", 3 tensors a launch",
                [&] { return compare<64, 3>(list, scaled ? &scale : nullptr, blocks); });
    cases.check(title + ", one launch", [&] { return compare<32, 16>(list, &scale, blocks); });
  }
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
      return compare<64, 2>(list, nullptr, 2);
    });
  }
  // More slots than threads: each thread of the last block looks at several, and the first of them counts too.
  {
    List list;
    for (int i = 0; i < 20; i++) list.add(DType::kFloat16, 3, 0);
    Rng rng(7);
    list.fill(rng);
    list.buffers[0]->set(1, NAN);
    cases.check("non-finite element in the first of 40 slots", [&] { return compare<32, 1>(list, nullptr, 2); });
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

/// As the package calls it: the shipped instance and its own scratch size, from no element at all to several launches.
void shipped_instance(Cases& cases) {
  for (int tensors : {0, 1, 3, kGradListTensors, kGradListTensors + 2}) {
    List list = list_of<const void>(tensors);
    cases.check("shipped instance, " + std::to_string(tensors) + " tensors", [&]() -> std::string {
      emu::Buffer<char> scratch("scratch", check_and_norm_scratch_bytes(list.grads));
      for (size_t i = 0; i < kNormScratchZeroed; i++) scratch.set(i, 0);
      emu::Buffer<float> sum_sq("sum_sq", 1), found_inf("found_inf", 1);
      const Status status =
          check_and_norm(list.grads, nullptr, scratch.data(), sum_sq.data(), found_inf.data(), nullptr);
      if (!status.ok()) return status.message;
      const int blocks = device_sm_count() * kNormBlocksPerSm;
      const Expected expected = Serial(list.grads, 1.0f, kNormThreads, blocks, kGradListTensors).run();
      if (sum_sq[0] != static_cast<float>(expected.sum)) return "wrong sum_sq";
      return found_inf[0] == 0.0f ? "" : "wrong found_inf";
    });
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("check_and_norm", ak::test::Seeds(argc, argv, 4));
  ak::test::random_lists(cases);
  ak::test::non_finite(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
