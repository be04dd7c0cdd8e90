// Symmetric products on the emulator: the triangle of tiles, the mirrored store, residuals and diagonals, bit for bit.
// B is another matrix than A, so A B is not symmetric, and every element says which triangle it was computed in. The
// inputs are small integers. Above the diagonal of a residual lies NaN, and so does what is between the rows of an
// operand.
#include <cmath>

#include "emulator/harness.h"
#include "gemm/sm80/gemm.cu"
#include "gemm/sm90/symmetric.cuh"
#include "matrices.h"

namespace ak::test {
namespace {

struct Kernel {
  bool sm90;
  int tile;  // in kGemmTriangles or of GemmSm80Tile

  int rows() const { return sm90 ? kGemmTriangles[tile].m : tile == static_cast<int>(GemmSm80Tile::k64x64) ? 64 : 128; }
  int columns() const { return sm90 ? kGemmTriangles[tile].n : rows(); }
};

struct Setup {
  int n, k;
  bool by_columns = false;  // A and B are contiguous along n
  int batch = 1, batch_gap = 0;
  int gap_c = 0, gap_residual = 0;  // elements between rows, besides those up to a multiple of 8 or 2
  float alpha = 1, diagonal = 0;
  bool residual = false;
  bool one_a = false;  // for the whole batch
  int sms = 2;

