// The columns of an address table (base/tensor_table.h), in order. Python has the same list: Column in
// amp_kernels/_updates/state.py.
#pragma once

// clang-format off
#define AK_TABLE_COLUMNS(X) \
  X(param) X(grad) X(numel) X(param_dtype) X(grad_dtype) \
  X(block) X(offset) X(slot) X(group) X(index) X(width) X(pitch) \
  X(rows) X(columns)
// clang-format on
