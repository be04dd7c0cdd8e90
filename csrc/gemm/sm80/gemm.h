// 16-bit GEMM with mma.sync and fp32 accumulation: C = A B in all four layouts, for any leading dimension and any
// 2-byte aligned pointer, on sm_80 and newer. On Hopper it serves operands that TMA cannot address.
#pragma once
#include "gemm/call.h"

namespace ak {

/// Compiled tiles, rows x columns of C. gemm/plan.h chooses one for a shape.
enum class GemmSm80Tile {
  k128x256,  ///< 8 warps of 64 x 64, one block per SM: large products, least traffic
  k128x128,  ///< 4 warps of 64 x 64, two blocks per SM, which overlap epilogue and main loop
  k64x64,    ///< 4 warps of 32 x 32: few tiles
};
inline constexpr GemmSm80Tile kGemmSm80Tiles[] = {GemmSm80Tile::k128x256, GemmSm80Tile::k128x128, GemmSm80Tile::k64x64};

/// Ways to copy the lines of an operand (rows, or columns if m- or n-major) to shared memory, fastest first.
enum class CopyPath {
  k16Bytes,
  k8Bytes,
  k4Bytes,
  kShifted,  ///< odd strides: aligned 16-byte words, shifted in shared memory
};

struct GemmSm80Config {
  GemmSm80Tile tile = GemmSm80Tile::k128x128;
  int splits = 1;  ///< parts of k that run in parallel, for few tiles and long k; at least 1
};

/// Fastest path that the alignment of pointer, leading dimension and batch stride allows.
CopyPath gemm_sm80_path_a(const GemmProblem& problem);
CopyPath gemm_sm80_path_b(const GemmProblem& problem);

/// Scratch of a product; none without splits.
GemmScratchSize gemm_sm80_scratch(const GemmProblem& problem, const GemmSm80Config& config);

/// The product in one launch. `T` is fp16 or bf16; C is fp16, bf16 or fp32 with any strides. Bitwise reproducible: the
/// parts of a split product are added in order. Writes the column sums of every group of 16 rows.
template <class T>
Status gemm_sm80(const GemmProblem& problem, const GemmSm80Config& config, const GemmScratch& scratch, Stream stream);

/// A grouped product in one launch. Rows: A is row-major. Sums: A is m-major and B n-major. K is not split, so the bits
/// of a group do not depend on the others.
template <class T>
Status gemm_sm80_grouped(const GroupedProblem& problem, Stream stream);

}  // namespace ak
