// softmax_rows and its backward on the emulator, against float64: over types, lengths, addresses and masks, and the
// places where the kernels change their ways: rows a warp, a block or no block holds, vectors or single columns.
#include <cmath>
#include <limits>

#include "harness.h"
#include "kernels/softmax_rows.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double roundoff(DType t) { return t == DType::kFloat32 ? 0x1p-24 : t == DType::kBFloat16 ? 0x1p-8 : 0x1p-11; }

struct Options {
  int rows = 3, columns = 40;
  DType x = DType::kBFloat16, y = DType::kBFloat16;
  bool log = false, safe = false, masked = false;
  int64_t mask_sizes[2] = {1, 3};  // of the last two of three dimensions
  size_t offset = 0, mask_offset = 0;
  double all = 0;  // instead of what is drawn, if not 0
  double last = 0;
};

/// What the mask says of an element; a matrix of its own for every dimension it is not expanded along.
struct Mask {
  emu::Buffer<uint8_t> bytes;
  RowMask rows;

  Mask(const Options& o, Rng& rng, int64_t own_rows, bool expanded)
      : bytes("mask", static_cast<size_t>(own_rows * o.columns), o.mask_offset), rows{} {
    for (int64_t i = 0; i < own_rows * o.columns; i++)
      bytes.set(static_cast<size_t>(i), i % o.columns ? rng() % 4 > 0 : 1);
    rows = {bytes.data(),
            {o.mask_sizes[0], o.mask_sizes[1]},
            {expanded ? o.columns : o.mask_sizes[0] * o.mask_sizes[1] * o.columns,
             expanded ? 0 : o.mask_sizes[1] * o.columns, expanded ? 0 : o.columns},
            o.columns % 8 == 0 && o.mask_offset % 8 == 0};
  }
};

bool differs(double got, double want, double bound) {
  return std::isnan(want) ? !std::isnan(got) : std::isinf(want) ? got != want : !(std::fabs(got - want) <= bound);
}

std::string run(const Options& o, bool expanded = false) {
  const auto n = static_cast<size_t>(o.rows * o.columns), columns = static_cast<size_t>(o.columns);
  Rng rng(n);
  AnyBuffer x("x", o.x, n, o.offset), y("y", o.y, n, o.offset), grad("grad", o.y, n, o.offset);
  AnyBuffer out("out", o.x, n, o.offset);
  emu::Buffer<float> statistics("statistics", 2 * static_cast<size_t>(o.rows));
  const int64_t inner = o.mask_sizes[0] * o.mask_sizes[1];
  Mask mask(o, rng, expanded ? o.rows / inner : o.rows, expanded);
  for (size_t i = 0; i < n; i++) {
    x.set(i, o.all != 0 ? o.all : (static_cast<double>(rng() % 257) - 128) / 16);
    if (o.last != 0 && i % columns == columns - 1) x.set(i, o.last);
    grad.set(i, (static_cast<double>(rng() % 33) - 16) / 8);
  }
  SoftmaxRows p{};
  p.x = x.data();
  p.y = y.data();
  p.statistics = o.log ? statistics.data() : nullptr;
  if (o.masked) p.mask = mask.rows;
  p.x_type = o.x;
  p.y_type = o.y;
  p.rows = o.rows;
  p.columns = o.columns;
  p.safe = o.safe;
  std::string error = message_of(softmax_rows(p, nullptr));
  if (!error.empty()) return error;
  SoftmaxGradient q{};
  q.grad = grad.data();
  q.of = o.log ? x.data() : y.data();
  q.statistics = p.statistics;
  q.mask = p.mask;
  q.out = out.data();
  q.grad_type = o.y;
  q.of_type = o.log ? o.x : o.y;
  q.out_type = o.x;
  q.rows = o.rows;
  q.columns = o.columns;
  error = message_of(softmax_rows_backward(q, nullptr));
  if (!error.empty()) return error;

  for (size_t r = 0; r < static_cast<size_t>(o.rows); r++) {
    std::vector<double> v(columns), g(columns);
    const int64_t row = static_cast<int64_t>(r);
    double largest = -HUGE_VAL, sum = 0, dot = 0, total = 0, size = 0, nan = 0;
    const auto kept = [&](size_t c) {
      return !o.masked || mask.bytes[static_cast<size_t>(expanded ? row / inner : row) * columns + c] != 0;
    };
    for (size_t c = 0; c < columns; c++) {
      v[c] = kept(c) ? static_cast<double>(x.get(r * columns + c)) : -HUGE_VAL;
      g[c] = grad.get(r * columns + c);
      if (std::isnan(v[c])) nan = kNaN;
      largest = std::fmax(largest, v[c]);
    }
    const bool empty = largest == -HUGE_VAL && nan == 0;
    const double base = empty || largest == -HUGE_VAL ? 0 : largest;
    for (size_t c = 0; c < columns; c++) sum += std::exp(v[c] - base);
    for (size_t c = 0; c < columns; c++) {
      const double of = o.log ? 1 : q.of_type == DType::kFloat32 ? y.get(r * columns + c) : y.get(r * columns + c);
      dot += g[c] * of;
      total += g[c];
      size += std::fabs(g[c]) * std::fabs(of);
    }
    for (size_t c = 0; c < columns; c++) {
      const size_t i = r * columns + c;
      const double e = std::exp(v[c] - base), probability = empty ? (o.safe ? 0 : kNaN) : e / sum;
      const double moved = v[c] - base, log_sum = empty ? (o.safe ? 0 : kNaN) : std::log(sum);
      const double want = o.log ? moved - log_sum : probability;
      const double fp32 = 32 * 0x1p-22 * (o.log ? std::fabs(std::isinf(moved) ? 0 : moved) + 8 : want);
      const double tiny = o.y == DType::kFloat16 ? 0x1p-25 : 0x1p-126;
      if (differs(y.get(i), want, fp32 + 1.01 * roundoff(o.y) * std::fabs(want) + tiny))
        return emu::format("y[%zu, %zu] is %.9g, expected %.9g", r, c, static_cast<double>(y.get(i)), want);
      const double stored = y.get(i);
      double gradient = o.log ? g[c] - probability * total : stored * (g[c] - dot);
      if (o.log && !kept(c)) gradient = 0;
      const double bound = o.log ? 64 * 0x1p-22 * probability * size : 16 * 0x1p-22 * std::fabs(stored) * (size + 2);
      if (differs(out.get(i), gradient, bound + 1.01 * roundoff(o.x) * std::fabs(gradient) + 0x1p-24))
        return emu::format("out[%zu, %zu] is %.9g, expected %.9g", r, c, static_cast<double>(out.get(i)), gradient);
    }
  }
  for (const AnyBuffer* b : {&y, &out}) {
    if (!b->check_red_zones().empty()) return b->check_red_zones();
  }
  return statistics.check_red_zones();
}

