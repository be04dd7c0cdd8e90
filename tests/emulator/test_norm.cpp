// norm_forward and norm_backward on the emulator, against double: every team and shape of block, rows in pieces, types,
// alignments and absent operands.
#include <cmath>

#include "gemm/column_sums.cu"
#include "harness.h"
#include "norm/backward.cu"
#include "norm/forward.cu"

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
  double p = -1;          // of dropout on x, or of the branch's gradient; none where it is negative
};

constexpr int64_t kSeed = 0x7edcba9876543210;

/// Element i after dropout.
float dropped(float x, size_t i, double p) {
  const uint32_t word = philox4x32_10({{static_cast<uint32_t>(i / 4), 0, 0, 0}}, kSeed).word[i % 4];
  const float scale = p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f;
  return (word >> 8) >= p * 0x1p24 ? x * scale : 0.0f;
}

DropoutMask mask_of(emu::Buffer<int64_t>& seed, const Options& o) {
  if (o.p < 0) return {};
  return {seed.data(), dropout_rate(o.p)};
}

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
  emu::Buffer<int64_t> seed("seed", 1, 0);
  seed.set(0, kSeed);
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
                      0x1p-10f,
                      mask_of(seed, o)};
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
      const float v = o.p < 0 ? to_float(x[at + c]) : dropped(to_float(x[at + c]), at + c, o.p);
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
  emu::Buffer<int64_t> seed("seed", 1, 0);
  seed.set(0, kSeed);
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
                       o.parameters,
                       mask_of(seed, o)};
  std::string error;
  if (o.shared_rows) {
    int64_t clusters = 0;
    error = message_of(norm_backward_on_ring<RowTeam<2, 8, 4>>(p, nullptr, &clusters));
    if (error.empty() && clusters == 0) error = "nothing was launched";
    if (error.empty() && o.parameters > 0)
      error = message_of(column_sums(slots.data(), clusters, o.parameters * columns, sums.data(), nullptr));
  } else if (!o.forced) {
    error = message_of(norm_backward(p, nullptr));
  } else {
    const bool aligned = columns % 8 == 0 && o.offset == 0;
    error = aligned ? in_pieces(norm_backward_kernel<32, kRowVec, false>, p, grid)
                    : in_pieces(norm_backward_kernel<32, 1, false>, p, grid);
    if (error.empty() && o.parameters > 0)
      error = message_of(aligned ? strip_sums<kRingVec>(p, shares, nullptr) : strip_sums<1>(p, shares, nullptr));
    if (error.empty() && o.parameters > 0)
      error = message_of(column_sums(slots.data(), shares, o.parameters * columns, sums.data(), nullptr));
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
    const float value = o.p < 0 ? to_float(out[i]) : dropped(to_float(out[i]), i, o.p);
    if (bits_of(to_float(branch[i])) != bits_of(to_float(round_to<Branch>(value))))
      return emu::format("branch[%zu] is %.9g, out is %.9g", i, to_float(branch[i]), to_float(out[i]));
  }
  return branch.check_written();
}

