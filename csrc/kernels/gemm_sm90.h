// 16-bit matrix product on Hopper's tensor cores, fp32 inside: C = A B, in all four layouts, without transposing
// copies.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device/status.h"
#include "math/half.h"

namespace ak {

enum class GemmOutput {
  kInputType,   ///< rounded once to the inputs' 16-bit type
  kFloat32,     ///< the fp32 sums
  kAccumulate,  ///< added to the fp32 values in C
  kPartials,    ///< of a split product: one fp32 sum per split, [splits][m][n]; used by gemm_sm90_split
};

/// A is m x k, B is k x n, C is m x n and row-major. Distances are in elements; every pointer, and every distance in
/// bytes, is a multiple of 16.
struct GemmProblem {
  const void* a;
  const void* b;
  void* c;
  int m, n, k;  ///< all at least 1
  int64_t ld_a,
      ld_b;  ///< between rows of A (columns, where m_major_a), and between columns of B (rows, where n_major_b)
  int64_t ld_c;
  bool m_major_a;  ///< A lies with m contiguous, as the transpose of a row-major matrix
  bool n_major_b;  ///< B lies with n contiguous: row-major. Otherwise k is contiguous, as in x W^T
};

/// The tile configurations that are compiled. What fits which shape is for csrc/tuning to say.
enum class GemmTile { k128x256x2, k128x128, k64x64, k128x144 };

/// One product in one launch. `T` is fp16 or bf16. 128x144 takes only k-major B and 16-bit output.
template <class T>
Status gemm_sm90(const GemmProblem& problem, GemmTile tile, GemmOutput output, Stream stream);

/// Bytes of scratch that gemm_sm90_split needs.
size_t gemm_sm90_split_bytes(const GemmProblem& problem, int splits);

/// The same with k cut into `splits` parts that run side by side, for few tiles and long k. The parts are added in
/// order, so the result is reproducible. `scratch` is aligned to 16 bytes and may hold anything.
template <class T>
Status gemm_sm90_split(const GemmProblem& problem, GemmTile tile, GemmOutput output, int splits, void* scratch,
                       Stream stream);

}  // namespace ak
