// gemm_sm80 on the emulator: layouts, tiles, alignments, tails, batches, splits, epilogues and outputs, bit for bit.
// The inputs are small integers, so every sum is exact in fp32 and only one result is right, whatever the order of
// additions. Memory between the rows of an operand is NaN, and nothing in front of its first or past its last
// element may be read.
#include <cmath>

#include "emulator/harness.h"
#include "gemm/sm80/gemm.cu"
#include "gemm_scratch.h"
#include "matrices.h"

namespace ak::test {
namespace {

constexpr Major K = Major::kK, MN = Major::kMN;
constexpr GemmSm80Tile kWide = GemmSm80Tile::k128x256, kSquare = GemmSm80Tile::k128x128, kSmall = GemmSm80Tile::k64x64;

struct Setup {
  int m, n, k;
  Major major_a = K, major_b = K;
  GemmSm80Tile tile = kSmall;
  int offset_a = 0, offset_b = 0, offset_c = 0;  // elements from a 256-byte boundary
  int gap_a = 0, gap_b = 0, gap_c = 0;           // elements between rows
  int splits = 1, batch = 1, batch_gap = 0;      // elements between matrices, besides
  bool shared_b = false;                         // one B for all of the batch
  DType out = DType::kBFloat16;
  bool accumulate = false, transposed_c = false;
  int shared_limit = 232448;

  float alpha = 1, beta = 1;
  Activation activation = Activation::none;
  enum class Bias { kNone, kColumn, kRow } bias = Bias::kNone;
  bool residual = false, z = false, dact = false, sums = false;

