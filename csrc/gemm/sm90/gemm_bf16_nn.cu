// Instances of gemm_sm90 for bf16, a row-major A and a row-major B.
#include "gemm/sm90/gemm.cuh"

namespace ak::gemm {

template Status with_tile<bf16, Major::kK, Major::kMN, 0, kGemmTileCount>(const GemmProblem&, const GemmSm90Config&,
                                                                          const GemmScratch&, Stream);

}  // namespace ak::gemm
