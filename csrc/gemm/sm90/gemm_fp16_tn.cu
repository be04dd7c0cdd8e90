// Instances of gemm_sm90 for fp16, a column-major A and a row-major B.
#include "gemm/sm90/gemm.cuh"

namespace ak::gemm {

template Status with_tile<fp16, Major::kMN, Major::kMN, 0, kGemmTileCount>(const GemmProblem&, const GemmSm90Config&,
                                                                           const GemmScratch&, Stream);

}  // namespace ak::gemm
