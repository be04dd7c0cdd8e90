// The checks of embedding_accumulate_ that every device makes.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_embedding(const char* op, const Tensor& out, const Tensor& grad, const Tensor& sorted,
                            const Tensor& order) {
  for (const auto& [name, t] : {std::pair{"out", &out}, {"grad", &grad}}) {
    check_dtype(op, {name}, *t, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
    AK_CHECK(t->dim() == 2 && t->is_contiguous(), op, ": ", name, " must be a contiguous matrix; got shape ",
             Ints{t->sizes()}, " and strides ", Ints{t->strides()});
  }
  AK_CHECK(out.size(1) == grad.size(1), op, ": out has ", out.size(1), " columns and grad ", grad.size(1));
  for (const auto& [name, t] : {std::pair{"sorted", &sorted}, {"order", &order}}) {
    check_dtype(op, {name}, *t, {ScalarType::Long});
    AK_CHECK(t->dim() == 1 && t->is_contiguous() && t->size(0) == grad.size(0), op, ": ", name,
             " must be contiguous with shape (", grad.size(0), "); got ", Ints{t->sizes()});
  }
}

}  // namespace ak
