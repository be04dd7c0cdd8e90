// A product with one right result, for the tests of the GEMM kernels: the inputs are small integers, so every sum is
// exact in fp32 and the order of additions does not matter.
#pragma once
#include <cmath>
#include <type_traits>

#include "device/wgmma.cuh"
#include "emulator/harness.h"
#include "gemm/call.h"

namespace ak::test {

struct Shape {
  int m, n, k;
  int padding = 0;  // extra elements per row of A, B and C
  int splits = 1;
  int sms = 2;
  int batch = 1;
  bool one_a = false, one_b = false;  // one matrix for the whole batch
};

inline std::string title(const char* what, const Shape& s) {
  return emu::format("%s: %d x (%d x %d x %d), padding %d, splits %d, %d SMs", what, s.batch, s.m, s.n, s.k, s.padding,
                     s.splits, s.sms);
}

/// The layout of C. By columns: as the transpose of a row-major matrix.
enum class Lies { kByRows, kByColumns };

template <class T, Major kMajorA, Major kMajorB>
class Problem {
 public:
  explicit Problem(const Shape& s)
      : shape_(s),
        ld_a_(round_up(kMajorA == Major::kK ? s.k : s.m) + s.padding),
        ld_b_(round_up(kMajorB == Major::kK ? s.k : s.n) + s.padding),
        plane_a_(ld_a_ * (kMajorA == Major::kK ? s.m : s.k) + s.padding),
        plane_b_(ld_b_ * (kMajorB == Major::kK ? s.n : s.k) + s.padding),
        a_("a", size(plane_a_ * (s.one_a ? 1 : s.batch))),
        b_("b", size(plane_b_ * (s.one_b ? 1 : s.batch))),
        expected_(size(s.batch) * size(s.m) * size(s.n)) {
    emu::Random random{static_cast<uint64_t>(s.m * 7 + s.n * 3 + s.k)};
    const auto fill = [&](auto& buffer, Major major, int64_t ld, int64_t plane, int batch, int rows) {
      std::vector<float> values(size(batch) * size(rows) * size(s.k));
      size_t i = 0;
      for (int z = 0; z < batch; z++) {
        for (int row = 0; row < rows; row++) {
          for (int k = 0; k < s.k; k++, i++) {
            values[i] = static_cast<float>(random.below(5)) - 2;
            buffer.set(size(z * plane + (major == Major::kK ? row * ld + k : k * ld + row)), round_to<T>(values[i]));
          }
        }
      }
      return values;
    };
    const auto a = fill(a_, kMajorA, ld_a_, plane_a_, s.one_a ? 1 : s.batch, s.m);
    const auto b = fill(b_, kMajorB, ld_b_, plane_b_, s.one_b ? 1 : s.batch, s.n);
    size_t i = 0;
    for (int z = 0; z < s.batch; z++) {
      for (int m = 0; m < s.m; m++) {
        const float* row = &a[size((s.one_a ? 0 : z) * s.m + m) * size(s.k)];
        for (int n = 0; n < s.n; n++, i++) {
          const float* column = &b[size((s.one_b ? 0 : z) * s.n + n) * size(s.k)];
          for (int k = 0; k < s.k; k++) expected_[i] += row[k] * column[k];
        }
      }
    }
  }

  /// The result of `run(problem)` in a C of type Out, whose elements start as `initial` (uninitialised if that is NaN),
  /// which the result must have been added to.
  template <class Out, class Run>
  std::string compare(float initial, Run run, Lies lies = Lies::kByRows) {
    emu::options().sm_count = shape_.sms;
    const bool fresh = initial != initial;
    const int lines = lies == Lies::kByRows ? shape_.m : shape_.n,
              in_line = lies == Lies::kByRows ? shape_.n : shape_.m;
    const int64_t ld = round_up(in_line) + shape_.padding;
    emu::Buffer<Out> c("c", size(shape_.batch * ld * lines));
    if (!fresh) c.fill(round_to<Out>(initial));
    GemmProblem q{};
    q.a = a_.data(), q.b = b_.data(), q.type = kType<T>;
    q.accumulate = !fresh;
    q.c = {c.data(), kType<Out>, ld, 1, ld * lines};
    if (lies == Lies::kByColumns) std::swap(q.c.row_stride, q.c.column_stride);
    q.m = shape_.m, q.n = shape_.n, q.k = shape_.k;
    q.ld_a = ld_a_, q.ld_b = ld_b_;
    q.m_major_a = kMajorA == Major::kMN, q.n_major_b = kMajorB == Major::kMN;
    q.batch = shape_.batch;
    q.batch_stride_a = shape_.one_a ? 0 : plane_a_;
    q.batch_stride_b = shape_.one_b ? 0 : plane_b_;
    const std::string error = message_of(run(q));
    if (!error.empty()) return error;
    for (int z = 0; z < shape_.batch; z++) {
      for (int line = 0; line < lines; line++) {
        for (int64_t x = 0; x < ld; x++) {
          const float got = to_float(c[size((z * lines + line) * ld + x)]);
          if (x >= in_line) {  // nothing beyond the edge may be touched
            if (fresh ? got == got : got != initial) return emu::format("the padding of line %d was written", line);
            continue;
          }
          const int m = lies == Lies::kByRows ? line : static_cast<int>(x),
                    n = lies == Lies::kByRows ? static_cast<int>(x) : line;
          const float sum = expected_[size((z * shape_.m + m) * shape_.n + n)] + (fresh ? 0 : initial);
          const float want = to_float(round_to<Out>(sum));
          if (!(got == want)) return emu::format("c[%d, %d, %d] is %g, expected %g", z, m, n, got, want);
        }
      }
    }
    return c.check_red_zones();
  }

 private:
  static int64_t round_up(int x) { return (x + 7) / 8 * 8; }
  static size_t size(int64_t x) { return static_cast<size_t>(x); }

  Shape shape_;
  int64_t ld_a_, ld_b_, plane_a_, plane_b_;
  emu::Buffer<T> a_, b_;
  std::vector<float> expected_;
};

}  // namespace ak::test
