// Copies operands that TMA cannot address for gemm_sm90: lines of k, m or n elements at multiples of 16 bytes.
#pragma once
#include "gemm/sm90/gemm.h"

namespace ak {

/// Elements between the lines of a copy of lines of `length` elements: a multiple of 16 bytes, and of 128 where that
/// adds at most an eighth, so that a box of TMA, whose rows have 128 bytes, reads whole lines of L2.
inline int64_t gemm_repack_pitch(int length) {
  const int unit = length >= 512 ? 64 : 8;
  return (static_cast<int64_t>(length) + unit - 1) / unit * unit;
}

/// Bytes of the copies that `problem` needs; 0 if gemm_sm90 takes its operands unchanged.
size_t gemm_repack_bytes(const GemmProblem& problem);

/// `problem` with the operands that need a copy replaced by copies at `scratch`, which is aligned to 16 bytes.
GemmProblem gemm_repacked(const GemmProblem& problem, void* scratch);

/// Makes the copies in one launch and pads their lines with zeros. `to` is gemm_repacked(from).
Status gemm_repack(const GemmProblem& from, const GemmProblem& to, Stream stream);

}  // namespace ak
