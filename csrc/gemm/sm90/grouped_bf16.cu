// Instances of gemm_sm90_grouped for bf16.
#include "gemm/sm90/grouped.cuh"

namespace ak {

template Status gemm_sm90_grouped<bf16>(const GroupedProblem&, Stream);

}  // namespace ak
