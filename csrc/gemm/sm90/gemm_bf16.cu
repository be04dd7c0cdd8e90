// The instances of gemm_sm90 for bf16; a file for each type, so that they compile side by side.
#include "gemm/sm90/gemm.cuh"

namespace ak {

template Status gemm_sm90<bf16>(const GemmProblem&, const GemmSm90Config&, GemmOutput, const GemmScratch&, Stream);

}  // namespace ak
