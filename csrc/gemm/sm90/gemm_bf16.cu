// Instances of gemm_sm90 for bf16: those for a row-major A and a column-major B, and the choice of the layout. Each
// other layout has a file of its own, so that they compile in parallel.
#include "gemm/sm90/gemm.cuh"

namespace ak {
namespace gemm {

extern template Status with_tile<bf16, Major::kK, Major::kMN, 0, kGemmTileCount>(const GemmProblem&,
                                                                                 const GemmSm90Config&,
                                                                                 const GemmScratch&, Stream);
extern template Status with_tile<bf16, Major::kMN, Major::kMN, 0, kGemmTileCount>(const GemmProblem&,
                                                                                  const GemmSm90Config&,
                                                                                  const GemmScratch&, Stream);
extern template Status with_tile<bf16, Major::kMN, Major::kK, 0, kGemmTileCount>(const GemmProblem&,
                                                                                 const GemmSm90Config&,
                                                                                 const GemmScratch&, Stream);

}  // namespace gemm

template Status gemm_sm90<bf16>(const GemmProblem&, const GemmSm90Config&, const GemmScratch&, Stream);

}  // namespace ak
