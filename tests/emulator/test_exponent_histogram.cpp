// exponent_histogram on the emulator: lists of mixed dtypes, sizes, alignments and values, against counts made one
// value at a time with frexp, under many schedules.
#include <cmath>

#include "gradients/exponent_histogram.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

using List = GradList<const void>;

/// The bin of a value, by the meaning of the bins and without the formula that the kernel has.
int bin_of(double value) {
  const float x = std::fabs(static_cast<float>(value));
  if (std::isnan(x)) return 279;
  if (std::isinf(x)) return 278;
  if (x == 0) return 0;
  return std::ilogb(x) + 150;
}

/// Values of many powers of two, and now and then one that is no finite number, or zero.
void fill_wide(List& list, Rng& rng) {
  const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 0x1p-149, 0x1.8p-149, 0x1p-126, 0x1.fffffep-127};
  for (auto& b : list.buffers) {
    for (size_t i = 0; i < b->size(); i++) {
      const double wide = std::ldexp(symmetric(rng, 1.0f), static_cast<int>(rng() % 300) - 160);
      b->set(i, rng() % 8 == 0 ? special[rng() % 9] : wide);
    }
  }
}

/// Calls `run(tensors, counts, largest)`; "" or what is wrong.
template <class Run>
std::string compare(List& list, const Run& run) {
  const size_t n = list.grads.size();
  emu::Buffer<uint64_t> counts("counts", n * kExponentBins);
  emu::Buffer<uint32_t> largest("largest", n);
  for (size_t i = 0; i < counts.size(); i++) counts.set(i, 0);
  for (size_t i = 0; i < n; i++) largest.set(i, 0);
  const Status status = run(list.grads, counts.data(), largest.data());
  if (!status.ok()) return status.message;
  for (size_t k = 0; k < n; k++) {
    std::vector<uint64_t> expected(kExponentBins, 0);
    float most = 0;
    const AnyBuffer& tensor = *list.buffers[k];
    for (size_t i = 0; i < tensor.size(); i++) {
      const int bin = bin_of(tensor.get64(i));
      expected[static_cast<size_t>(bin)]++;
      if (bin < 278) most = std::max(most, std::fabs(static_cast<float>(tensor.get64(i))));
    }
    for (size_t bin = 0; bin < expected.size(); bin++) {
      const uint64_t got = counts[k * kExponentBins + bin];
      if (got != expected[bin]) {
        return "tensor " + std::to_string(k) + ", bin " + std::to_string(bin) + ": " + std::to_string(got) + ", not " +
               std::to_string(expected[bin]);
      }
    }
    if (float_of(largest[k]) != most) return "tensor " + std::to_string(k) + ": wrong largest magnitude";
  }
  return counts.check_red_zones() + largest.check_red_zones();
}

template <int kThreads, int kPlaces>
auto small_instance(int blocks) {
  return [blocks](std::span<const GradRef> tensors, uint64_t* counts, uint32_t* largest) {
    return detail::exponent_histogram_on<kThreads, PlacedGradListArgs<const void, kPlaces>>(blocks, tensors, counts,
                                                                                            largest, nullptr);
  };
}

void random_lists(Cases& cases) {
  for (uint64_t number = 0; number < 24; number++) {
    const std::string title = "random list " + std::to_string(number);
    auto run = [&](auto instance, uint64_t salt) {
      Rng rng(2 * number + salt);
      List list = random_list<const void>(rng, 1 + static_cast<int>(rng() % 9), number % 6 == 0);
      if (number % 3 != 0) fill_wide(list, rng);
      return compare(list, instance(1 + static_cast<int>(rng() % 4)));
    };
    cases.check(title + ", 3 tensors a launch", [&] { return run(small_instance<64, 3>, 0); });
    cases.check(title + ", one launch", [&] { return run(small_instance<32, 16>, 1); });
  }
}

/// Every value of both 16-bit formats: each bin they have, each edge of one.
void every_half(Cases& cases) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    cases.check(dtype == DType::kFloat16 ? "every fp16" : "every bf16", [&] {
      List list;
      list.add(dtype, 1 << 16, 3);
      for (size_t i = 0; i < 1 << 16; i++) list.buffers[0]->set_bits(i, static_cast<uint16_t>(i));
      return compare(list, small_instance<64, 2>(2));
    });
  }
}

void shipped_instance(Cases& cases) {
  for (int tensors : {0, 1, 3, kPlacedGradListTensors + 2}) {
    cases.check("shipped instance, " + std::to_string(tensors) + " tensors", [&] {
      List list = list_of<const void>(tensors);
      return compare(list, [](std::span<const GradRef> refs, uint64_t* counts, uint32_t* largest) {
        return exponent_histogram(refs, counts, largest, nullptr);
      });
    });
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("exponent_histogram", ak::test::Seeds(argc, argv, 3));
  ak::test::random_lists(cases);
  ak::test::every_half(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
