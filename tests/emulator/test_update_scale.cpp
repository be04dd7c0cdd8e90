// update_scale_ on the emulator: sequences of steps against gradients/loss_scale.h, lists of flags that take one launch
// and several, an overflow at every place.
#include <cmath>

#include "gradients/update_scale.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

struct Machine {
  emu::Buffer<float> scale{"scale", 1};
  emu::Buffer<int32_t> growth{"growth_tracker", 1}, hysteresis{"hysteresis_tracker", 1};
  emu::Buffer<int64_t> skipped{"skipped_steps", 1}, consecutive{"consecutive_skips", 1};
  LossScale expected;
  int64_t skips = 1ll << 33, run_of_skips = 2;

  explicit Machine(const LossScale& start) : expected(start) {
    scale.set(0, start.scale);
    growth.set(0, start.growth_tracker);
    hysteresis.set(0, start.hysteresis_tracker);
    skipped.set(0, skips);
    consecutive.set(0, run_of_skips);
  }

  /// One update by run(where, found_infs, scratch), which is given `scratch_words` words; "" or what is wrong.
  template <class Run>
  std::string step(const std::vector<float>& flags, const LossScaleOptions& options, size_t scratch_words,
                   const Run& run) {
    bool overflow = false;
    std::vector<std::unique_ptr<emu::Buffer<float>>> buffers;
    std::vector<const float*> pointers;
    for (float f : flags) {
      buffers.push_back(std::make_unique<emu::Buffer<float>>("found_infs", std::vector<float>{f}));
      pointers.push_back(buffers.back()->data());
      overflow = overflow || f > 0;
    }
    emu::Buffer<uint32_t> scratch("scratch", scratch_words);
    expected = update_loss_scale(expected, overflow, options);
    const bool counts = flags.size() != 2;
    if (counts) {
      skips += overflow;
      run_of_skips = overflow ? run_of_skips + 1 : 0;
    }
    const LossScaleRef ref{scale.data(), growth.data(), hysteresis.data(), counts ? skipped.data() : nullptr,
                           counts ? consecutive.data() : nullptr};
    const Status status = run(ref, std::span<const float* const>(pointers), scratch.data());
    if (!status.ok()) return status.message;
    if (bits_of(scale[0]) != bits_of(expected.scale))
      return "the scale is " + std::to_string(scale[0]) + ", not " + std::to_string(expected.scale);
    if (growth[0] != expected.growth_tracker) return "growth_tracker is " + std::to_string(growth[0]);
    if (hysteresis[0] != expected.hysteresis_tracker) return "hysteresis_tracker is " + std::to_string(hysteresis[0]);
    if (skipped[0] != skips) return "skipped_steps is " + std::to_string(skipped[0]);
    if (consecutive[0] != run_of_skips) return "consecutive_skips is " + std::to_string(consecutive[0]);
    for (size_t i = 0; i < flags.size(); i++) {
      const bool same = (*buffers[i])[0] == flags[i] || std::isnan(flags[i]);
      if (!same) return "found_infs[" + std::to_string(i) + "] was changed";
    }
    for (const std::string& damage :
         {scale.check_red_zones(), growth.check_red_zones(), hysteresis.check_red_zones(), scratch.check_red_zones(),
          skipped.check_red_zones(), consecutive.check_red_zones()}) {
      if (!damage.empty()) return damage;
    }
    return "";
  }
};

template <int kFlagsPerLaunch>
std::string small_step(Machine& m, const std::vector<float>& flags, const LossScaleOptions& options) {
  return m.step(flags, options, 1,
                [&](const LossScaleRef& ref, std::span<const float* const> found_infs, uint32_t* scratch) {
                  return detail::update_scale_on<kFlagsPerLaunch>(ref, found_infs, options, scratch, nullptr);
                });
}
std::string shipped_step(Machine& m, const std::vector<float>& flags, const LossScaleOptions& options) {
  return m.step(flags, options, update_scale_scratch_bytes(flags.size()) / sizeof(uint32_t),
                [&](const LossScaleRef& ref, std::span<const float* const> found_infs, uint32_t* scratch) {
                  return update_scale(ref, found_infs, options, scratch, nullptr);
                });
}

