// Products in phases on the emulator, bit for bit: every distance of lines, what a phase reads and what nobody may, the
// lines that are left over, every C, and both kernels that work on the phases. Between the lines, and in what the
// phases take of their neighbours, stands NaN.
#include "gemm/phases.cu"

#include <algorithm>

#include "gemm/sm80/gemm.cu"
#include "gemm/sm90/gemm.cuh"
#include "gemm_problem.h"

namespace ak::test {
namespace {

/// Lines of `length` elements, `ld` apart, one for each k.
struct Lines {
  int length;
  int64_t ld;

  int64_t at(int k, int x) const { return k * ld + x; }
};

struct Case {
  const char* what;
  Lines a, b;
  int k;
  int splits = 1;
  float alpha = 1.0f;
  int64_t gap = 0;  // behind the rows of C, or of its columns
  Lies lies = Lies::kByRows;
};

enum class Kernel { kSm80, kSm90 };

size_t size(int64_t x) { return static_cast<size_t>(x); }

template <class T>
void fill(emu::Buffer<T>& buffer, const Lines& l, int k, emu::Random& random, std::vector<float>& values) {
  buffer.fill(round_to<T>(NAN));
  for (int line = 0; line < k; line++) {
    for (int x = 0; x < l.length; x++) {
      values.push_back(static_cast<float>(random.below(5)) - 2);
      buffer.set(size(l.at(line, x)), round_to<T>(values.back()));
    }
  }
}

/// A product that planning would work on in phases: `T` in, `Out` out.
template <class T, class Out>
class PhasedProblem {
 public:
  explicit PhasedProblem(const Case& c)
      : case_(c), a_("a", size(c.a.at(c.k - 1, c.a.length))), b_("b", size(c.b.at(c.k - 1, c.b.length))) {
    emu::Random random{7};
    fill(a_, c.a, c.k, random, values_a_);
    fill(b_, c.b, c.k, random, values_b_);
  }

  GemmProblem problem(Out* c) {
    const bool rows = case_.lies == Lies::kByRows;
    GemmProblem q{};
    q.a = a_.data(), q.b = b_.data(), q.type = kType<T>;
    q.m = case_.a.length, q.n = case_.b.length, q.k = case_.k;
    q.ld_a = case_.a.ld, q.ld_b = case_.b.ld;
    q.m_major_a = q.n_major_b = true;
    q.c = {c, kType<Out>, rows ? pitch() : 1, rows ? 1 : pitch()};
    q.epilogue.alpha = case_.alpha;
    return q;
  }

  std::string run(Kernel kernel, bool accumulate) {
    emu::options().sm_count = 2;
    emu::Buffer<Out> c("c", size(lines() * pitch()));
    if (accumulate) c.fill(round_to<Out>(3.0f));
    GemmProblem q = problem(c.data());
    q.accumulate = accumulate;
    const GemmPhases phases = gemm_phases(q);
    if (phases.count == 0) return "there are no phases";
    emu::Buffer<float> parts("parts", size(phases.size(q.m, q.n)));
    Status status = multiply(kernel, gemm_in_phases(q, phases, parts.data()));
    if (status.ok()) status = gemm_add_phases<T>(q, phases, parts.data(), nullptr);
    if (!status.ok()) return message_of(status);
    for (int m = 0; m < q.m; m++) {
      for (int n = 0; n < q.n; n++) {
        float sum = 0;
        for (int k = 0; k < q.k; k++) sum += values_a_[size(k * q.m + m)] * values_b_[size(k * q.n + n)];
        const float want = to_float(round_to<Out>(case_.alpha * sum + (accumulate ? 3.0f : 0.0f)));
        const float got = to_float(c[size(m * q.c.row_stride + n * q.c.column_stride)]);
        if (got != want) return emu::format("c[%d, %d] is %g, expected %g", m, n, got, want);
      }
    }
    for (int64_t line = 0; line < lines(); line++) {
      for (int64_t x = pitch() - case_.gap; x < pitch(); x++) {
        const float beside = to_float(c[size(line * pitch() + x)]);
        if (accumulate ? beside != 3.0f : beside == beside) return std::string("what lies past a line was written");
      }
    }
    return c.check_red_zones() + parts.check_red_zones();
  }

