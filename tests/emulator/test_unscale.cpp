// unscale_ on the emulator: lists of mixed dtypes, sizes, alignments and values, bit for bit against the same products
// formed one by one, under many schedules.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "gradients/unscale.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

using List = GradList<void>;

template <class T>
T product(T grad, float inv_scale, bool& found) {
  T result;
  if constexpr (std::is_same_v<T, double>) {
    result = grad * static_cast<double>(inv_scale);
    found |= !std::isfinite(result);
  } else {
    result = round_to<T>(to_float(grad) * inv_scale);
    found |= !std::isfinite(to_float(result));
  }
  return result;
}

template <class T>
void multiply(std::vector<char>& bytes, float inv_scale, bool& found) {
  for (size_t i = 0; i < bytes.size(); i += sizeof(T)) {
    T grad;
    std::memcpy(&grad, bytes.data() + i, sizeof(T));
    grad = product(grad, inv_scale, found);
    std::memcpy(bytes.data() + i, &grad, sizeof(T));
  }
}

/// The expected bytes of a gradient; sets `found` if a result is not finite.
std::vector<char> expect(const AnyBuffer& grad, float inv_scale, bool& found) {
  std::vector<char> bytes = grad.bytes();
  switch (grad.dtype()) {
    case DType::kFloat16:
      multiply<fp16>(bytes, inv_scale, found);
      break;
    case DType::kBFloat16:
      multiply<bf16>(bytes, inv_scale, found);
      break;
    case DType::kFloat32:
      multiply<float>(bytes, inv_scale, found);
      break;
    case DType::kFloat64:
      multiply<double>(bytes, inv_scale, found);
      break;
  }
  return bytes;
}

/// Calls `run(grads, found_inf, inv_scale)` with a flag that held `earlier`; "" or what is wrong.
template <class Run>
std::string compare(List& list, float inv_scale, float earlier, const Run& run, bool* found_any = nullptr) {
  emu::Buffer<float> factor("inv_scale", 1), found_inf("found_inf", 1);
  factor.set(0, inv_scale);
  found_inf.set(0, earlier);
  bool found = false;
  std::vector<std::vector<char>> expected;
  for (auto& b : list.buffers) expected.push_back(expect(*b, inv_scale, found));
  if (found_any) *found_any = found;

  const Status status = run(list.grads, found_inf.data(), factor.data());
  if (!status.ok()) return status.message;
  for (size_t k = 0; k < list.buffers.size(); k++) {
    const std::string grad = "grads[" + std::to_string(k) + "]: ";
    if (list.buffers[k]->bytes() != expected[k]) return grad + "wrong product";
    if (!list.buffers[k]->check_red_zones().empty()) return grad + list.buffers[k]->check_red_zones();
  }
  const float flag = found ? 1.0f : earlier;
  if (found_inf[0] != flag) return "found_inf is " + std::to_string(found_inf[0]) + ", not " + std::to_string(flag);
  if (factor[0] != inv_scale) return "inv_scale was changed";
  return found_inf.check_red_zones();
}

template <int kThreads, int kPlaces>
auto small_instance(int blocks) {
  return [blocks](std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale) {
    return detail::unscale_on<kThreads, GradListArgs<void, kPlaces>>(blocks, grads, found_inf, inv_scale, nullptr);
  };
}

void random_lists(Cases& cases) {
  const std::vector<float> factors = {1.0f, 0.125f, 1.0f / 3, 0x1p-16f, 0x1p-24f};  // the last: subnormal fp16
  for (uint64_t number = 0; number < 40; number++) {
    const std::string title = "random list " + std::to_string(number);
    auto run = [&](auto instance, uint64_t salt) {
      Rng rng(2 * number + salt);
      List list = random_list<void>(rng, 1 + static_cast<int>(rng() % 11), number % 4 == 0);
      const float factor = factors[rng() % factors.size()];
      return compare(list, factor, number % 3 == 0 ? 2.0f : 0.0f, instance(1 + static_cast<int>(rng() % 4)));
    };
    cases.check(title + ", 3 tensors a launch", [&] { return run(small_instance<64, 3>, 0); });
    cases.check(title + ", one launch", [&] { return run(small_instance<32, 16>, 1); });
  }
}

