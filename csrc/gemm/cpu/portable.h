// The product without instructions of the machine's own (gemm_portable.cpp).
#pragma once

#include "gemm/cpu/product.h"

namespace ak {

// a @ b in fp32, contiguous: in `room`, or where that is null in memory that nothing else refers to.
Tensor portable_product(const Tensor& a, const Tensor& b, bool batch_invariant, const Tensor* room);

}  // namespace ak
