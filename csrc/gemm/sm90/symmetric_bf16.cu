// Instances of gemm_sm90_symmetric for bf16.
#include "gemm/sm90/symmetric.cuh"

namespace ak {

template Status gemm_sm90_symmetric<bf16>(const GemmProblem&, int, Stream);

}  // namespace ak
