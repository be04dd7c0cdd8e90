// cast_ on the emulator: lists of mixed pairs of dtypes, sizes, alignments and values, bit for bit against the same
// conversions one by one, under many schedules.
#include <cmath>

#include "cast/cast.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

struct Rounding {
  std::optional<uint64_t> seed;
  std::optional<float> step;
};

template <class T>
uint16_t rounded(float x, const Rounding& rounding, uint32_t index, size_t i) {
  if (!rounding.seed) return round_to<T>(x).bits;
  const auto count = static_cast<uint32_t>(rounding.step.value_or(0));
  const Philox4 bits = rounding_bits(*rounding.seed, count, index, i / 8);
  return round_stochastic<T>(x, random16(bits, static_cast<int>(i % 8), 0)).bits;
}

/// The pairs of a list with the buffers behind them.
struct CastList {
  std::vector<std::unique_ptr<AnyBuffer>> sources, destinations;
  std::vector<CastRef> casts;

  void add(Rng& rng, DType to, DType from, size_t n, size_t to_offset, size_t from_offset) {
    const std::string place = "[" + std::to_string(casts.size()) + "]";
    sources.push_back(std::make_unique<AnyBuffer>("sources" + place, from, n, from_offset));
    destinations.push_back(std::make_unique<AnyBuffer>("destinations" + place, to, n, to_offset));
    // Magnitudes that fp16 holds as normal and subnormal numbers, and some that it does not.
    for (size_t i = 0; i < n; i++) sources.back()->set(i, std::ldexp(symmetric(rng, 2.0f), -26 + int(rng() % 44)));
    casts.push_back({destinations.back()->data(), sources.back()->data(), static_cast<int64_t>(n), to, from});
  }

  std::string wrong(const Rounding& rounding) const {
    for (size_t k = 0; k < casts.size(); k++) {
      const AnyBuffer &source = *sources[k], &destination = *destinations[k];
      const std::string name = "destinations[" + std::to_string(k) + "]";
      for (size_t i = 0; i < source.size(); i++) {
        const float x = source.get(i);
        const auto index = static_cast<uint32_t>(k);
        bool same;
        switch (destination.dtype()) {
          case DType::kFloat16:
            same = destination.bits(i) == rounded<fp16>(x, rounding, index, i);
            break;
          case DType::kBFloat16:
            same = destination.bits(i) == rounded<bf16>(x, rounding, index, i);
            break;
          default:
            same = bits_of(destination.get(i)) == bits_of(x);
        }
        if (!same) return name + ": element " + std::to_string(i) + " of " + std::to_string(source.size());
      }
      for (const AnyBuffer* b : {&source, &destination}) {
        if (!b->check_red_zones().empty()) return name + ": " + b->check_red_zones();
      }
    }
    return "";
  }
};

CastList random_casts(Rng& rng, int tensors, bool large) {
  static const std::vector<int64_t> kSizes = {0, 1, 2, 7, 8, 9, 16, 31, 64, 65, 255, 512, 513, 1000, 4096};
  static const std::vector<int64_t> kLargeSizes = {kUnit - 1, kUnit, kUnit + 1, kRunUnits * kUnit + 1,
                                                   2 * kRunUnits * kUnit + 3};
  static const std::vector<int64_t> kOffsets = {0, 0, 0, 1, 2, 4, 5, 8};
  CastList list;
  for (int i = 0; i < tensors; i++) {
    const auto to = static_cast<DType>(rng() % 3), from = static_cast<DType>(rng() % 3);
    const int64_t n = large && i % 4 == 1 ? pick(rng, kLargeSizes) : pick(rng, kSizes);
    const auto offset = static_cast<size_t>(pick(rng, kOffsets));
    list.add(rng, to, from, static_cast<size_t>(n), offset, i % 3 ? offset : static_cast<size_t>(pick(rng, kOffsets)));
  }
  return list;
}

template <class Run>
std::string compare(const CastList& list, const Rounding& rounding, const Run& run) {
  emu::Buffer<float> step("step", 1);
  step.set(0, rounding.step.value_or(0));
  const Status status = run(list.casts, rounding, rounding.step ? step.data() : nullptr);
  return status.ok() ? list.wrong(rounding) : status.message;
}

template <int kThreads, int kPlaces>
auto small_instance(int blocks) {
  return [blocks](std::span<const CastRef> casts, const Rounding& rounding, const float* step) {
    using Args = CastListArgs<kPlaces>;
    if (rounding.seed) return detail::cast_on<kThreads, true, Args>(blocks, casts, *rounding.seed, step, nullptr);
    return detail::cast_on<kThreads, false, Args>(blocks, casts, 0, nullptr, nullptr);
  };
}

void random_lists(Cases& cases) {
  const std::vector<Rounding> roundings = {{}, {uint64_t{7} << 40 | 5, 3.0f}, {11, {}}};
  for (uint64_t number = 0; number < 30; number++) {
    const std::string title = "random list " + std::to_string(number);
    auto run = [&](auto instance, uint64_t salt) {
      Rng rng(2 * number + salt);
      const CastList list = random_casts(rng, 1 + static_cast<int>(rng() % 9), number % 4 == 0);
      return compare(list, roundings[number % 3], instance(1 + static_cast<int>(rng() % 4)));
    };
    cases.check(title + ", 3 pairs a launch", [&] { return run(small_instance<64, 3>, 0); });
    cases.check(title + ", one launch", [&] { return run(small_instance<32, 16>, 1); });
  }
}

void special_values(Cases& cases) {
  const float values[] = {0.0f, -0.0f, INFINITY, -INFINITY, 65519.0f, 65520.0f, -3.4e38f, 0x1p-25f, 0x1.8p-24f, 1e-45f};
  for (const bool stochastic : {false, true}) {
    cases.check(stochastic ? "special values, stochastic" : "special values", [&] {
      Rng rng(1);
      CastList list;
      for (int to = 0; to < 3; to++) list.add(rng, static_cast<DType>(to), DType::kFloat32, 30, 0, 0);
      for (auto& source : list.sources) {
        for (size_t i = 0; i < 30; i++) source->set(i, values[i % 10]);
      }
      return compare(list, stochastic ? Rounding{3, {}} : Rounding{}, small_instance<32, 4>(2));
    });
  }
}

/// As the package calls it, from no element at all to several launches.
void shipped_instance(Cases& cases) {
  for (int tensors : {0, 1, kCastListTensors, kCastListTensors + 2}) {
    for (const bool stochastic : {false, true}) {
      cases.check("shipped instance, " + std::to_string(tensors) + " pairs", [&] {
        Rng rng(static_cast<uint64_t>(tensors));
        CastList list;
        for (int i = 0; i < tensors; i++) {
          list.add(rng, DType::kBFloat16, DType::kFloat32, i % 70 ? 2 : 9000, static_cast<size_t>(i % 3), 0);
        }
        return compare(list, stochastic ? Rounding{3, 9.0f} : Rounding{},
                       [](std::span<const CastRef> casts, const Rounding& rounding, const float* step) {
                         return cast(casts, rounding.seed, step, nullptr);
                       });
      });
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("cast", ak::test::Seeds(argc, argv, 3));
  ak::test::random_lists(cases);
  ak::test::special_values(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
