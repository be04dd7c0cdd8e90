// 16-bit matrix product with mma.sync, fp32 inside: C = A B in all four layouts, for any leading dimension and any
// 2-byte aligned pointer, on every chip from sm_80 on. On Hopper it serves what TMA cannot address.
#pragma once
#include "gemm/gemm.h"

namespace ak {

/// The tiles that are compiled, rows x columns of C. What fits which shape is for gemm/plan.h to say.
enum class GemmSm80Tile {
  k128x256,  ///< 8 warps of 64 x 64, one block an SM: large products, least traffic
  k128x128,  ///< 4 warps of 64 x 64, two blocks an SM, whose epilogues and main loops overlap
  k64x64,    ///< 4 warps of 32 x 32: few tiles
};
inline constexpr GemmSm80Tile kGemmSm80Tiles[] = {GemmSm80Tile::k128x256, GemmSm80Tile::k128x128, GemmSm80Tile::k64x64};

/// How the rows of an operand (columns, where it is m- or n-major) reach shared memory, fastest first.
enum class CopyPath {
  k16Bytes,
  k8Bytes,
  k4Bytes,
  kShifted,  ///< odd distances: whole 16-byte words, moved into place in shared memory
};

struct GemmSm80Config {
  GemmSm80Tile tile = GemmSm80Tile::k128x128;
  int splits = 1;           ///< parts of k that run side by side, for few tiles and long k; at least 1
  bool accumulate = false;  /// add to C, which is fp32; then there is no residual
};

/// What the alignment of pointer, leading dimension and batch stride allows.
CopyPath gemm_sm80_path_a(const GemmProblem& problem);
CopyPath gemm_sm80_path_b(const GemmProblem& problem);

/// Scratch of a product; nothing is needed without splits.
GemmScratchSize gemm_sm80_scratch(const GemmProblem& problem, const GemmSm80Config& config);

/// The product in one launch. `T` is fp16 or bf16; C is of any of the three types, with any strides. The parts of a
/// split product are added in order, so the result is reproducible. Of a column sum, every group of 16 rows is written.
template <class T>
Status gemm_sm80(const GemmProblem& problem, const GemmSm80Config& config, const GemmScratch& scratch, Stream stream);

}  // namespace ak