 private:
  Status multiply(Kernel kernel, const GemmProblem& q) const {
    emu::Buffer<float> partials("partials", size(4 << 20));
    emu::Buffer<uint32_t> counters("counters", 4096);
    counters.fill(0);
    const GemmScratch scratch{partials.data(), counters.data()};
    if (kernel == Kernel::kSm80) return gemm_sm80<T>(q, {GemmSm80Tile::k64x64, case_.splits}, scratch, nullptr);
    constexpr int kTile = gemm_tile_index(64, 64);
    return gemm::run<T, kTile, kTile + 1>(q, {kTile, case_.splits, false}, scratch, nullptr);
  }
  int64_t lines() const { return case_.lies == Lies::kByRows ? case_.a.length : case_.b.length; }
  int64_t pitch() const { return (case_.lies == Lies::kByRows ? case_.b.length : case_.a.length) + case_.gap; }

  Case case_;
  std::vector<float> values_a_, values_b_;
  emu::Buffer<T> a_, b_;
};

template <class T, class Out>
void product(Cases& cases, const Case& c, bool accumulate = false) {
  for (const Kernel kernel : {Kernel::kSm80, Kernel::kSm90}) {
    cases.check(emu::format("%s: %d x %d x %d, %s", c.what, c.a.length, c.b.length, c.k,
                            kernel == Kernel::kSm80 ? "sm80" : "sm90"),
                [&] { return PhasedProblem<T, Out>(c).run(kernel, accumulate); });
  }
}

void products(Cases& cases) {
  product<bf16, float>(cases, {"odd lines of B", {64, 64}, {51, 51}, 533});
  product<fp16, float>(cases, {"odd lines of A", {35, 35}, {72, 72}, 200});
  product<bf16, float>(cases, {"of both", {41, 43}, {67, 69}, 131});
  product<fp16, fp16>(cases, {"two phases", {36, 36}, {40, 44}, 150});
  product<bf16, bf16>(cases, {"four phases", {38, 42}, {64, 64}, 260});
  product<bf16, fp16>(cases, {"lines within longer ones", {33, 64}, {17, 101}, 131});
  product<fp16, float>(cases, {"more than a tile", {129, 129}, {70, 71}, 90});
  product<bf16, float>(cases, {"parts of k", {64, 64}, {51, 51}, 2100, 3});
  product<bf16, bf16>(cases, {"times alpha", {24, 24}, {19, 19}, 77, 1, 0.5f});
  product<fp16, float>(cases, {"added", {24, 25}, {19, 19}, 77, 1, 2.0f}, true);
  product<bf16, float>(cases, {"added, with gaps", {40, 41}, {19, 19}, 45, 1, 1.0f, 3}, true);
  product<fp16, fp16>(cases, {"by columns", {9, 9}, {37, 37}, 61, 1, 1.0f, 5, Lies::kByColumns});
  product<bf16, float>(cases, {"short lines", {5, 5}, {3, 3}, 300});
  product<fp16, float>(cases, {"the shortest", {3, 3}, {2, 2}, 57});
  product<bf16, float>(cases, {"one row, one column", {1, 9}, {1, 11}, 77});
  for (int ld = 65; ld < 72; ld++) product<bf16, float>(cases, {"every distance", {64, ld}, {61, ld - 3}, 75});
  for (int k = 9; k <= 17; k++) product<fp16, float>(cases, {"lines left over", {16, 16}, {13, 15}, k});
}

/// Products without phases.
void refusals(Cases& cases) {
  const Case usual{"", {32, 33}, {24, 25}, 64};
  const auto none = [&](const char* what, Case c, auto change) {
    cases.check(what, [&] {
      PhasedProblem<bf16, float> phased(c);
      GemmProblem q = phased.problem(nullptr);
      if (gemm_phases(q).count != 8) return std::string("the usual case has no phases");
      change(q);
      return std::string(gemm_phases(q) == GemmPhases{} ? "" : "there are phases");
    });
  };
  static float memory[4];
  none("lines along k", usual, [](GemmProblem& q) { q.m_major_a = false; });
  none("columns along k", usual, [](GemmProblem& q) { q.n_major_b = false; });
  none("aligned", usual, [](GemmProblem& q) { q.ld_a = 40, q.ld_b = 48; });
  none("a batch", usual, [](GemmProblem& q) { q.batch = 2; });
  none("A after an odd element", usual, [](GemmProblem& q) { q.a = static_cast<const bf16*>(q.a) + 1; });
  none("B after an odd element", usual, [](GemmProblem& q) { q.b = static_cast<const bf16*>(q.b) + 1; });
  none("no more lines than phases", usual, [](GemmProblem& q) { q.k = 8; });
  none("a bias", usual, [](GemmProblem& q) { q.epilogue.bias.data = memory; });
  none("a residual", usual, [](GemmProblem& q) { q.epilogue.residual.data = memory; });
  none("an activation", usual, [](GemmProblem& q) { q.epilogue.activation = Activation::relu; });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_phases", Seeds(argc, argv, 2), {products, refusals});
}
