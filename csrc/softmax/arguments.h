// Argument checks that the CPU and the GPU kernels of softmax_rows share.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_softmax_matrix(const char* op, ArgName name, const Tensor& t) {
  check_dtype(op, name, t, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(t.dim() == 2 && t.size(1) > 0 && t.is_contiguous(), op, ": ", name,
           " must be contiguous with shape (rows, columns), columns > 0; got shape ", Ints{t.sizes()}, " and strides ",
           Ints{t.strides()});
}

// (a, b, c, columns) with a b c rows, along which strides may be anything.
inline void check_softmax_mask(const char* op, const std::optional<Tensor>& mask, const Tensor& like) {
  if (!mask) return;
  check_dtype(op, {"mask"}, *mask, {ScalarType::Bool});
  AK_CHECK(mask->dim() == 4 && mask->size(0) * mask->size(1) * mask->size(2) == like.size(0) &&
               mask->size(3) == like.size(1) && (mask->size(3) == 1 || mask->numel() == 0 || mask->stride(3) == 1),
           op, ": mask must have shape (a, b, c, ", like.size(1), ") with a * b * c = ", like.size(0),
           " and adjacent columns; got shape ", Ints{mask->sizes()}, " and strides ", Ints{mask->strides()});
}

inline void check_softmax_gradient(const char* op, const Tensor& grad, const Tensor& of,
                                   const std::optional<Tensor>& statistics, const std::optional<Tensor>& mask) {
  check_softmax_matrix(op, {"grad"}, grad);
  check_softmax_matrix(op, {"of"}, of);
  AK_CHECK(same_sizes(grad, of), op, ": of must have the shape of grad, ", Ints{grad.sizes()}, "; got ",
           Ints{of.sizes()});
  check_softmax_mask(op, mask, grad);
  if (!statistics) return;
  check_dtype(op, {"statistics"}, *statistics, {ScalarType::Float});
  AK_CHECK(statistics->dim() == 2 && statistics->size(0) == 2 && statistics->size(1) == grad.size(0) &&
               statistics->is_contiguous(),
           op, ": statistics must be contiguous with shape (2, ", grad.size(0), "); got ", Ints{statistics->sizes()});
}

}  // namespace ak
