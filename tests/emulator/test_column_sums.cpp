// column_sums on the emulator: within the bound of any order of additions, the same bits for any alignment, pitch and
// schedule, over ragged strips, shares and teams.
#include <sys/mman.h>

#include <cmath>

#include "column_sums/column_sums.cu"
#include "emulator/harness.h"
#include "emulator/visible.h"
#include "gemm/column_sums.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

struct Problem {
  int64_t rows;
  int columns;
  DType type = DType::kBFloat16;
  int64_t gap = 0;    // elements between rows
  size_t offset = 0;  // of the first element from a 256-byte boundary
};

size_t size_of(int64_t n) { return static_cast<size_t>(n); }

/// The sums of rows of a gap and offset, and an error.
std::pair<std::vector<float>, std::string> sums_of(const Problem& q, const std::vector<double>& values) {
  const int64_t pitch = q.columns + q.gap;
  const size_t columns = size_of(q.columns);
  AnyBuffer x("x", q.type, size_of(std::max<int64_t>(0, q.rows * pitch - q.gap)), q.offset);
  for (size_t i = 0; i < x.size(); i++) x.set(i, NAN);
  for (int64_t r = 0; r < q.rows; r++) {
    for (size_t c = 0; c < columns; c++) x.set(size_of(r * pitch) + c, values[size_of(r) * columns + c]);
  }
  const int64_t shares = ColumnStrips(q.rows, q.columns).shares;
  emu::Buffer<float> sums("sums", columns), slots("slots", shares > 1 ? size_of(shares) * columns : 0);
  const ColumnSums p{x.data(), sums.data(), slots.data(), q.type, q.rows, pitch, q.columns};
  std::string error = message_of(column_sums(p, nullptr));
  for (const std::string& zone : {slots.check_red_zones(), sums.check_red_zones()}) {
    if (error.empty()) error = zone;
  }
  std::vector<float> result(columns);
  for (size_t c = 0; c < columns; c++) result[c] = sums[c];
  return {result, error};
}

std::string run(const Problem& q) {
  Rng rng(size_of(q.rows * 31 + q.columns));
  std::vector<double> values(size_of(q.rows * q.columns));
  // 8 bits of many sizes: exact in each type, and their sums depend on the order.
  for (double& v : values) v = std::ldexp(static_cast<double>(rng() % 255) - 127, int(rng() % 16) - 12);
  const auto [sums, error] = sums_of(q, values);
  if (!error.empty()) return error;
  for (size_t c = 0; c < sums.size(); c++) {
    double want = 0, size = 0;
    for (size_t r = 0; r < size_of(q.rows); r++) {
      const double v = values[r * sums.size() + c];
      want += v, size += std::abs(v);
    }
    // Each of the additions that a value goes through rounds by at most 2^-24 of the sum of sizes.
    if (!(std::abs(sums[c] - want) <= static_cast<double>(q.rows) * 0x1p-24 * size))
      return emu::format("column %zu is %.9g, expected %.9g", c, sums[c], want);
  }
  for (const auto& [gap, offset] : {std::pair<int64_t, size_t>{q.gap, 1}, {q.gap + 1, 0}, {q.gap + 16, 0}}) {
    Problem other = q;
    other.gap = gap, other.offset = offset;
    const auto [same, wrong] = sums_of(other, values);
    if (!wrong.empty()) return wrong;
    for (size_t c = 0; c < sums.size(); c++) {
      if (bits_of(same[c]) != bits_of(sums[c]))
        return emu::format("column %zu is %.9g elsewhere, %.9g here", c, same[c], sums[c]);
    }
  }
  return "";
}

/// NaN and infinities stay in their columns.
std::string not_finite() {
  constexpr int kColumns = 40;
  std::vector<double> values(size_t{70} * kColumns, 1.0);
  values[3 * kColumns + 1] = NAN, values[69 * kColumns + 2] = INFINITY;
  values[5 * kColumns + 3] = INFINITY, values[6 * kColumns + 3] = -INFINITY;
  const auto [sums, error] = sums_of({.rows = 70, .columns = kColumns}, values);
  if (!error.empty()) return error;
  for (int c = 0; c < kColumns; c++) {
    const float got = sums[size_of(c)];
    const bool right = c == 1 || c == 3 ? std::isnan(got) : c == 2 ? got == INFINITY : got == 70;
    if (!right) return emu::format("column %d is %g", c, got);
  }
  return "";
}

/// Two rows 2^32 elements apart, in memory of which no other page is touched.
std::string far_apart() {
  constexpr int kColumns = 40;
  constexpr int64_t kFar = int64_t{1} << 32;
  constexpr size_t kBytes = (kFar + kColumns) * sizeof(bf16);
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return "no addresses";
  auto* const x = static_cast<bf16*>(memory);
  std::string wrong;
  {
    emu::VisibleMemory visible;
    for (const int64_t row : {int64_t{0}, kFar}) {
      for (int c = 0; c < kColumns; c++) x[row + c] = round_to<bf16>(static_cast<float>(row == 0 ? c : 2 * c));
      visible.add("x", x + row, kColumns * sizeof(bf16), true, false);
    }
    emu::Buffer<float> sums("sums", kColumns);
    wrong = message_of(column_sums({x, sums.data(), nullptr, DType::kBFloat16, 2, kFar, kColumns}, nullptr));
    for (size_t c = 0; c < kColumns && wrong.empty(); c++) {
      if (sums[c] != 3 * static_cast<float>(c)) wrong = emu::format("column %zu is %g", c, sums[c]);
    }
  }
  munmap(memory, kBytes);
  return wrong;
}

/// The sums of ones show how often each row counts.
std::string counts(int64_t rows, int columns) {
  const std::vector<double> ones(size_of(rows * columns), 1.0);
  const auto [sums, error] = sums_of({.rows = rows, .columns = columns, .type = DType::kFloat16}, ones);
  if (!error.empty()) return error;
  for (size_t c = 0; c < sums.size(); c++) {
    if (sums[c] != static_cast<float>(rows)) return emu::format("column %zu is %g", c, sums[c]);
  }
  return "";
}

void all(Cases& cases) {
  // Around the rows of a team, of a block's teams and of two shares; around the columns of a thread, a strip and two.
  for (const int64_t rows : {0, 1, 7, 8, 9, 33, 65, 300}) {
    for (const int columns : {1, 8, 40, 257}) {
      const std::string title = std::to_string(rows) + " rows of " + std::to_string(columns);
      cases.check(title, [=] { return run({.rows = rows, .columns = columns}); });
    }
  }
  for (const int columns : {7, 9, 255, 256, 264, 513, 776}) {
    cases.check(std::to_string(columns) + " columns", [=] { return run({.rows = 70, .columns = columns}); });
  }
  for (const DType type : {DType::kFloat16, DType::kFloat32}) {
    for (const int columns : {4, 36, 264}) {
      const std::string title = "type " + std::to_string(static_cast<int>(type)) + ", " + std::to_string(columns);
      cases.check(title, [=] { return run({.rows = 70, .columns = columns, .type = type}); });
      cases.check(title + ", a gap", [=] { return run({.rows = 70, .columns = columns, .type = type, .gap = 8}); });
    }
  }
  cases.check("nan and infinity", [] { return not_finite(); });
  cases.check("rows far apart", [] { return far_apart(); });
  cases.check("as many shares as there are", [] { return counts(528 * 256 * 4 + 5, 8); });
  cases.check("more strips than blocks", [] { return counts(2, 528 * 256 + 8); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("column_sums", ak::test::Seeds(argc, argv, 2));
  ak::test::all(cases);
  return cases.finish();
}
