// Products over a long k whose lines begin anywhere, without a copy of an operand.
//
// Where the lines of A and B lie along m and n, one for each k (the gradient of a weight), and a line is no multiple of
// 16 bytes long, every eighth begins at one nevertheless; or every fourth or second, if 4 or 8 bytes are left over. So
// the lines of k = p, p + count, p + 2 count, ... make a matrix that TMA or copies of 16 bytes can address, but for its
// first column: that lies p * (ld % 8) elements behind a multiple of 16 bytes. Together with the elements in front,
// phase p is a product like any other, whose result lies so many rows further down and columns to the right. The phases
// are a batch, in fp32 beside each other; gemm_add_phases adds them up. What else stands in their results came from
// neighbouring lines, and nobody looks at it. The lines behind the last whole round of phases, of which one or more are
// left, gemm_add_phases multiplies itself: so a phase never reads beyond the last line.
#pragma once
#include <numeric>

#include "gemm/gemm.h"

namespace ak {

/// `count` phases: 2, 4 or 8, or 0 where a product cannot be worked on so. The result of phase p begins p * a rows
/// further down, and p * b columns further to the right.
struct GemmPhases {
  int count = 0, a = 0, b = 0;

  bool operator==(const GemmPhases&) const = default;

  int lines(int k) const { return (k - 1) / count; }  ///< of each phase
  int rows(int m) const { return m + (count - 1) * a; }
  /// Of which there are some more than the results reach, so that their rows are multiples of 16 bytes.
  int columns(int n) const { return (n + (count - 1) * b + 3) / 4 * 4; }
  /// Elements of all results.
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
  r.a = q.a, r.b = q.b;
  r.c = {parts, DType::kFloat32, columns, 1, int64_t{rows} * columns};
  r.m = rows, r.n = columns, r.k = phases.lines(q.k);
  r.ld_a = q.ld_a * phases.count, r.ld_b = q.ld_b * phases.count;
  r.m_major_a = r.n_major_b = true;
  r.batch = phases.count;
  r.batch_stride_a = q.ld_a - phases.a, r.batch_stride_b = q.ld_b - phases.b;
  return r;
}

/// C = alpha * (the sum of the phases, and of the products of the lines that are left), added to an fp32 C if
/// `accumulate`. In the order of the phases: reproducible.
template <class T>
Status gemm_add_phases(const GemmProblem& q, const GemmPhases& phases, const float* parts, bool accumulate,
                       Stream stream);

}  // namespace ak
