// gemm_sm90 on the emulator: every layout, output, tile and cluster shape over tails of m, n and k, bit for bit. The
// inputs are small integers, so every sum is exact in fp32 and only one result is right, whatever the order of
// additions.
#include <cmath>

#include "harness.h"
#include "kernels/gemm_sm90.cu"

namespace ak::test {
namespace {

struct Shape {
  int m, n, k;
  int padding = 0;  // extra elements per row of A, B and C
  int splits = 1;
  int sms = 2;
};

template <class T, Major kMajorA, Major kMajorB>
class Problem {
 public:
  explicit Problem(const Shape& s)
      : shape_(s),
        ld_a_(round_up(kMajorA == Major::kK ? s.k : s.m) + s.padding),
        ld_b_(round_up(kMajorB == Major::kK ? s.k : s.n) + s.padding),
        ld_c_(round_up(s.n) + s.padding),
        a_("a", static_cast<size_t>(ld_a_) * (kMajorA == Major::kK ? s.m : s.k)),
        b_("b", static_cast<size_t>(ld_b_) * (kMajorB == Major::kK ? s.n : s.k)),
        expected_(static_cast<size_t>(s.m) * s.n) {
    emu::Random random{static_cast<uint64_t>(s.m * 7 + s.n * 3 + s.k)};
    std::vector<float> a(static_cast<size_t>(s.m) * s.k), b(static_cast<size_t>(s.n) * s.k);
    for (float& x : a) x = static_cast<float>(random.below(5)) - 2;
    for (float& x : b) x = static_cast<float>(random.below(5)) - 2;
    for (int m = 0; m < s.m; m++) {
      for (int k = 0; k < s.k; k++) a_.set(at<kMajorA>(m, k, ld_a_), round_to<T>(a[static_cast<size_t>(m) * s.k + k]));
    }
    for (int n = 0; n < s.n; n++) {
      for (int k = 0; k < s.k; k++) b_.set(at<kMajorB>(n, k, ld_b_), round_to<T>(b[static_cast<size_t>(n) * s.k + k]));
    }
    for (int m = 0; m < s.m; m++) {
      for (int n = 0; n < s.n; n++) {
        float sum = 0;
        for (int k = 0; k < s.k; k++) sum += a[static_cast<size_t>(m) * s.k + k] * b[static_cast<size_t>(n) * s.k + k];
        expected_[static_cast<size_t>(m) * s.n + n] = sum;
      }
    }
  }

  GemmProblem describe(void* c) {
    return {a_.data(),
            b_.data(),
            c,
            shape_.m,
            shape_.n,
            shape_.k,
            ld_a_,
            ld_b_,
            ld_c_,
            kMajorA == Major::kMN,
            kMajorB == Major::kMN};
  }
  /// The result of `run(problem)` in buffers of type Out, whose elements start as `initial` (uninitialised if that is
  /// NaN).
  template <class Out, class Run>
  std::string compare(float initial, Run run) {
    emu::options().sm_count = shape_.sms;
    emu::Buffer<Out> c("c", static_cast<size_t>(ld_c_) * shape_.m);
    if (initial == initial) c.fill(round_to<Out>(initial));
    const std::string error = message_of(run(describe(c.data())));
    if (!error.empty()) return error;
    for (int m = 0; m < shape_.m; m++) {
      for (int n = 0; n < shape_.n; n++) {
        const float sum = expected_[static_cast<size_t>(m) * shape_.n + n] + (initial == initial ? initial : 0);
        const float got = to_float(c[static_cast<size_t>(m * ld_c_ + n)]), want = to_float(round_to<Out>(sum));
        if (!(got == want)) return emu::format("c[%d, %d] is %g, expected %g", m, n, got, want);
      }
      // Nothing beyond the last column may be touched.
      for (int64_t n = shape_.n; n < ld_c_; n++) {
        const float padding = to_float(c[static_cast<size_t>(m * ld_c_ + n)]);
        if (initial == initial ? padding != initial : padding == padding)
          return emu::format("the padding of row %d was written", m);
      }
    }
    return c.check_red_zones();
  }

 private:
  static int64_t round_up(int x) { return (x + 7) / 8 * 8; }
  template <Major kMajor>
  static size_t at(int row, int k, int64_t ld) {
    return static_cast<size_t>(kMajor == Major::kK ? row * ld + k : k * ld + row);
  }

