// unit_matrices on the emulator against double: types, strides, padding, several blocks of rows, and the least norm.
#include <bit>
#include <cmath>

#include "emulator/harness.h"
#include "newton_schulz/unit_matrices.cu"

namespace ak::test {
namespace {

struct Options {
  int batch = 2, rows = 5, columns = 40;
  int padding = 0;  // rows and columns of the result beyond those of x
  bool transposed = false;
  float size = 1;
  double eps = 1e-7;
};

template <class T, class Out>
std::string run(const Options& o) {
  const int out_rows = o.rows + o.padding, out_columns = o.columns + o.padding;
  const size_t each = static_cast<size_t>(o.rows) * o.columns, n = each * o.batch;
  emu::Random random{n};
  emu::Buffer<T> x("x", n);
  for (size_t i = 0; i < n; i++) x.set(i, round_to<T>(o.size * (static_cast<float>(random.below(257)) - 128) / 64));
  emu::Buffer<double> row_sums("row_sums", static_cast<size_t>(o.batch) * o.rows);
  emu::Buffer<uint16_t> out("out", static_cast<size_t>(o.batch) * out_rows * out_columns);
  const int64_t row_stride = o.transposed ? 1 : o.columns, column_stride = o.transposed ? o.rows : 1;
  const UnitMatrices call{.x = x.data(),
                          .type = kType<T>,
                          .batch_stride = static_cast<int64_t>(each),
                          .row_stride = row_stride,
                          .column_stride = column_stride,
                          .batch = o.batch,
                          .rows = o.rows,
                          .columns = o.columns,
                          .eps = o.eps,
                          .row_sums = row_sums.data(),
                          .out = out.data(),
                          .out_type = kType<Out>,
                          .out_rows = out_rows,
                          .out_columns = out_columns};
  if (const std::string error = message_of(unit_matrices(call, nullptr)); !error.empty()) return error;
  for (int b = 0; b < o.batch; b++) {
    double sum = 0;
    for (size_t i = 0; i < each; i++) sum += std::pow(static_cast<double>(to_float(x[b * each + i])), 2);
    const double norm = std::fmax(std::sqrt(sum), o.eps);
    for (int r = 0; r < out_rows; r++) {
      for (int c = 0; c < out_columns; c++) {
        const bool inside = r < o.rows && c < o.columns;
        const size_t at = b * each + static_cast<size_t>(r * row_stride + c * column_stride);
        const double want = inside ? to_float(x[at]) / norm : 0.0;
        const uint16_t bits = out[(static_cast<size_t>(b) * out_rows + r) * out_columns + c];
        // Half an ulp of the result, and the roundings of fp32 before it.
        const double got = to_float(std::bit_cast<Out>(bits)), u = std::is_same_v<Out, bf16> ? 0x1p-8 : 0x1p-11;
        if (!(std::fabs(got - want) <= 1.001 * u * std::fabs(want) + 0x1p-25))
          return emu::format("out[%d, %d, %d] is %.9g, expected %.9g", b, r, c, got, want);
      }
    }
  }
  return out.check_written();
}

template <class T, class Out>
void check(Cases& cases, const std::string& title, const Options& o) {
  cases.check(title, [&] { return run<T, Out>(o); });
}

void check_all(Cases& cases) {
  check<float, bf16>(cases, "fp32 to bf16", {});
  check<bf16, bf16>(cases, "bf16", {.columns = 33});
  check<fp16, fp16>(cases, "fp16, padded", {.rows = 7, .columns = 13, .padding = 3});
  check<bf16, bf16>(cases, "rows of two rounds", {.batch = 1, .rows = 2, .columns = 600, .padding = 8});
  check<float, fp16>(cases, "columns, padded", {.padding = 8, .transposed = true});
  check<bf16, fp16>(cases, "several blocks of rows", {.batch = 3, .rows = 71, .columns = 5});
  check<float, bf16>(cases, "more rows than threads", {.batch = 1, .rows = 300, .columns = 2});
  check<float, bf16>(cases, "squares overflow in fp32", {.size = 1e30f});
  check<float, bf16>(cases, "squares vanish in fp32", {.size = 1e-30f, .eps = 0});
  check<float, bf16>(cases, "a norm below the least", {.size = 1e-6f, .eps = 2});
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("unit_matrices", ak::test::Seeds(argc, argv, 4));
  ak::test::check_all(cases);
  return cases.finish();
}
