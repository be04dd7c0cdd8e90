// Copies of the operands of a product whose lines TMA cannot address, for gemm_sm90: lines of k, m or n elements, each
// from a multiple of 16 bytes on.
#pragma once
#include "gemm/sm90/gemm.h"

namespace ak {

/// Bytes that the copies of `problem` need; 0 if gemm_sm90 takes its operands as they lie.
size_t gemm_repack_bytes(const GemmProblem& problem);

/// `problem` with its copies at `scratch`, aligned to 16 bytes, in place of what needs one.
GemmProblem gemm_repacked(const GemmProblem& problem, void* scratch);

/// Makes the copies in one launch, and fills their lines up with zeros. `to` is gemm_repacked(from).
Status gemm_repack(const GemmProblem& from, const GemmProblem& to, Stream stream);

}  // namespace ak