  Shape shape_;
  int64_t ld_a_, ld_b_, ld_c_;
  emu::Buffer<T> a_, b_;
  std::vector<float> expected_;
};

std::string title(const char* what, const Shape& s) {
  return emu::format("%s %d x %d x %d, padding %d, splits %d", what, s.m, s.n, s.k, s.padding, s.splits);
}

template <class T, Major kMajorA, Major kMajorB, GemmOutput kOutput, class Tile>
void check(Cases& cases, const char* what, const Shape& s) {
  Problem<T, kMajorA, kMajorB> problem(s);
  cases.check(title(what, s), [&] {
    auto run = [](const GemmProblem& q) {
      return gemm::launch_gemm<T, kMajorA, kMajorB, kOutput, Tile>(q, 1, nullptr);
    };
    if constexpr (kOutput == GemmOutput::kInputType) return problem.template compare<T>(NAN, run);
    if constexpr (kOutput == GemmOutput::kFloat32) return problem.template compare<float>(NAN, run);
    return problem.template compare<float>(3.0f, run);
  });
}

template <class T, Major kMajorA, Major kMajorB>
void check_split(Cases& cases, const char* what, GemmTile tile, GemmOutput output, const Shape& s) {
  Problem<T, kMajorA, kMajorB> problem(s);
  cases.check(title(what, s), [&] {
    auto run = [&](const GemmProblem& q) {
      emu::Buffer<float> scratch("scratch", gemm_sm90_split_bytes(q, s.splits) / 4);
      return gemm_sm90_split<T>(q, tile, output, s.splits, scratch.data(), nullptr);
    };
    if (output == GemmOutput::kInputType) return problem.template compare<T>(NAN, run);
    return problem.template compare<float>(output == GemmOutput::kAccumulate ? 3.0f : NAN, run);
  });
}

template <int kM, int kN, int kStages, int kCluster, int kConsumers>
using Tile = gemm::Tile<kM, kN, kStages, kCluster, kConsumers>;

constexpr Major K = Major::kK, MN = Major::kMN;
constexpr GemmOutput kSame = GemmOutput::kInputType, kFloat = GemmOutput::kFloat32, kAdd = GemmOutput::kAccumulate;

void layouts(Cases& cases) {
  check<bf16, K, K, kSame, Tile<128, 128, 3, 1, 2>>(cases, "NT", {256, 136, 328});
  check<fp16, K, MN, kSame, Tile<128, 64, 4, 1, 2>>(cases, "NN", {136, 72, 264});
  check<bf16, MN, K, kSame, Tile<128, 64, 4, 1, 2>>(cases, "TT", {136, 72, 264, 8});
  check<fp16, MN, MN, kSame, Tile<128, 128, 3, 1, 2>>(cases, "TN", {200, 136, 328, 0, 1, 1});
}

void tiles(Cases& cases) {
  check<bf16, K, K, kSame, Tile<256, 128, 2, 1, 2>>(cases, "256x128", {256, 128, 192, 0, 1, 1});
  check<fp16, K, K, kSame, Tile<128, 144, 3, 2, 2>>(cases, "128x144 cluster 2", {300, 296, 200});
  check<bf16, MN, K, kSame, Tile<128, 176, 3, 1, 2>>(cases, "128x176", {136, 179, 200, 8});
  check<bf16, K, MN, kSame, Tile<64, 128, 3, 1, 1>>(cases, "64x128", {136, 136, 200});
  check<fp16, K, K, kSame, Tile<64, 32, 4, 1, 1>>(cases, "64x32", {70, 72, 328});
  check<bf16, K, K, kSame, Tile<64, 64, 2, 1, 1>>(cases, "two stages", {64, 64, 200, 0, 1, 1});
}

void clusters(Cases& cases) {
  check<bf16, K, K, kSame, Tile<128, 128, 3, 2, 2>>(cases, "cluster 2", {512, 128, 328});
  check<fp16, K, MN, kSame, Tile<128, 128, 3, 2, 2>>(cases, "cluster 2, n-major B", {300, 136, 328, 0, 1, 4});
  check<bf16, MN, MN, kAdd, Tile<64, 128, 2, 2, 1>>(cases, "cluster 2, 64 rows", {130, 100, 136});
}

void outputs(Cases& cases) {
  check<bf16, K, K, kFloat, Tile<128, 128, 3, 1, 2>>(cases, "fp32", {132, 100, 136, 8});
  check<fp16, MN, MN, kAdd, Tile<128, 64, 4, 1, 2>>(cases, "accumulate", {128, 72, 128, 0, 1, 1});
  check_split<bf16, K, K>(cases, "split, 16 bit", GemmTile::k64x64, kSame, {70, 66, 520, 0, 3});
  check_split<fp16, MN, MN>(cases, "split, accumulate", GemmTile::k64x64, kAdd, {64, 72, 320, 8, 5});
  check_split<bf16, K, MN>(cases, "split, rounded up", GemmTile::k128x128, kFloat,
                           {136, 64, 330, 0, 4});  // 6 steps: 3 parts of 2
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("gemm_sm90", ak::test::Seeds(argc, argv, 6));
  ak::test::layouts(cases);
  ak::test::tiles(cases);
  ak::test::clusters(cases);
  ak::test::outputs(cases);
  return cases.finish();
}