void check_forward(Cases& cases) {
  for (const int columns : {1, 8, 33, 512}) {
    const std::string title = "forward, " + std::to_string(columns);
    cases.check(title, [&] { return forward<bf16, float, fp16, bf16>(3, columns); });
    cases.check(title + ", rms", [&] { return forward<fp16, bf16, float, fp16>(2, columns, {.centred = false}); });
    cases.check(title + ", alone",
                [&] { return forward<float, float, float, float>(2, columns, {.affine = false, .added = false}); });
  }
  for (const int columns : {256, 264, 768, 1024, 1032, 2048, 2056, 3072, 3080, 4096, 4104}) {
    const std::string title = "forward, teams for " + std::to_string(columns);
    cases.check(title, [&] { return forward<bf16, float, float, bf16>(3, columns, {.sms = 2}); });
  }
  cases.check("forward, the largest row of a team", [] { return forward<float, bf16, fp16, float>(1, 8192); });
  for (const int columns : {8200, 16384}) {
    const std::string title = "forward, long rows, " + std::to_string(columns);
    cases.check(title, [&] {
      return forward<bf16, bf16, bf16, bf16>(columns < 9000 ? 2 : 1, columns,
                                             {.centred = columns < 20000, .added = columns < 20000});
    });
  }
  cases.check("forward, long rows without room",
              [] { return forward<bf16, float, bf16, bf16>(1, 8200, {.shared = 1000}); });
  cases.check("forward, long rows, squares overflow", [] {
    return forward<float, float, float, float>(1, 8200, {.affine = false, .added = false, .scale = 1e30});
  });
  // Rows of which shared memory has room for one, in the registers of an SM.
  for (const int rows : {1, 5}) {
    cases.check("forward, wide rows", [=] {
      return forward<float, bf16, float, float>(rows, 16392, {.added = false, .sms = 2, .shared = 100000});
    });
  }
  cases.check("forward, wide rows of 16 bits",
              [] { return forward<bf16, float, float, fp16>(2, 20488, {.added = false, .shared = 60000}); });
  cases.check("forward, the widest row",
              [] { return forward<float, float, float, float>(2, 32768, {.affine = false, .added = false}); });
  cases.check("forward, wide rows, squares overflow", [] {
    return forward<float, float, float, float>(1, 29064, {.affine = false, .added = false, .scale = 1e30});
  });
  cases.check("forward, wide rows without room",
              [] { return forward<float, float, float, float>(1, 32768, {.added = false, .shared = 130000}); });
  // More columns than registers hold: two teams, one, and no room for one.
  cases.check("forward, resident rows", [] { return forward<bf16, float, float, fp16>(5, 16400, {.added = false}); });
  cases.check("forward, resident rows, a round and steps one by one",
              [] { return forward<fp16, float, bf16, bf16>(4, 20488, {.added = false}); });
  cases.check("forward, resident rows, sum", [] { return forward<bf16, fp16, bf16, bf16>(5, 20488, {.sms = 2}); });
  cases.check("forward, resident rows, fp32 sum",
              [] { return forward<bf16, float, bf16, bf16>(1, 32768, {.centred = false, .affine = false}); });
  cases.check("forward, resident rows, no bias", [] {
    return forward<fp16, float, bf16, bf16, float>(1, 16392, {.centred = false, .biased = false, .added = false});
  });
  cases.check("forward, resident rows, a bias of another type",
              [] { return forward<fp16, float, bf16, float, float>(1, 16392, {.added = false}); });
  cases.check("forward, resident rows, dropout", [] { return forward<bf16, float, bf16, bf16>(2, 16392, {.p = 0.3}); });
  cases.check("forward, resident rows, longer ones",
              [] { return forward<bf16, bf16, bf16, bf16>(1, 65544, {.affine = false, .added = false}); });
  cases.check("forward, resident rows, squares overflow", [] {
    return forward<float, float, float, float>(1, 24576, {.affine = false, .added = false, .scale = 1e30});
  });
  cases.check("forward, resident rows, several in fp32",
              [] { return forward<float, float, float, float>(5, 16392, {.affine = false, .added = false}); });
  cases.check("forward, resident rows without room",
              [] { return forward<float, float, bf16, bf16>(1, 32768, {.shared = 200000}); });
  // One team, so that each slot is filled several times.
  cases.check("forward, a ring of 9", [] { return forward<bf16, float, fp16, bf16>(21, 64, {.shared = 4000}); });
  cases.check("forward, a ring of 4", [] {
    return forward<float, fp16, bf16, float>(10, 264, {.centred = false, .added = false, .shared = 4500});
  });
  cases.check("forward, a ring of 3", [] { return forward<bf16, bf16, bf16, bf16>(7, 600, {.shared = 8000}); });
  cases.check("forward, a ring of 4 warps",
              [] { return forward<bf16, fp16, float, fp16>(9, 1048, {.shared = 18000}); });
  for (const int columns : {64, 768, 2056}) {
    cases.check("forward, no room for a team, " + std::to_string(columns),
                [&] { return forward<bf16, float, float, bf16>(2, columns, {.shared = 100}); });
  }
  cases.check("forward, 128 threads, odd", [] { return forward<float, bf16, float, bf16>(1, 1001); });
  cases.check("forward, 512 threads, odd", [] { return forward<fp16, fp16, bf16, float>(2, 2057); });
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
  for (const double p : {0.0, 0.3, 0.9999, 1.0}) {
    const std::string of = ", dropout of " + std::to_string(p);
    cases.check("forward, teams" + of, [=] { return forward<bf16, float, float, bf16>(5, 264, {.sms = 2, .p = p}); });
    cases.check("forward, long rows" + of, [=] { return forward<bf16, bf16, bf16, bf16>(2, 8200, {.p = p}); });
    cases.check("forward, odd" + of, [=] { return forward<fp16, float, bf16, fp16>(3, 601, {.p = p}); });
    cases.check("forward, unaligned" + of,
                [=] { return forward<bf16, float, float, bf16>(3, 62, {.offset = 1, .p = p}); });
  }
  cases.check("forward, dropout without room",
              [] { return forward<bf16, fp16, float, bf16>(3, 768, {.shared = 100, .p = 0.3}); });
  for (const int columns : {1040, 1541}) {
    cases.check("forward in pieces, dropout, " + std::to_string(columns),
                [&] { return forward<bf16, float, fp16, float>(3, columns, {.forced = true, .p = 0.3}); });
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
  for (const int columns : {256, 264, 768, 1024, 1032, 2048, 2056, 3072, 3080, 4096, 4104}) {
    const std::string title = "backward, teams for " + std::to_string(columns);
    // Column sums of more than 4,000 columns take more threads than the emulator has stacks.
    const int parameters = columns < 2000 ? 2 : columns < 4000 ? 1 : 0;
    cases.check(title, [&] { return backward<bf16, float, float>(5, columns, {.parameters = parameters, .sms = 2}); });
  }
  cases.check("backward, the largest row of a team",
              [] { return backward<float, bf16, fp16>(1, 8192, {.parameters = 0}); });
  cases.check("backward, a ring of 9", [] { return backward<bf16, float, fp16>(21, 64, {.shared = 6000}); });
  cases.check("backward, a ring of 4",
              [] { return backward<float, fp16, bf16>(10, 264, {.added = false, .parameters = 1, .shared = 7000}); });
  cases.check("backward, a ring of 3",
              [] { return backward<bf16, bf16, bf16>(7, 600, {.centred = false, .added = false, .shared = 8000}); });
  cases.check("backward, a ring of 4 warps", [] { return backward<bf16, fp16, float>(9, 1048, {.shared = 27000}); });
  for (const int columns : {64, 768, 2056}) {
    cases.check("backward, no room for a team, " + std::to_string(columns),
                [&] { return backward<bf16, float, float>(5, columns, {.parameters = 1, .shared = 100}); });
  }
  cases.check("backward, 128 threads, odd", [] { return backward<float, bf16, float>(6, 601); });
  cases.check("backward, 512 threads, odd", [] { return backward<fp16, fp16, bf16>(3, 2057, {.parameters = 1}); });
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
  cases.check("backward, sums of many rows a share",
              [] { return backward<bf16, float, fp16>(29, 1032, {.forced = true}); });
  for (const int columns : {8200, 8201}) {
    cases.check("backward, long rows, " + std::to_string(columns),
                [&] { return backward<bf16, bf16, float>(2, columns, {.added = false, .parameters = 0}); });
  }
  // A row shared by the blocks of a cluster; the last has fewer columns. With 4 SMs one cluster takes all rows.
  for (const int columns : {1032, 1536}) {
    const std::string title = "backward, a cluster a row, " + std::to_string(columns);
    cases.check(title, [&] { return backward<bf16, float, fp16>(7, columns, {.shared_rows = true, .sms = 4}); });
    cases.check(title + ", two clusters", [&] {
      return backward<float, bf16, float, bf16>(
          3, columns, {.shared_rows = true, .parameters = 1, .sms = 9, .branches = true, .p = 0.3});
    });
    cases.check(title + ", rms, one team", [&] {
      return backward<fp16, fp16, bf16>(
          4, columns, {.centred = false, .added = false, .shared_rows = true, .sms = 4, .shared = 30000});
    });
  }
  for (const int columns : {8200, 16392, 32776}) {
    const std::string title = "backward, clusters of blocks, " + std::to_string(columns);
    cases.check(title, [&] {
      return backward<float, bf16, float>(columns < 9000 ? 5 : 1, columns, {.added = false, .parameters = 0, .sms = 8});
    });
  }
  cases.check("backward, long rows on chips without clusters", [] {
    emu::options().runs_sm90_code = false;
    return backward<bf16, bf16, float>(2, 8200, {.added = false, .parameters = 0, .sms = 8});
  });
  cases.check("backward, rows too long for a cluster's shared memory",
              [] { return backward<bf16, bf16, float>(1, 8200, {.parameters = 0, .sms = 8, .shared = 2000}); });
  cases.check("backward, the shares of long rows", [] {
    emu::options().sm_count = 132;
    const bool right = norm_backward_slots(2048, 32768, 2) == 16 * 2 * 32768 &&
                       norm_backward_slots(5, 32768, 1) == 5 * 32768 &&
                       norm_backward_slots(2048, 16384, 1) == 33 * 16384 &&
                       norm_backward_slots(9, 1 << 20, 1) == 1 << 20 && norm_backward_slots(0, 32768, 2) == 0;
    emu::options().runs_sm90_code = false;
    return right && norm_backward_slots(2048, 32768, 2) == 12 * 2 * 32768 ? "" : "other sizes";
  });
  for (const double p : {-1.0, 0.0, 0.3, 1.0}) {
    const std::string of = ", a branch with dropout of " + std::to_string(p);
    cases.check("backward, teams" + of, [=] {
      return backward<float, bf16, float, bf16>(5, 264, {.parameters = 1, .sms = 2, .branches = true, .p = p});
    });
    cases.check("backward, odd" + of,
                [=] { return backward<fp16, float, bf16, float>(3, 601, {.branches = true, .p = p}); });
    cases.check("backward, unaligned" + of,
                [=] { return backward<bf16, float, float, fp16>(3, 62, {.offset = 1, .branches = true, .p = p}); });
  }
  for (const int columns : {1040, 1541}) {
    cases.check("backward in pieces, a branch, " + std::to_string(columns), [&] {
      return backward<float, bf16, fp16, bf16>(3, columns, {.forced = true, .branches = true, .p = 0.3});
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
