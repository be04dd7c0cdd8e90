// Address table: parameters and gradients as addresses instead of lists of tensors, in an int64 CPU tensor with one row
// per parameter.
//
// A tensor in a list costs about 140 ns of host time per call, although only its address may change between steps. An
// optimizer verifies that and passes a table (amp_kernels/optim/_launches.py). Rows are checked as lists are, but
// addresses cannot be verified, so only optimizers pass tables.
#pragma once

#include <initializer_list>
#include <span>

#include "base/check.h"
#include "base/table_columns.h"

namespace ak {

// dtypes are torch's codes (ScalarType); rows and columns are the last two dimensions of the parameter.
struct TableRow {
#define AK_COLUMN(name) int64_t name;
  AK_TABLE_COLUMNS(AK_COLUMN)
#undef AK_COLUMN
};
inline constexpr int64_t kTableColumns = sizeof(TableRow) / sizeof(int64_t);

inline std::span<const TableRow> table_rows(const char* op, ArgName name, const Tensor& table) {
  check_dtype(op, name, table, {ScalarType::Long});
  AK_CHECK(table.is_cpu(), op, ": ", name, " must be on the CPU");
  AK_CHECK(table.dim() == 2 && table.size(1) == kTableColumns && table.is_contiguous(), op, ": ", name,
           " must be contiguous with shape (n, ", kTableColumns, "); got shape ", Ints{table.sizes()});
  return {static_cast<const TableRow*>(table.const_data_ptr()), static_cast<size_t>(table.size(0))};
}

inline ScalarType table_dtype(const char* op, ArgName name, int64_t code, std::initializer_list<ScalarType> accepted) {
  const ScalarType dtype = code == static_cast<int8_t>(code) ? static_cast<ScalarType>(code) : ScalarType::Undefined;
  check_dtype(op, name, dtype, accepted);
  return dtype;
}

inline char* table_address(const char* op, ArgName name, int64_t address, int64_t numel, ScalarType dtype) {
  const int64_t size = dtype == ScalarType::Double ? 8 : is_half(dtype) ? 2 : 4;
  AK_CHECK(numel >= 0, op, ": ", name, " has ", numel, " elements");
  AK_CHECK(numel == 0 || (address != 0 && address % size == 0), op, ": ", name, " is at address ", address,
           ", where no ", dtype_name(dtype), " can be");
  return reinterpret_cast<char*>(address);
}

}  // namespace ak