void shapes(Cases& cases) {
  for (const int columns : {1, 7, 40, 512, 513, 2056, 8192, 8193, 16400}) {
    for (const bool log : {false, true}) {
      const std::string title = std::to_string(columns) + (log ? " columns, log" : " columns");
      cases.check(title, [&] { return run({.rows = 2, .columns = columns, .log = log}); });
      cases.check(title + ", masked", [&] {
        return run({.rows = 2, .columns = columns, .log = log, .masked = true, .mask_sizes = {1, 2}});
      });
    }
  }
  for (const bool log : {false, true}) {
    for (int x = 0; x < 3; x++) {
      const Options o{.x = static_cast<DType>(x), .y = static_cast<DType>((x + 1) % 3), .log = log, .masked = true};
      cases.check("types " + std::to_string(x), [&] { return run(o); });
    }
    cases.check("between boundaries", [&] { return run({.log = log, .masked = true, .offset = 1}); });
    cases.check("a mask between boundaries", [&] { return run({.log = log, .masked = true, .mask_offset = 3}); });
    cases.check("an expanded mask",
                [&] { return run({.rows = 12, .log = log, .masked = true, .mask_sizes = {2, 3}}, true); });
    cases.check("a mask of three dimensions",
                [&] { return run({.rows = 12, .log = log, .masked = true, .mask_sizes = {2, 3}}); });
  }
}

void special_values(Cases& cases) {
  for (const int columns : {40, 8200}) {
    for (const bool log : {false, true}) {
      for (const bool safe : {false, true}) {
        const auto with = [&](double all, double last) {
          return run({.rows = 1, .columns = columns, .log = log, .safe = safe, .all = all, .last = last});
        };
        cases.check("nothing but -inf", [&] { return with(-INFINITY, 0); });
        cases.check("one of all", [&] { return with(-INFINITY, 2); });
        cases.check("NaN among -inf", [&] { return with(-INFINITY, NAN); });
        cases.check("NaN", [&] { return with(0, NAN); });
        cases.check("large", [&] { return with(30000, 30128); });
        cases.check("all equal", [&] { return with(-30000, 0); });
        cases.check("all equal and large, in fp32", [&] {
          return run({.rows = 1, .columns = columns, .y = DType::kFloat32, .log = log, .safe = safe, .all = 3e6});
        });
      }
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("softmax_rows", ak::test::Seeds(argc, argv, 1));
  ak::test::shapes(cases);
  ak::test::special_values(cases);
  return cases.finish();
}
