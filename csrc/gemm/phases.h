// Products over a long k whose lines are not 16-byte aligned, without a copy of an operand.
//
// In the gradient of a weight, A and B have one line per k, along m and n. If a line's length is no multiple of 16
// bytes, every eighth line (every fourth or second, for odd multiples of 4 or 8 bytes) is still aligned. So lines k =
// p, p + count, p + 2 count, ... form a matrix that TMA or 16-byte copies can address, except that its first column
// lies p * (ld % 8) elements after a multiple of 16 bytes. Phase p includes the elements before that column: its result
// is shifted down and to the right, and the extra rows and columns, computed from neighboring lines, are ignored. The
// phases run as a batch with separate fp32 results, which gemm_add_phases sums. It also multiplies the lines after the
// last complete round, of which at least one is left, so a phase never reads beyond the last line.
#pragma once
#include <numeric>

#include "gemm/call.h"

namespace ak {

/// `count` phases: 2, 4 or 8, or 0 if the product has none. The result of phase p is shifted down by p * a rows and
/// right by p * b columns.
struct GemmPhases {
  int count = 0, a = 0, b = 0;

  bool operator==(const GemmPhases&) const = default;

  int lines(int k) const { return (k - 1) / count; }  ///< per phase
  int rows(int m) const { return m + (count - 1) * a; }
  /// Rounded up so that rows of the results are multiples of 16 bytes.
  int columns(int n) const { return (n + (count - 1) * b + 3) / 4 * 4; }
  /// Elements of all phases' results.
  int64_t size(int m, int n) const { return int64_t{count} * rows(m) * columns(n); }
};

inline GemmPhases gemm_phases(const GemmProblem& q) {
  const auto begins_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  GemmEpilogue rest = q.epilogue;
  rest.alpha = 1.0f;
  if (!is_plain(rest) || q.batch != 1 || !q.m_major_a || !q.n_major_b) return {};
  if (!begins_aligned(q.a) || !begins_aligned(q.b)) return {};
  const int count = static_cast<int>(8 / std::gcd(std::gcd(q.ld_a, q.ld_b), int64_t{8}));
  if (count == 1 || q.k <= count) return {};
  return {count, static_cast<int>(q.ld_a % 8), static_cast<int>(q.ld_b % 8)};
}

/// The phases of `q` as a batch: fp32 results at `parts`, which has room for phases.size(q.m, q.n).
inline GemmProblem gemm_in_phases(const GemmProblem& q, const GemmPhases& phases, float* parts) {
  const int rows = phases.rows(q.m), columns = phases.columns(q.n);
  GemmProblem r{};
  r.a = q.a, r.b = q.b, r.type = q.type;
  r.c = {parts, DType::kFloat32, columns, 1, int64_t{rows} * columns};
  r.m = rows, r.n = columns, r.k = phases.lines(q.k);
  r.ld_a = q.ld_a * phases.count, r.ld_b = q.ld_b * phases.count;
  r.m_major_a = r.n_major_b = true;
  r.batch = phases.count;
  r.batch_stride_a = q.ld_a - phases.a, r.batch_stride_b = q.ld_b - phases.b;
  return r;
}

/// C (+)= alpha * (sum of the phases + product of the remaining lines). The order of the sum is fixed.
template <class T>
Status gemm_add_phases(const GemmProblem& q, const GemmPhases& phases, const float* parts, Stream stream);

}  // namespace ak