  std::string title(Kernel kernel) const {
    return emu::format("sm%d, %d x %d: %d x (%d x %d)%s, C +%d, alpha %g, diagonal %g%s, %d SMs", kernel.sm90 ? 90 : 80,
                       kernel.rows(), kernel.columns(), batch, n, k, by_columns ? " by columns" : "", gap_c, alpha,
                       diagonal, residual ? ", residual" : "", sms);
  }
};

int up_to(int multiple, int x) { return (multiple - x % multiple) % multiple; }

template <class T>
std::string product(const Setup& s, Kernel kernel) {
  emu::options().sm_count = s.sms;
  constexpr DType kInput = std::is_same_v<T, bf16> ? DType::kBFloat16 : DType::kFloat16;
  const auto seed = static_cast<uint64_t>(s.n * 7 + s.k);
  const Matrix a(s.n, s.k, s.one_a ? 1 : s.batch, seed), b(s.n, s.k, s.batch, seed + 1);
  const Matrix residual(s.n, s.n + up_to(2, s.n), s.batch, seed + 2);  // read in pairs
  const int gap = up_to(8, s.by_columns ? s.n : s.k);
  const Stored<T> stored_a("a", a, s.by_columns, gap, 0, s.batch_gap);
  const Stored<T> stored_b("b", b, s.by_columns, gap, 0, s.batch_gap);
  const Stored<T> stored_residual("residual", residual, false, s.gap_residual, 2, 2);
  for (int z = 0; z < s.batch; z++) {
    for (int i = 0; i < s.n; i++) {
      for (int j = i + 1; j < residual.columns; j++) {
        const int64_t at = z * stored_residual.batch_stride + i * stored_residual.ld + j;
        stored_residual.buffer->set(static_cast<size_t>(at), round_to<T>(NAN));
      }
    }
  }
  // TMA may leave anything between n and the next multiple of 8: those columns count as C's.
  const int beyond = up_to(8, s.n), columns = s.n + (kernel.sm90 ? beyond : 0);
  const Result<T> c("c", kInput, s.n, columns, s.batch, s.gap_c + s.n + beyond - columns, 0, false, NAN, s.batch_gap);
  GemmProblem q{};
  q.type = kInput;
  q.symmetric = true;
  q.a = stored_a.buffer->data(), q.b = stored_b.buffer->data();
  q.c = c.values;
  q.m = q.n = s.n, q.k = s.k, q.batch = s.batch;
  q.ld_a = stored_a.ld, q.ld_b = stored_b.ld;
  q.batch_stride_a = s.one_a ? 0 : stored_a.batch_stride, q.batch_stride_b = stored_b.batch_stride;
  q.m_major_a = q.n_major_b = s.by_columns;
  q.epilogue.alpha = s.alpha, q.epilogue.beta = -2.0f, q.epilogue.diagonal = s.diagonal;
  if (s.residual) q.epilogue.residual = stored_residual.as_values(kInput);
  const auto run = [&] {
    if (kernel.sm90) return gemm_sm90_symmetric<T>(q, kernel.tile, nullptr);
    return gemm_sm80<T>(q, {static_cast<GemmSm80Tile>(kernel.tile)}, {}, nullptr);
  };
  const std::string error = message_of(run());
  if (!error.empty()) return error;
  return c.compare("c", [&](int z, int row, int column) {
    if (column >= s.n)
      return to_float((*c.buffer)[static_cast<size_t>(z * c.values.batch_stride + row * c.values.row_stride + column)]);
    const int i = row > column ? row : column, j = row > column ? column : row;
    float sum = 0;
    for (int k = 0; k < s.k; k++) sum += a.at(s.one_a ? 0 : z, i, k) * b.at(z, j, k);
    return s.alpha * sum + (s.residual ? -2.0f * residual.at(z, i, j) : 0.0f) + (i == j ? s.diagonal : 0.0f);
  });
}

template <class T>
void check(Cases& cases, const Setup& s) {
  std::vector<Kernel> kernels;
  for (int tile = 0; tile < kGemmTriangleCount && (s.gap_c | s.batch_gap) % 8 == 0; tile++) {
    if (gemm_sm90_takes_layout(kGemmTriangles[tile], s.by_columns, s.by_columns)) kernels.push_back({true, tile});
  }
  if (s.n >= 100 && s.n <= 264) kernels.push_back({false, static_cast<int>(GemmSm80Tile::k128x128)});
  if (s.n <= 136) kernels.push_back({false, static_cast<int>(GemmSm80Tile::k64x64)});
  for (const Kernel& kernel : kernels) cases.check(s.title(kernel), [&] { return product<T>(s, kernel); });
}

/// Fractions of many sizes, whose sums round in every step: an element has the same bits in every tile of sm_90.
std::string same_bits() {
  constexpr int kN = 328, kK = 200;
  emu::options().sm_count = 3;
  Matrix a(kN, kK, 1, 1);
  emu::Random random{2};
  for (float& x : a.values) x *= std::ldexp(1.37f, -static_cast<int>(random.below(12)));
  const Stored<fp16> stored("a", a, false, 0, 0);
  GemmProblem q{};
  q.type = DType::kFloat16;
  q.symmetric = true;
  q.a = q.b = stored.buffer->data();
  q.m = q.n = kN, q.k = kK, q.ld_a = q.ld_b = stored.ld;
  std::vector<std::unique_ptr<Result<fp16>>> results;
  for (int tile = 0; tile < kGemmTriangleCount; tile++) {
    results.push_back(std::make_unique<Result<fp16>>("c", q.type, kN, kN, 1, 0, 0, false, NAN));
    q.c = results.back()->values;
    const std::string error = message_of(gemm_sm90_symmetric<fp16>(q, tile, nullptr));
    if (!error.empty()) return error;
    const std::string other = results.back()->compare("c", [&](int, int row, int column) {
      return to_float((*results[0]->buffer)[static_cast<size_t>(row * kN + column)]);
    });
    if (!other.empty()) return emu::format("tile %d: ", tile) + other;
  }
  return "";
}

void sizes(Cases& cases) {
  for (const int n : {1, 7, 8, 9, 63, 65, 127, 129, 136, 200}) {
    check<bf16>(cases, {.n = n, .k = 72, .diagonal = 3, .residual = true});
    check<fp16>(cases, {.n = n, .k = 40, .by_columns = true, .gap_c = 8, .alpha = 0.5f});
  }
  for (const int k : {1, 63, 65, 200}) check<fp16>(cases, {.n = 136, .k = k});
}

/// Odd and even numbers of rows of tiles, which the schedule of sm_80 folds in two ways, and strips of whole and of
/// partial tiles, on fewer and more SMs than tiles.
void triangles(Cases& cases) {
  for (const int n : {256, 264, 392, 520, 640}) check<bf16>(cases, {.n = n, .k = 72, .residual = true});
  for (const int sms : {1, 5, 16}) check<fp16>(cases, {.n = 520, .k = 72, .diagonal = -1, .sms = sms});
}

void batches(Cases& cases) {
  check<bf16>(cases,
              {.n = 72, .k = 72, .batch = 3, .batch_gap = 8, .gap_residual = 2, .diagonal = 2, .residual = true});
  check<fp16>(cases, {.n = 264, .k = 40, .batch = 2, .batch_gap = 16, .gap_c = 8, .alpha = -1, .residual = true});
  check<fp16>(cases, {.n = 129, .k = 64, .by_columns = true, .batch = 5, .residual = true, .sms = 3});
  check<bf16>(cases, {.n = 40, .k = 72, .batch = 3, .one_a = true});
  check<bf16>(cases, {.n = 150, .k = 40, .batch = 2, .batch_gap = 3, .gap_c = 1, .residual = true});
}

void tiles(Cases& cases) { cases.check("the same bits in every tile", same_bits); }

void refused(Cases& cases) {
  const auto refuses = [&](const char* what, auto change, int tile = 0) {
    cases.check(what, [&]() -> std::string {
      alignas(16) static uint16_t memory[8];
      GemmProblem q{};
      q.type = DType::kBFloat16;
      q.symmetric = true;
      q.a = q.b = memory;
      q.c = {memory, DType::kBFloat16, 8, 1, 8};
      q.m = q.n = 1, q.k = 8, q.batch = 1, q.ld_a = q.ld_b = 8;
      change(q, memory);
      return gemm_sm90_symmetric<bf16>(q, tile, nullptr).ok() ? "ran" : "";
    });
  };
  refuses("m and n differ", [](GemmProblem& q, uint16_t*) { q.m = 2; });
  refuses("an unaligned A", [](GemmProblem& q, uint16_t* p) { q.a = p + 1; });
  refuses("operands of two layouts", [](GemmProblem& q, uint16_t*) { q.n_major_b = true; });
  refuses("an unaligned C", [](GemmProblem& q, uint16_t* p) { q.c.data = p + 4; });
  refuses("an fp32 C", [](GemmProblem& q, uint16_t*) { q.c.type = DType::kFloat32; });
  refuses("an odd residual",
          [](GemmProblem& q, uint16_t* p) { q.epilogue.residual = {p + 1, DType::kBFloat16, 8, 1, 8}; });
  const auto nothing = [](GemmProblem&, uint16_t*) {};
  refuses("a tile before the first", nothing, -1);
  refuses("a tile past the last", nothing, kGemmTriangleCount);
  const auto by_columns = [](GemmProblem& q, uint16_t*) { q.m_major_a = q.n_major_b = true; };
  refuses("columns in boxes of 64 for a tile of 80", by_columns, kGemmTriangleCount - 1);
  refuses("a bias", [](GemmProblem& q, uint16_t* p) { q.epilogue.bias = {p, DType::kBFloat16, 0, 1, 0}; });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_symmetric", Seeds(argc, argv, 2, 2), {sizes, triangles, batches, tiles, refused});
}
