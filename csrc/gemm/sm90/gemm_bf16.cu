// Instances of gemm_sm90 for bf16; one file per type, so that they compile in parallel.
#include "gemm/sm90/gemm.cuh"

namespace ak {

template Status gemm_sm90<bf16>(const GemmProblem&, const GemmSm90Config&, const GemmScratch&, Stream);

}  // namespace ak