/// One inf, -inf or NaN must be found, wherever it is, and all others are multiplied all the same.
void non_finite(Cases& cases) {
  for (uint64_t number = 0; number < 120; number++) {
    const size_t n = number % 3 == 0 ? 37 : 1 + number * 7919 % 700;
    const size_t at = number % 3 == 0 ? number / 3 % n : number * 104729 % n;
    cases.check("non-finite element " + std::to_string(at) + " of " + std::to_string(n), [&]() -> std::string {
      Rng rng(1000 + number);
      List list;
      list.add(DType::kFloat32, 5, 0);
      list.add(static_cast<DType>(number % 4), n, number % 5);
      list.fill(rng);
      const double bad[] = {INFINITY, -INFINITY, NAN};
      list.buffers[1]->set(at, bad[rng() % 3]);
      bool found = false;
      const std::string wrong = compare(list, 0.5f, 0.0f, small_instance<64, 2>(2), &found);
      return wrong.empty() && !found ? "the test itself is wrong" : wrong;
    });
  }
  // Everything is NaN: every thread of every block reports it.
  cases.check("nothing but NaN", []() -> std::string {
    List list;
    list.add(DType::kBFloat16, 3 * kRunUnits * kUnit, 0);
    for (size_t i = 0; i < list.buffers[0]->size(); i++) list.buffers[0]->set(i, NAN);
    return compare(list, 1.0f, 0.0f, small_instance<64, 2>(3));
  });
}

/// Finite gradients whose product overflows the dtype it is stored in, and one that stays just inside.
void overflow_of_the_product(Cases& cases) {
  struct Case {
    DType dtype;
    double grad;
    float inv_scale;
    bool overflows;
  };
  const Case all[] = {
      {DType::kFloat16, 60000, 2.0f, true},        {DType::kFloat16, 65504, 1.0f, false},
      {DType::kFloat16, 30000, 2.0f, false},       {DType::kBFloat16, 3e38, 1.5f, true},
      {DType::kBFloat16, 0x1.fep127, 1.0f, false}, {DType::kBFloat16, 0x1.fep127, 1.00390625f, true},
      {DType::kFloat32, 1e30, 0x1p30f, true},      {DType::kFloat32, 1e30, 0x1p20f, false},
      {DType::kFloat64, 1e300, 0x1p40f, true},     {DType::kFloat64, 1e300, 0x1p20f, false},
  };
  for (const Case& c : all) {
    cases.check(std::to_string(c.grad) + " times " + std::to_string(c.inv_scale), [&]() -> std::string {
      List list;
      list.add(c.dtype, 21, 0);
      for (size_t i = 0; i < 21; i++) list.buffers[0]->set(i, i == 10 ? c.grad : 1.0);
      bool found = false;
      const std::string wrong = compare(list, c.inv_scale, 0.0f, small_instance<32, 1>(1), &found);
      return wrong.empty() && found != c.overflows ? "the test itself is wrong" : wrong;
    });
  }
}

/// Without a flag: products as before, and for a factor of 1 no element is so much as read, as those that nobody has
/// written would tell.
void without_a_flag(Cases& cases) {
  const auto call = [](List& list, float factor) {
    emu::Buffer<float> inv_scale("inv_scale", 1);
    inv_scale.set(0, factor);
    return small_instance<64, 3>(2)(list.grads, nullptr, inv_scale.data());
  };
  for (const float factor : {0.25f, 1.0f / 3, 0x1p100f}) {  // the last: many a result is inf
    cases.check("without a flag, times " + std::to_string(factor), [&]() -> std::string {
      Rng rng(7);
      List list = random_list<void>(rng, 5, false);
      bool found = false;
      std::vector<std::vector<char>> expected;
      for (auto& b : list.buffers) expected.push_back(expect(*b, factor, found));
      const Status status = call(list, factor);
      if (!status.ok()) return status.message;
      for (size_t k = 0; k < list.buffers.size(); k++) {
        if (list.buffers[k]->bytes() != expected[k]) return "grads[" + std::to_string(k) + "]: wrong product";
      }
      return "";
    });
  }
  cases.check("without a flag, times 1", [&]() -> std::string {
    List list;
    for (int k = 0; k < 4; k++) list.add(static_cast<DType>(k), 1000, 1);
    const Status status = call(list, 1.0f);
    return status.ok() ? "" : status.message;
  });
}

/// As the package calls it, from no element at all to several launches.
void shipped_instance(Cases& cases) {
  for (int tensors : {0, 1, 3, kGradListTensors, kGradListTensors + 2}) {
    cases.check("shipped instance, " + std::to_string(tensors) + " tensors", [&] {
      List list = list_of<void>(tensors);
      return compare(list, 0.25f, 0.0f,
                     [](std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale) {
                       return unscale(grads, found_inf, inv_scale, nullptr);
                     });
    });
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("unscale", ak::test::Seeds(argc, argv, 4));
  ak::test::random_lists(cases);
  ak::test::non_finite(cases);
  ak::test::overflow_of_the_product(cases);
  ak::test::without_a_flag(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
