// Copies operands that TMA cannot address for gemm_sm90: lines of k, m or n elements at multiples of 16 bytes.
#pragma once
#include "gemm/sm90/gemm.h"

namespace ak {

/// Bytes of the copies that `problem` needs; 0 if gemm_sm90 takes its operands unchanged.
size_t gemm_repack_bytes(const GemmProblem& problem);

/// `problem` with the operands that need a copy replaced by copies at `scratch`, which is aligned to 16 bytes.
GemmProblem gemm_repacked(const GemmProblem& problem, void* scratch);

/// Makes the copies in one launch and pads their lines with zeros. `to` is gemm_repacked(from).
Status gemm_repack(const GemmProblem& from, const GemmProblem& to, Stream stream);

}  // namespace ak