/// Training runs of 30 steps: growth, backoff, floors, ceilings, hysteresis and overflow of the scale all occur.
void random_runs(Cases& cases) {
  for (uint64_t number = 0; number < 40; number++) {
    cases.check("random run " + std::to_string(number), [number]() -> std::string {
      Rng rng(number);
      LossScaleOptions options{2.0, 0.5, static_cast<int64_t>(rng() % 4), 0.0, INFINITY, 1, false};
      if (rng() % 2) options.growth_factor = 1.7, options.backoff_factor = 0.3;
      if (rng() % 2) options.min_scale = 1.0, options.max_scale = 3000.0;
      if (rng() % 2) options.hysteresis = 3;
      options.consecutive = rng() % 2;
      const float starts[] = {1024.0f, 1.5f, 2e38f, 65536.0f};
      Machine m({starts[rng() % 4], 0, static_cast<int32_t>(options.hysteresis)});
      for (int i = 0; i < 30; i++) {
        std::vector<float> flags(1 + rng() % 9, 0.0f);
        if (rng() % 3 == 0) flags[rng() % flags.size()] = rng() % 2 ? 1.0f : 2.0f;
        const std::string wrong = rng() % 2 ? small_step<3>(m, flags, options) : small_step<8>(m, flags, options);
        if (!wrong.empty()) return "step " + std::to_string(i) + ": " + wrong;
      }
      return "";
    });
  }
}

/// The only overflow is at each place in turn, in lists of several lengths; the scale must back off.
void overflow_at_every_place(Cases& cases) {
  const LossScaleOptions options{2.0, 0.5, 1, 0.0, INFINITY, 1, false};
  for (size_t n : {size_t{1}, size_t{2}, size_t{5}, size_t{31}, size_t{32}, size_t{33}, size_t{70}}) {
    cases.check("overflow at every place of " + std::to_string(n), [&]() -> std::string {
      for (size_t at = 0; at < n; at++) {
        std::vector<float> flags(n, 0.0f);
        flags[at] = 1.0f;
        Machine one({8.0f, 0, 1}), chain({8.0f, 0, 1});
        std::string wrong = small_step<70>(one, flags, options);
        if (wrong.empty()) wrong = small_step<2>(chain, flags, options);
        if (wrong.empty() && one.expected.scale != 4.0f) wrong = "the test itself is wrong";
        if (!wrong.empty()) return "at " + std::to_string(at) + ": " + wrong;
      }
      return "";
    });
  }
}

/// Flags that are no overflow, and overflows that a sum of the flags would hide.
void odd_flags(Cases& cases) {
  const LossScaleOptions options{2.0, 0.5, 1, 0.0, INFINITY, 1, false};
  const std::vector<std::vector<float>> all = {
      {}, {NAN}, {-1.0f}, {-0.0f}, {INFINITY}, {1.0f, -1.0f}, {NAN, 1.0f, NAN}, {0x1p-149f}, {-2.0f, 1.0f}};
  for (size_t i = 0; i < all.size(); i++) {
    cases.check("odd flags " + std::to_string(i), [&] {
      Machine m({8.0f, 0, 1});
      return small_step<4>(m, all[i], options);
    });
  }
}

/// As the package calls it, up to a chain of launches.
void shipped_instance(Cases& cases) {
  const LossScaleOptions options{2.0, 0.5, 2, 0.0, INFINITY, 1, false};
  for (int n : {0, 1, 2, kFlags, kFlags + 1, 2 * kFlags + 5}) {
    cases.check("shipped instance, " + std::to_string(n) + " flags", [&]() -> std::string {
      Machine m({8.0f, 0, 1});
      std::vector<float> flags(static_cast<size_t>(n), 0.0f);
      std::string wrong = shipped_step(m, flags, options);
      if (n > 0) flags[0] = 1.0f;
      if (wrong.empty()) wrong = shipped_step(m, flags, options);
      return wrong;
    });
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("update_scale", ak::test::Seeds(argc, argv, 4));
  ak::test::random_runs(cases);
  ak::test::overflow_at_every_place(cases);
  ak::test::odd_flags(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
