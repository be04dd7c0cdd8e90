// norm_forward and norm_backward on the emulator, against double: every shape of block, rows in pieces, types,
// alignments and absent operands.
#include <cmath>

#include "harness.h"
#include "kernels/gemm_column_sums.cu"
#include "kernels/norm_backward.cu"
#include "kernels/norm_forward.cu"

namespace ak::test {
namespace {

template <class T>
constexpr DType kType = std::is_same_v<T, float>  ? DType::kFloat32
                        : std::is_same_v<T, bf16> ? DType::kBFloat16
                                                  : DType::kFloat16;
template <class T>
constexpr double kRoundoff = std::is_same_v<T, float>  ? 2e-6
                             : std::is_same_v<T, bf16> ? 0x1p-8
                                                       : 0x1p-11;

template <class T>
std::string differs(const char* name, const emu::Buffer<T>& got, const std::vector<double>& want, double scale = 1) {
  for (size_t i = 0; i < want.size(); i++) {
    const double value = to_float(got[i]), bound = kRoundoff<T> * (std::fabs(want[i]) + 8 * scale * 0x1p-4);
    if (!(std::fabs(value - want[i]) <= bound))
      return emu::format("%s[%zu] is %.9g, expected %.9g", name, i, value, want[i]);
  }
  return got.check_written();
}

struct Options {
  bool centred = true, affine = true, added = true;
  int offset = 0;       // elements in front of x, which so loses its alignment
  double scale = 1;     // of x
  double mean = 2;      // of x
  bool forced = false;  // rows in pieces, in the smallest block
  int parameters = 2;
  int sms = 1;
};

// A launch that walks rows in pieces at a size that the emulator can bear.
template <class Problem, class Kernel>
std::string in_pieces(Kernel kernel, const Problem& p, int grid) {
  return message_of(launch(kernel, {.name = "pieces", .grid = grid, .block = 32}, p));
}

template <class X, class R, class W, class Y>
std::string forward(int rows, int columns, const Options& o = {}) {
  emu::options().sm_count = o.sms;
  const size_t n = static_cast<size_t>(rows) * columns;
  emu::Random random{n + 7};
  const auto draw = [&] { return (static_cast<float>(random.below(257)) - 128) / 64; };
  emu::Buffer<X> x("x", n, o.offset);
  emu::Buffer<R> residual("residual", n), sum("sum", n);
  emu::Buffer<W> weight("weight", columns), bias("bias", columns);
  emu::Buffer<Y> y("y", n);
  emu::Buffer<float> mean("mean", rows), rstd("rstd", rows);
  for (size_t i = 0; i < n; i++) {
    x.set(i, round_to<X>(static_cast<float>((draw() + o.mean) * o.scale)));
    residual.set(i, round_to<R>(draw()));
  }
  for (int c = 0; c < columns; c++) weight.set(c, round_to<W>(draw())), bias.set(c, round_to<W>(draw()));
  const NormForward p{x.data(),
                      o.added ? residual.data() : nullptr,
                      o.affine ? weight.data() : nullptr,
                      o.affine ? bias.data() : nullptr,
                      o.added ? sum.data() : nullptr,
                      y.data(),
                      o.centred ? mean.data() : nullptr,
                      rstd.data(),
                      kType<X>,
                      kType<R>,
                      kType<W>,
                      kType<W>,
                      kType<Y>,
                      rows,
                      columns,
                      0x1p-10f};
  const std::string error = !o.forced                           ? message_of(norm_forward(p, nullptr))
                            : columns % 8 == 0 && o.offset == 0 ? in_pieces(norm_forward_kernel<32, 8, false>, p, 2)
                                                                : in_pieces(norm_forward_kernel<32, 1, false>, p, 2);
  if (!error.empty()) return error;

  std::vector<double> sums(n), ys(n), means(rows), rstds(rows);
  for (int r = 0; r < rows; r++) {
    const size_t at = static_cast<size_t>(r) * columns;
    double total = 0, squares = 0;
    for (int c = 0; c < columns; c++) {
      const float v = to_float(x[at + c]);
      sums[at + c] = o.added ? to_float(round_to<R>(v + to_float(residual[at + c]))) : v;
      total += sums[at + c];
    }
    means[r] = o.centred ? total / columns : 0;
    for (int c = 0; c < columns; c++) squares += (sums[at + c] - means[r]) * (sums[at + c] - means[r]);
    rstds[r] = 1 / std::sqrt(squares / columns + 0x1p-10);
    for (int c = 0; c < columns; c++) {
      const double value = (sums[at + c] - means[r]) * rstds[r];
      ys[at + c] = o.affine ? value * to_float(weight[c]) + to_float(bias[c]) : value;
    }
  }
  std::string wrong = differs("y", y, ys, 4 + o.mean);
  if (wrong.empty() && o.added) {
    for (size_t i = 0; i < n; i++)
      if (to_float(sum[i]) != sums[i])
        return emu::format("sum[%zu] is %.9g, expected %.9g", i, to_float(sum[i]), sums[i]);
  }
  if (wrong.empty() && o.centred) wrong = differs("mean", mean, means, o.scale);
  for (int r = 0; wrong.empty() && r < rows; r++)
    if (!(std::fabs(rstd[r] - rstds[r]) <= 2e-6 * rstds[r]))
      wrong = emu::format("rstd[%d] is %.9g, expected %.9g", r, rstd[r], rstds[r]);
  return wrong;
}

// x, grad and weight are small integers, mean an integer and rstd a power of two, so that sums over rows are exact.
template <class X, class G, class W>
std::string backward(int rows, int columns, const Options& o = {}) {
  emu::options().sm_count = o.sms;
  const size_t n = static_cast<size_t>(rows) * columns;
  emu::Random random{n + 3};
  const auto draw = [&] { return static_cast<float>(random.below(17)) - 8; };
  emu::Buffer<X> x("x", n, o.offset), out("out", n);
  emu::Buffer<G> grad("grad", n), added("grad_sum", n);
  emu::Buffer<W> weight("weight", columns);
  emu::Buffer<float> mean("mean", rows), rstd("rstd", rows);
  const int grid = 3;
  const int64_t size =
      o.forced ? int64_t{grid} * columns * o.parameters : norm_backward_slots_size(rows, columns, o.parameters);
  emu::Buffer<float> slots("slots", static_cast<size_t>(size)),
      sums("sums", static_cast<size_t>(o.parameters) * columns);
  for (size_t i = 0; i < n; i++) {
    x.set(i, round_to<X>(draw()));
    grad.set(i, round_to<G>(draw()));
    added.set(i, round_to<G>(draw()));
  }
  for (int c = 0; c < columns; c++) weight.set(c, round_to<W>(draw()));
  for (int r = 0; r < rows; r++) mean.set(r, static_cast<float>(r % 3)), rstd.set(r, r % 2 ? 0.5f : 2.0f);
  const NormBackward p{grad.data(),
                       x.data(),
                       o.affine ? weight.data() : nullptr,
                       o.added ? added.data() : nullptr,
                       o.centred ? mean.data() : nullptr,
                       rstd.data(),
                       out.data(),
                       slots.data(),
                       sums.data(),
                       kType<G>,
                       kType<X>,
                       kType<W>,
                       kType<G>,
                       rows,
                       columns,
                       o.parameters};
  std::string error;
  if (!o.forced) {
    error = message_of(norm_backward(p, nullptr));
  } else {
    error = columns % 8 == 0 && o.offset == 0 ? in_pieces(norm_backward_kernel<32, 8, false>, p, grid)
                                              : in_pieces(norm_backward_kernel<32, 1, false>, p, grid);
    if (error.empty() && o.parameters > 0)
      error = message_of(column_sums(slots.data(), grid, o.parameters * columns, sums.data(), nullptr));
  }
  if (!error.empty()) return error;

  std::vector<double> outs(n), totals(static_cast<size_t>(2) * columns);
  for (int r = 0; r < rows; r++) {
    const size_t at = static_cast<size_t>(r) * columns;
    const double m = o.centred ? mean[r] : 0, s = rstd[r];
    double sum_g = 0, sum_gn = 0;
    const auto g_of = [&](int c) { return to_float(grad[at + c]) * (o.affine ? to_float(weight[c]) : 1.0); };
    const auto n_of = [&](int c) { return (to_float(x[at + c]) - m) * s; };
    for (int c = 0; c < columns; c++) {
      sum_g += g_of(c);
      sum_gn += g_of(c) * n_of(c);
      totals[c] += to_float(grad[at + c]) * n_of(c);
      totals[columns + c] += to_float(grad[at + c]);
    }
    if (!o.centred) sum_g = 0;
    for (int c = 0; c < columns; c++) {
      outs[at + c] = s * (g_of(c) - sum_g / columns - n_of(c) * sum_gn / columns);
      if (o.added) outs[at + c] += to_float(added[at + c]);
    }
  }
  for (int i = 0; i < o.parameters * columns; i++)
    if (sums[i] != totals[i]) return emu::format("sums[%d] is %.9g, expected %.9g", i, sums[i], totals[i]);
  return differs("out", out, outs, 1000);
}

void check_forward(Cases& cases) {
  for (const int columns : {1, 8, 33, 512}) {
    const std::string title = "forward, " + std::to_string(columns);
    cases.check(title, [&] { return forward<bf16, float, fp16, bf16>(3, columns); });
    cases.check(title + ", rms", [&] { return forward<fp16, bf16, float, fp16>(2, columns, {.centred = false}); });
    cases.check(title + ", alone",
                [&] { return forward<float, float, float, float>(2, columns, {.affine = false, .added = false}); });
  }
  cases.check("forward, 128 threads", [] { return forward<bf16, float, float, float>(2, 768); });
  cases.check("forward, 128 threads, odd", [] { return forward<float, bf16, float, bf16>(1, 1001); });
  cases.check("forward, 512 threads", [] { return forward<fp16, fp16, bf16, float>(2, 2056); });
  cases.check("forward, unaligned", [] { return forward<bf16, float, float, bf16>(3, 64, {.offset = 1}); });
  for (const int columns : {512, 1040, 1541}) {
    const std::string title = "forward in pieces, " + std::to_string(columns);
    cases.check(title, [&] { return forward<bf16, float, fp16, float>(3, columns, {.forced = true}); });
    cases.check(title + ", 16-bit sum",
                [&] { return forward<float, bf16, float, bf16>(3, columns, {.forced = true}); });
    cases.check(title + ", alone", [&] {
      return forward<float, float, float, float>(3, columns,
                                                 {.centred = false, .affine = false, .added = false, .forced = true});
    });
  }
  for (const bool forced : {false, true}) {
    for (const bool centred : {false, true}) {
      cases.check("forward, squares overflow", [&] {
        return forward<float, float, float, float>(
            2, 600, {.centred = centred, .affine = false, .added = false, .scale = 1e30, .forced = forced});
      });
    }
    cases.check("forward, large mean", [&] {
      return forward<float, float, float, float>(2, 600,
                                                 {.affine = false, .added = false, .mean = 512, .forced = forced});
    });
  }
  cases.check("forward, no rows", [] { return forward<float, float, float, float>(0, 8); });
}

void check_backward(Cases& cases) {
  for (const int columns : {1, 8, 33, 512}) {
    const std::string title = "backward, " + std::to_string(columns);
    cases.check(title, [&] { return backward<bf16, float, fp16>(3, columns); });
    cases.check(title + ", rms",
                [&] { return backward<fp16, bf16, float>(20, columns, {.centred = false, .parameters = 1}); });
    cases.check(title + ", alone", [&] {
      return backward<float, fp16, float>(2, columns, {.affine = false, .added = false, .parameters = 0});
    });
    cases.check(title + ", several rows a block",
                [&] { return backward<float, float, bf16>(41, columns, {.added = false}); });
  }
  cases.check("backward, 128 threads", [] { return backward<bf16, float, float>(9, 768); });
  cases.check("backward, 128 threads, odd", [] { return backward<float, bf16, float>(6, 601); });
  cases.check("backward, 512 threads", [] { return backward<fp16, fp16, bf16>(3, 2056, {.parameters = 1}); });
  cases.check("backward, unaligned", [] { return backward<bf16, float, float>(3, 64, {.offset = 1}); });
  for (const int columns : {512, 1040, 1541}) {
    const std::string title = "backward in pieces, " + std::to_string(columns);
    cases.check(title, [&] { return backward<bf16, float, fp16>(7, columns, {.forced = true}); });
    cases.check(title + ", weight alone", [&] {
      return backward<float, bf16, float>(7, columns,
                                          {.centred = false, .added = false, .forced = true, .parameters = 1});
    });
    cases.check(title + ", rows alone", [&] {
      return backward<float, bf16, float>(4, columns, {.affine = false, .forced = true, .parameters = 0});
    });
  }
  cases.check("backward, no rows", [] { return message_of(norm_backward(NormBackward{}, nullptr)); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("norm", ak::test::Seeds(argc, argv, 2));
  ak::test::check_forward(cases);
  ak::test::check_backward(cases);
  return cases.finish();
}
