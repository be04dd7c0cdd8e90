// One call of norm_forward or norm_backward on the emulator, compared with double.
#pragma once
#include <cmath>

#include "emulator/harness.h"
#include "gemm/column_sums.cu"
#include "norm/backward.cu"
#include "norm/forward.cu"

namespace ak::test {

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
  bool centred = true, affine = true, biased = true, added = true;
  int offset = 0;            // elements in front of x, which so loses its alignment
  double scale = 1;          // of x
  double mean = 2;           // of x
  bool forced = false;       // rows in pieces, in the smallest block
  bool shared_rows = false;  // backward: rows that small blocks of a cluster share
  int parameters = 2;
  int sms = 1;
  int shared = 232448;    // bytes a block may have: room for so many teams, or for none
  bool branches = false;  // backward: the gradient of the branch is wanted
};

// A launch that walks rows in pieces at a size that the emulator can bear.
template <class Problem, class Kernel>
std::string in_pieces(Kernel kernel, const Problem& p, int grid) {
  return message_of(launch(kernel, {.name = "pieces", .grid = grid, .block = 32}, p));
}

template <class X, class R, class W, class Y, class B = W>
std::string forward(int rows, int columns, const Options& o = {}) {
  emu::options().sm_count = o.sms;
  emu::options().shared_limit = o.shared;
  const size_t n = static_cast<size_t>(rows) * columns;
  emu::Random random{n + 7};
  const auto draw = [&] { return (static_cast<float>(random.below(257)) - 128) / 64; };
  emu::Buffer<X> x("x", n, o.offset);
  emu::Buffer<R> residual("residual", n), sum("sum", n);
  emu::Buffer<W> weight("weight", columns);
  emu::Buffer<B> bias("bias", columns);
  emu::Buffer<Y> y("y", n);
  emu::Buffer<float> mean("mean", rows), rstd("rstd", rows);
  for (size_t i = 0; i < n; i++) {
    x.set(i, round_to<X>(static_cast<float>((draw() + o.mean) * o.scale)));
    residual.set(i, round_to<R>(draw()));
  }
  for (int c = 0; c < columns; c++) weight.set(c, round_to<W>(draw())), bias.set(c, round_to<B>(draw()));
  const NormForward p{x.data(),
                      o.added ? residual.data() : nullptr,
                      o.affine ? weight.data() : nullptr,
                      o.affine && o.biased ? bias.data() : nullptr,
                      o.added ? sum.data() : nullptr,
                      y.data(),
                      o.centred ? mean.data() : nullptr,
                      rstd.data(),
                      kType<X>,
                      kType<R>,
                      kType<W>,
                      kType<B>,
                      kType<Y>,
                      rows,
                      columns,
                      0x1p-10f};
  const std::string error = !o.forced ? message_of(norm_forward(p, nullptr))
                            : columns % 8 == 0 && o.offset == 0
                                ? in_pieces(norm_forward_kernel<32, kRowVec, false>, p, 2)
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
      ys[at + c] = o.affine ? value * to_float(weight[c]) + (o.biased ? to_float(bias[c]) : 0) : value;
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

// Branch is the type of the branch's gradient. x, grad and weight are small integers, mean an integer and rstd a power
// of two, so that sums over rows are exact.
template <class X, class G, class W, class Branch = float>
std::string backward(int rows, int columns, const Options& o = {}) {
  emu::options().sm_count = o.sms;
  emu::options().shared_limit = o.shared;
  const size_t n = static_cast<size_t>(rows) * columns;
  emu::Random random{n + 3};
  const auto draw = [&] { return static_cast<float>(random.below(17)) - 8; };
  emu::Buffer<X> x("x", n, o.offset), out("out", n);
  emu::Buffer<G> grad("grad", n), added("grad_sum", n);
  emu::Buffer<W> weight("weight", columns);
  emu::Buffer<float> mean("mean", rows), rstd("rstd", rows);
  emu::Buffer<Branch> branch("branch", n);
  const int grid = 3;
  const int64_t shares = std::min(rows, 3);
  const int64_t size = o.forced ? shares * columns * o.parameters : norm_backward_slots(rows, columns, o.parameters);
  emu::Buffer<float> slots("slots", static_cast<size_t>(size)),
      sums("sums", static_cast<size_t>(o.parameters) * columns);
  for (size_t i = 0; i < n; i++) {
    x.set(i, round_to<X>(draw()));
    grad.set(i, round_to<G>(draw()));
    added.set(i, round_to<G>(draw()));
  }
  for (int c = 0; c < columns; c++) weight.set(c, round_to<W>(draw()));
  for (int r = 0; r < rows; r++) mean.set(r, static_cast<float>(r % 5)), rstd.set(r, r % 2 ? 0.5f : 2.0f);
  const NormBackward p{grad.data(),
                       x.data(),
                       o.affine ? weight.data() : nullptr,
                       o.added ? added.data() : nullptr,
                       o.centred ? mean.data() : nullptr,
                       rstd.data(),
                       out.data(),
                       o.branches ? branch.data() : nullptr,
                       slots.data(),
                       sums.data(),
                       kType<G>,
                       kType<X>,
                       kType<W>,
                       kType<G>,
                       kType<Branch>,
                       rows,
                       columns,
                       o.parameters};
  std::string error;
  if (o.shared_rows) {
    int64_t clusters = 0;
    error = message_of(norm_backward_on_ring<RowTeam<2, 8, 4>>(p, nullptr, &clusters));
    if (error.empty() && clusters == 0) error = "nothing was launched";
    if (error.empty() && o.parameters > 0)
      error = message_of(add_slots(slots.data(), clusters, o.parameters * columns, sums.data(), nullptr));
  } else if (!o.forced) {
    error = message_of(norm_backward(p, nullptr));
  } else {
    const bool aligned = columns % 8 == 0 && o.offset == 0;
    error = aligned ? in_pieces(norm_backward_kernel<32, kRowVec, false>, p, grid)
                    : in_pieces(norm_backward_kernel<32, 1, false>, p, grid);
    if (error.empty() && o.parameters > 0)
      error = message_of(aligned ? strip_sums<kRingVec>(p, shares, nullptr) : strip_sums<1>(p, shares, nullptr));
    if (error.empty() && o.parameters > 0)
      error = message_of(add_slots(slots.data(), shares, o.parameters * columns, sums.data(), nullptr));
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
  if (const std::string wrong = differs("out", out, outs, 1000); !wrong.empty() || !o.branches) return wrong;
  for (size_t i = 0; i < n; i++) {
    if (bits_of(to_float(branch[i])) != bits_of(to_float(round_to<Branch>(to_float(out[i])))))
      return emu::format("branch[%zu] is %.9g, out is %.9g", i, to_float(branch[i]), to_float(out[i]));
  }
  return branch.check_written();
}

}  // namespace ak::test
