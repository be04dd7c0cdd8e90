// Batches of small-integer matrices for the tests of a GEMM: their values, how an operand lies in memory, and the
// comparison of a result with what it must be.
#pragma once
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "emulator/harness.h"
#include "gemm/call.h"

namespace ak::test {

/// A matrix per batch of small integers in memory as `T`, and its values.
class Matrix {
 public:
  int rows, columns, batch;
  std::vector<float> values;

  Matrix(int rows_, int columns_, int batch_, uint64_t seed) : rows(rows_), columns(columns_), batch(batch_) {
    emu::Random random{seed};
    values.resize(static_cast<size_t>(rows) * columns * batch);
    for (float& x : values) x = static_cast<float>(random.below(5)) - 2;
  }
  float at(int b, int r, int c) const { return values[(static_cast<size_t>(b) * rows + r) * columns + c]; }
};

template <class T>
struct Stored {
  std::unique_ptr<emu::Buffer<T>> buffer;
  int64_t ld = 0, batch_stride = 0;

  /// By columns if `by_columns`. Only as long as the last element; between the rows lies NaN.
  Stored(const char* name, const Matrix& x, bool by_columns, int gap, int offset, int batch_gap = 0) {
    const int outer = by_columns ? x.columns : x.rows, inner = by_columns ? x.rows : x.columns;
    ld = inner + gap;
    batch_stride = ld * outer + batch_gap;
    const auto size = static_cast<size_t>(batch_stride * (x.batch - 1) + ld * (outer - 1) + inner);
    buffer = std::make_unique<emu::Buffer<T>>(name, size, static_cast<size_t>(offset));
    buffer->fill(round_to<T>(NAN));
    for (int b = 0; b < x.batch; b++) {
      for (int i = 0; i < outer; i++) {
        for (int j = 0; j < inner; j++) {
          const float value = by_columns ? x.at(b, j, i) : x.at(b, i, j);
          buffer->set(static_cast<size_t>(b * batch_stride + i * ld + j), round_to<T>(value));
        }
      }
    }
  }
  GemmValues as_values(DType type) const { return {buffer->data(), type, ld, 1, batch_stride}; }
};

/// A result that a kernel writes: NaN, or `initial`, before; compared with `want` after.
template <class T>
struct Result {
  std::unique_ptr<emu::Buffer<T>> buffer;
  GemmValues values;
  int rows, columns, batch;
  float initial;

  Result(const char* name, DType type, int rows_, int columns_, int batch_, int gap, int offset, bool transposed,
         float initial_, int batch_gap = 0)
      : rows(rows_), columns(columns_), batch(batch_), initial(initial_) {
    const int outer = transposed ? columns : rows, inner = transposed ? rows : columns;
    const int64_t ld = inner + gap, stride = ld * outer + batch_gap;
    const auto size = static_cast<size_t>(stride * (batch - 1) + ld * (outer - 1) + inner);
    buffer = std::make_unique<emu::Buffer<T>>(name, size, static_cast<size_t>(offset));
    if (initial == initial) buffer->fill(round_to<T>(initial));
    values = {buffer->data(), type, transposed ? 1 : ld, transposed ? ld : 1, stride};
  }
  template <class Want>
  std::string compare(const char* name, Want want) const {
    std::vector<bool> inside(buffer->size());
    for (int b = 0; b < batch; b++) {
      for (int r = 0; r < rows; r++) {
        for (int c = 0; c < columns; c++) {
          const auto i =
              static_cast<size_t>(b * values.batch_stride + r * values.row_stride + c * values.column_stride);
          inside[i] = true;
          const float got = to_float((*buffer)[i]), expected = to_float(round_to<T>(want(b, r, c)));
          if (!(got == expected)) return emu::format("%s[%d, %d, %d] is %g, expected %g", name, b, r, c, got, expected);
        }
      }
    }
    for (size_t i = 0; i < inside.size(); i++) {
      const float x = to_float((*buffer)[i]);
      if (!inside[i] && (initial == initial ? x != initial : x == x)) return emu::format("%s: a gap was written", name);
    }
    return buffer->check_red_zones();
  }
};

}  // namespace ak::test