  bool gated() const { return activation == Activation::swiglu; }
  int columns() const { return !gated() ? n : dact ? 2 * n : n / 2; }  // of C
  std::string title() const {
    return emu::format("%dx%dx%d, A %s+%d+%d, B %s+%d+%d, C +%d+%d, tile %d, splits %d, batch %d, activation %d%s", m,
                       n, k, major_a == K ? "k" : "m", offset_a, gap_a, major_b == K ? "k" : "n", offset_b, gap_b,
                       offset_c, gap_c, static_cast<int>(tile), splits, batch, static_cast<int>(activation),
                       dact ? "'" : "");
  }
};

template <class T, class Out>
std::string product(const Setup& s) {
  emu::options().shared_limit = s.shared_limit;
  const int batch_b = s.shared_b ? 1 : s.batch, columns = s.columns();
  const auto seed = static_cast<uint64_t>(s.m * 7 + s.n * 3 + s.k);
  const Matrix a(s.m, s.k, s.batch, seed), b(s.k, s.n, batch_b, seed + 1), bias(1, s.n > s.m ? s.n : s.m, 1, seed + 2);
  const Matrix residual(s.m, columns, s.batch, seed + 3), preact(s.m, columns, s.batch, seed + 4);
  const Stored<T> stored_a("a", a, s.major_a == MN, s.gap_a, s.offset_a, s.batch_gap);
  const Stored<T> stored_b("b", b, s.major_b == K, s.gap_b, s.offset_b, s.batch_gap);
  const Stored<float> stored_bias("bias", bias, false, 0, 1);
  const Stored<T> stored_residual("residual", residual, false, 3, 1), stored_preact("preact", preact, false, 0, 0);
  constexpr DType kInput = std::is_same_v<T, bf16> ? DType::kBFloat16 : DType::kFloat16;
  constexpr float kInitial = 3;
  const Result<Out> c("c", s.out, s.m, columns, s.batch, s.gap_c, s.offset_c, s.transposed_c,
                      s.accumulate ? kInitial : NAN, s.batch_gap);
  const Result<T> z("z", kInput, s.m, s.n, s.batch, 1, 0, false, NAN);
  const int groups = (s.m + 15) / 16;
  emu::Buffer<float> sums("sums", static_cast<size_t>(s.batch) * groups * columns);

  GemmProblem q{};
  q.a = stored_a.buffer->data();
  q.b = stored_b.buffer->data();
  q.c = c.values;
  q.type = kInput;
  q.accumulate = s.accumulate;
  q.m = s.m, q.n = s.n, q.k = s.k;
  q.ld_a = stored_a.ld, q.ld_b = stored_b.ld;
  q.m_major_a = s.major_a == MN, q.n_major_b = s.major_b == MN;
  q.batch = s.batch, q.batch_stride_a = stored_a.batch_stride,
  q.batch_stride_b = s.shared_b ? 0 : stored_b.batch_stride;
  q.epilogue.alpha = s.alpha, q.epilogue.beta = s.beta, q.epilogue.activation = s.activation;
  if (s.bias == Setup::Bias::kColumn) q.epilogue.bias = {stored_bias.buffer->data(), DType::kFloat32, 0, 1, 0};
  if (s.bias == Setup::Bias::kRow) q.epilogue.bias = {stored_bias.buffer->data(), DType::kFloat32, 1, 0, 0};
  if (s.residual) q.epilogue.residual = stored_residual.as_values(kInput);
  if (s.z) q.epilogue.z = z.values;
  if (s.dact) q.epilogue.preact = stored_preact.as_values(kInput);
  if (s.sums) q.epilogue.column_sums = sums.data();

  const GemmSm80Config config{s.tile, s.splits};
  Scratch scratch(gemm_sm80_scratch(q, config));
  std::string error = message_of(gemm_sm80<T>(q, config, scratch.get(), nullptr));
  if (error.empty()) error = scratch.check();
  if (!error.empty()) return error;

  std::vector<float> product(static_cast<size_t>(s.batch) * s.m * s.n);
  for (int i = 0; i < s.batch; i++) {
    for (int r = 0; r < s.m; r++) {
      for (int x = 0; x < s.n; x++) {
        float sum = 0;
        for (int k = 0; k < s.k; k++) sum += a.at(i, r, k) * b.at(s.shared_b ? 0 : i, k, x);
        product[(static_cast<size_t>(i) * s.m + r) * s.n + x] = sum;
      }
    }
  }
  const auto pre_activation = [&](int i, int r, int x) {
    const float sum = product[(static_cast<size_t>(i) * s.m + r) * s.n + x];
    return fma(s.alpha, sum,
               s.bias == Setup::Bias::kColumn ? bias.at(0, 0, x)
               : s.bias == Setup::Bias::kRow  ? bias.at(0, 0, r)
                                              : 0);
  };
  const auto want = [&](int i, int r, int x) {
    float y;
    if (s.dact && s.gated()) {
      const int f = x % s.n;
      const auto g = swiglu_backward(pre_activation(i, r, f), preact.at(i, r, f), preact.at(i, r, f + s.n));
      y = x < s.n ? g.gate : g.up;
    } else if (s.dact) {
      y = activate_backward(s.activation, pre_activation(i, r, x), preact.at(i, r, x));
    } else if (s.gated()) {
      y = swiglu(pre_activation(i, r, x), pre_activation(i, r, x + s.n / 2));
    } else {
      y = activate(s.activation, pre_activation(i, r, x));
    }
    if (s.residual) y = fma(s.beta, residual.at(i, r, x), y);
    return s.accumulate ? y + kInitial : y;
  };
  std::string wrong = c.compare("c", want);
  if (wrong.empty() && s.z) wrong = z.compare("z", pre_activation);
  for (int i = 0; i < s.batch && s.sums && wrong.empty(); i++) {
    for (int g = 0; g < groups && wrong.empty(); g++) {
      for (int x = 0; x < columns && wrong.empty(); x++) {
        double sum = 0, magnitude = 0;
        for (int r = 16 * g; r < s.m && r < 16 * g + 16; r++) {
          sum += want(i, r, x);
          magnitude += std::fabs(want(i, r, x));
        }
        const float got = sums[(static_cast<size_t>(i) * groups + g) * columns + x];
        if (!(std::fabs(got - sum) <= 1e-6 * magnitude)) {
          wrong = emu::format("sum of column %d, rows from %d on, is %g, expected %g", x, 16 * g, got, sum);
        }
      }
    }
  }
  return wrong.empty() ? sums.check_red_zones() : wrong;
}

template <class T>
void check(Cases& cases, const Setup& s) {
  cases.check(s.title(), [&] {
    switch (s.out) {
      case DType::kFloat16:
        return product<T, fp16>(s);
      case DType::kBFloat16:
        return product<T, bf16>(s);
      default:
        return product<T, float>(s);
    }
  });
}

using enum Activation;
using enum DType;
using enum Setup::Bias;

void layouts(Cases& cases) {
  for (Major a : {K, MN}) {
    for (Major b : {K, MN}) {
      check<bf16>(cases, {.m = 72, .n = 136, .k = 104, .major_a = a, .major_b = b});
      check<fp16>(cases, {.m = 65, .n = 67, .k = 69, .major_a = a, .major_b = b, .gap_a = 2, .gap_b = 1});
      check<bf16>(cases, {.m = 136, .n = 120, .k = 72, .major_a = a, .major_b = b, .tile = kSquare, .out = kFloat32});
    }
  }
}

void alignments(Cases& cases) {
  for (int offset = 0; offset <= 8; offset++) {
    for (Major major : {K, MN}) {
      // Leading dimensions of 72 and 68 elements, then odd ones; A and B at different offsets.
      check<bf16>(
          cases,
          {.m = 68, .n = 72, .k = 72, .major_a = major, .major_b = major, .offset_a = offset, .offset_b = 8 - offset});
      check<fp16>(cases, {.m = 41,
                          .n = 33,
                          .k = 77,
                          .major_a = major,
                          .major_b = major,
                          .offset_a = offset,
                          .offset_b = 8 - offset,
                          .offset_c = offset,
                          .gap_a = offset % 3});
    }
  }
  check<bf16>(cases, {.m = 130, .n = 140, .k = 133, .tile = kSquare});
  check<bf16>(cases, {.m = 131, .n = 135, .k = 100, .major_a = MN, .major_b = MN, .tile = kSquare, .offset_c = 1});
  for (Major major : {K, MN}) {  // whole tiles: the last word of the operand must not be read beyond its end
    check<bf16>(cases, {.m = 64, .n = 64, .k = 64, .major_a = major, .major_b = major, .offset_a = 1, .offset_b = 3});
  }
  check<fp16>(cases, {.m = 1, .n = 1, .k = 1, .offset_a = 3, .offset_b = 5, .offset_c = 7});
}

void tails(Cases& cases) {
  for (int size : {1, 7, 8, 9, 31, 32, 33, 63, 64, 65}) {
    check<bf16>(cases, {.m = size, .n = 24, .k = 40, .major_a = MN, .gap_a = 1});
    check<bf16>(cases, {.m = 24, .n = size, .k = 40, .major_b = MN, .gap_b = 8});
    check<fp16>(cases, {.m = 24, .n = 24, .k = size, .gap_a = 1, .gap_b = (8 - size % 8) % 8});
    check<fp16>(cases, {.m = 20, .n = 28, .k = size, .major_a = MN, .major_b = MN});
  }
  for (int size : {127, 128, 129}) {
    check<bf16>(cases, {.m = size, .n = 256 - size, .k = size, .tile = kSquare});
    check<bf16>(cases, {.m = size,
                        .n = size,
                        .k = 33,
                        .major_a = MN,
                        .major_b = MN,
                        .tile = kSquare,
                        .gap_a = (136 - size) % 8,
                        .gap_b = 136 - size});
  }
}

void tiles(Cases& cases) {
  check<bf16>(cases, {.m = 130, .n = 264, .k = 200, .tile = kWide});
  check<fp16>(cases, {.m = 120, .n = 257, .k = 100, .major_a = MN, .major_b = MN, .tile = kWide, .out = kFloat32});
  check<bf16>(cases, {.m = 64, .n = 256, .k = 168, .major_b = MN, .tile = kWide, .shared_limit = 101376});
  check<bf16>(cases, {.m = 72, .n = 72, .k = 264, .tile = kSmall, .shared_limit = 101376});  // three stages
  check<bf16>(cases, {.m = 33, .n = 35, .k = 265, .tile = kSmall, .shared_limit = 36000});   // and shifted
  check<bf16>(cases, {.m = 640, .n = 130, .k = 16, .tile = kSmall});  // more than one group of rows of tiles
}

void batches(Cases& cases) {
  check<bf16>(cases, {.m = 40, .n = 72, .k = 40, .batch = 3});
  check<fp16>(cases, {.m = 33, .n = 31, .k = 35, .major_a = MN, .gap_a = 1, .batch = 2, .shared_b = true});
  check<bf16>(cases, {.m = 40, .n = 40, .k = 40, .batch = 2, .batch_gap = 1});
  check<bf16>(cases, {.m = 40, .n = 40, .k = 40, .major_b = MN, .batch = 3, .batch_gap = 4, .out = kFloat32});
  check<bf16>(cases, {.m = 70, .n = 24, .k = 330, .splits = 2, .batch = 2, .out = kFloat32});
}

void splits(Cases& cases) {
  check<bf16>(cases, {.m = 70, .n = 66, .k = 520, .splits = 3});
  check<fp16>(
      cases,
      {.m = 64, .n = 72, .k = 321, .major_a = MN, .major_b = MN, .splits = 5, .out = kFloat32, .accumulate = true});
  check<bf16>(cases, {.m = 40, .n = 40, .k = 330, .splits = 7});  // 11 steps: 6 parts of 2
  check<bf16>(cases, {.m = 130, .n = 20, .k = 97, .tile = kSquare, .splits = 4, .activation = gelu, .bias = kColumn});
  check<bf16>(cases, {.m = 60, .n = 270, .k = 160, .tile = kWide, .splits = 2});
}

/// Sums that depend on the order of additions: the same bits under every schedule.
void same_bits(Cases& cases) {
  constexpr int kM = 40, kN = 24, kK = 520;
  std::vector<float> first;
  cases.check("split product, the same bits", [&]() -> std::string {
    emu::Buffer<fp16> a("a", kM * kK), b("b", kN * kK);
    emu::Buffer<float> c("c", kM * kN);
    emu::Random random{1};
    for (size_t i = 0; i < a.size(); i++) a.set(i, round_to<fp16>(static_cast<float>(random.below(1 << 20)) * 1e-3f));
    for (size_t i = 0; i < b.size(); i++)
      b.set(i, round_to<fp16>(static_cast<float>(random.below(1 << 20)) * 1e-4f - 50));
    GemmProblem q{};
    q.a = a.data(), q.b = b.data(), q.type = kFloat16;
    q.c = {c.data(), kFloat32, kN, 1, 0};
    q.m = kM, q.n = kN, q.k = kK, q.ld_a = kK, q.ld_b = kK;
    const GemmSm80Config config{kSmall, 5};
    Scratch scratch(gemm_sm80_scratch(q, config));
    const std::string error = message_of(gemm_sm80<fp16>(q, config, scratch.get(), nullptr));
    if (!error.empty()) return error;
    if (first.empty()) first.assign(c.data(), c.data() + c.size());
    return std::memcmp(first.data(), c.data(), first.size() * 4) == 0 ? "" : "other bits than under the first schedule";
  });
}

void epilogues(Cases& cases) {
  using Bias = Setup::Bias;
  const auto both = [&](Setup s) {
    for (int i = 0; i < 2; i++) {
      s.tile = i == 0 ? kSmall : kSquare;
      s.out = i == 0 ? kFloat16 : kFloat32;
      check<fp16>(cases, s);
    }
  };
  both({.m = 70, .n = 75, .k = 40, .alpha = 2, .bias = kColumn});
  both({.m = 66, .n = 130, .k = 24, .alpha = 0.5f, .beta = 2, .bias = kRow, .residual = true});
  for (Activation f : {relu, gelu, gelu_tanh, silu}) {
    both({.m = 20, .n = 72, .k = 16, .activation = f, .bias = kColumn, .z = true});
    both({.m = 36, .n = 70, .k = 16, .activation = f, .dact = true, .sums = true});
  }
  for (Major major : {K, MN}) {
    both({.m = 70, .n = 2 * 72, .k = 40, .major_b = major, .activation = swiglu, .bias = kColumn, .z = true});
    both({.m = 30, .n = 2 * 65, .k = 33, .major_b = major, .activation = swiglu, .residual = true});
    both({.m = 30, .n = 2 * 68, .k = 33, .major_b = major, .gap_b = 8, .activation = swiglu});
    both({.m = 40, .n = 67, .k = 32, .major_b = major, .activation = swiglu, .dact = true, .sums = true});
  }
  check<bf16>(cases, {.m = 50, .n = 2 * 140, .k = 40, .tile = kWide, .activation = swiglu, .z = true});
  check<bf16>(cases, {.m = 35, .n = 75, .k = 16, .beta = 2, .residual = true});
  check<bf16>(cases, {.m = 36, .n = 70, .k = 16, .activation = relu, .dact = true});
  both({.m = 50, .n = 40, .k = 32, .batch = 2, .activation = relu, .dact = true, .sums = true});
  both({.m = 20, .n = 40, .k = 16, .batch = 2, .bias = kColumn, .residual = true, .z = true});
}

void outputs(Cases& cases) {
  for (int offset : {0, 1, 2, 3, 4}) {
    check<bf16>(cases, {.m = 35, .n = 70, .k = 16, .offset_c = offset, .gap_c = offset});
    check<fp16>(cases, {.m = 35, .n = 72, .k = 16, .offset_c = offset, .gap_c = 8 * offset, .out = kFloat32});
    check<fp16>(cases, {.m = 130, .n = 136, .k = 16, .tile = kSquare, .gap_c = offset, .out = kBFloat16});
  }
  check<bf16>(cases, {.m = 35, .n = 70, .k = 16, .gap_c = 2});  // 16-byte stores, and less at the end of a row
  check<bf16>(cases, {.m = 35, .n = 70, .k = 16, .gap_c = 2, .out = kFloat32});
  check<bf16>(cases, {.m = 40, .n = 72, .k = 40, .gap_c = 8, .out = kFloat32, .accumulate = true});
  check<bf16>(cases, {.m = 40, .n = 71, .k = 40, .out = kFloat32, .accumulate = true, .alpha = 2});
  check<bf16>(cases, {.m = 40, .n = 71, .k = 40, .transposed_c = true});
  check<bf16>(cases, {.m = 1, .n = 40, .k = 16, .gap_c = 1, .transposed_c = true});  // no rows to look at
  check<fp16>(cases, {.m = 24, .n = 31, .k = 40, .gap_c = 1, .out = kFloat32, .transposed_c = true});
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_sm80", Seeds(argc, argv, 2),
                     {layouts, alignments, tails, tiles, batches, splits, same_bits, epilogues, outputs});
}
