// Instances of gemm_sm90_chained for bf16.
#include "gemm/sm90/chained.cuh"

namespace ak {

template Status gemm_sm90_chained<bf16>(const GemmProblem&, const GemmSm90Config&, Stream);

}  // namespace ak
