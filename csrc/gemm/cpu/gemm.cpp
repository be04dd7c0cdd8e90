// The GEMM of gemm/call.h on the CPU.
//
// Work: 2 M N K flops in the fp32 product (product.cpp), whose blocks of sums are finished in the cache and rounded
// once. The forward writes C, and z if it is asked for; the backward reads the pre-activation and writes dz. One loop
// over floats serves every combination of dtypes, a piece of a row at a time.
//
// Column sums are taken within units of 64 rows, then over the units in order. The units do not depend on the number of
// threads, so neither do the bits.
#include <algorithm>
#include <cstring>
#include <vector>

#include "activation/cpu_gradient.h"
#include "base/cpu/column_sums.h"
#include "base/cpu/simd.h"
#include "base/cpu/tile.h"
#include "gemm/call.h"
#include "gemm/column_sums.h"
#include "gemm/cpu/product.h"

namespace ak {
namespace {

// ---- forward

// z = alpha * z + bias, where `bias` may be null.
AK_SIMD_INLINE void finish_sums(float* z, float alpha, const float* bias, int64_t n) {
  if (bias) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i] + bias[i];
  } else {
    for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i];
  }
}

AK_SIMD_INLINE void finish_sums_of_row(float* z, float alpha, float bias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i] + bias;
}

template <Activation kActivation>
AK_SIMD_INLINE void activate_span(float* z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = activate(kActivation, z[i]);
}

AK_SIMD_INLINE void swiglu_span(float* gate, const float* up, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) gate[i] = swiglu(gate[i], up[i]);
}

// The result takes the place of z; `up` is for gated activations.
AK_SIMD_INLINE void activate_span(Activation activation, float* z, const float* up, int64_t n) {
  switch (activation) {
    case Activation::none:
      return;
    case Activation::relu:
      return activate_span<Activation::relu>(z, n);
    case Activation::gelu:
      return activate_span<Activation::gelu>(z, n);
    case Activation::gelu_tanh:
      return activate_span<Activation::gelu_tanh>(z, n);
    case Activation::silu:
      return activate_span<Activation::silu>(z, n);
    case Activation::swiglu:
      return swiglu_span(z, up, n);
  }
}

AK_SIMD_INLINE void add_residual(float* out, const float* residual, float beta, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = fma(beta, residual[i], out[i]);
}

// GemmEpilogue with the bias in fp32. Residual, z and C are contiguous.
struct Forward {
  Activation activation;
  float alpha, beta;
  const float* bias;  // null, or one value per column or per row
  bool row_bias;
  int64_t m, n;  // of a matrix of sums
  GemmValues residual, z, out;

  bool in_steps() const {
    return activation == Activation::none || is_gated(activation) || row_bias || residual.data ||
           out.type == DType::kFloat32;
  }

  // Finishes columns [c, c + width) of row r in place of their sums: `gate`, and for gated activations also `up`.
  AK_SIMD_INLINE void row(float* gate, float* up, int64_t r, int64_t c, int64_t width) const {
    const int64_t columns = up ? n / 2 : n;
    finish_z(gate, r, c, width);
    if (up) finish_z(up, r, columns + c, width);
    activate_span(activation, gate, up, width);
    const int64_t at = r * columns + c;
    float buffer[kTile];
    if (residual.data) add_residual(gate, load_span(residual.data, residual.type, at, width, buffer), beta, width);
    store(gate, out, at, width);
  }

  AK_SIMD_INLINE void finish_z(float* sums, int64_t r, int64_t c, int64_t width) const {
    if (row_bias) {
      finish_sums_of_row(sums, alpha, bias[r % m], width);
    } else if (bias || alpha != 1.0f) {
      finish_sums(sums, alpha, bias ? bias + c : nullptr, width);
    }
    if (z.data) store(sums, z, r * n + c, width);
  }

  // Rows of an fp32 result may be the sums themselves.
  static AK_SIMD_INLINE void store(const float* from, const GemmValues& to, int64_t at, int64_t width) {
    float* const target = static_cast<float*>(to.data) + at;
    if (to.type == DType::kFloat32 && target != from) std::memcpy(target, from, static_cast<size_t>(4 * width));
    store_span(from, to.data, to.type, at, width);
  }
};

// Bias, activation and rounding of a block in one pass over its rows.
template <Activation kActivation, typename T>
AK_SIMD_INLINE void finish_at_once(const Forward& e, const SumsBlock& block) {
  float none[kTile];
  std::fill_n(none, std::min(kTile, block.columns), -0.0f);  // identity of the addition
  for (int64_t c = 0; c < block.columns; c += kTile) {
    const int64_t width = std::min(kTile, block.columns - c);
    const float* __restrict bias = e.bias ? e.bias + block.column + c : none;
    for (int64_t i = 0; i < block.rows; ++i) {
      const float* __restrict sums = block.sums + i * block.stride + c;
      const int64_t at = (block.row + i) * e.n + block.column + c;
      T* __restrict out = static_cast<T*>(e.out.data) + at;
      if (e.z.data) {
        T* __restrict preact = static_cast<T*>(e.z.data) + at;
        for (int64_t j = 0; j < width; ++j) {
          const float z = e.alpha * sums[j] + bias[j];
          preact[j] = round_to<T>(z);
          out[j] = round_to<T>(activate(kActivation, z));
        }
      } else {
        for (int64_t j = 0; j < width; ++j) out[j] = round_to<T>(activate(kActivation, e.alpha * sums[j] + bias[j]));
      }
    }
  }
}

template <typename T>
AK_SIMD_CLONES void finish_at_once(const Forward& e, const SumsBlock& block) {
  switch (e.activation) {
    case Activation::none:
      return finish_at_once<Activation::none, T>(e, block);
    case Activation::relu:
      return finish_at_once<Activation::relu, T>(e, block);
    case Activation::gelu:
      return finish_at_once<Activation::gelu, T>(e, block);
    case Activation::gelu_tanh:
      return finish_at_once<Activation::gelu_tanh, T>(e, block);
    case Activation::silu:
      return finish_at_once<Activation::silu, T>(e, block);
    case Activation::swiglu:
      return;
  }
}

AK_SIMD_CLONES void finish_in_steps(const Forward& forward, const SumsBlock& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t c = 0; c < block.columns; c += kTile) {
      float* z = block.sums + i * block.stride + c;
      forward.row(z, block.half ? z + block.half : nullptr, block.row + i, block.column + c,
                  std::min(kTile, block.columns - c));
    }
  }
}

void finish_forward(const Forward& e, const SumsBlock& block) {
  if (e.in_steps()) return finish_in_steps(e, block);
  if (e.out.type == DType::kFloat16) return finish_at_once<fp16>(e, block);
  finish_at_once<bf16>(e, block);
}

// The bias, one value per column or per row, as contiguous floats: in place if it is that, else in `buffer`.
const float* bias_of(const GemmProblem& q, bool per_row, std::vector<float>& buffer) {
  const GemmValues& bias = q.epilogue.bias;
  const int64_t n = per_row ? q.m : q.n, stride = per_row ? bias.row_stride : bias.column_stride;
  if (stride == 1 && bias.type == DType::kFloat32) return static_cast<const float*>(bias.data);
  buffer.resize(static_cast<size_t>(n));
  if (stride == 1) return load_tile(static_cast<const void*>(bias.data), bias.type, 0, n, buffer.data());
  with_narrow_dtype(bias.type, [&]<typename T>(T) {
    for (int64_t i = 0; i < n; ++i)
      buffer[static_cast<size_t>(i)] = to_float(static_cast<const T*>(bias.data)[i * stride]);
  });
  return buffer.data();
}

void run_forward(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  const bool per_row = e.bias.row_stride != 0;
  std::vector<float> buffer;
  const Forward forward{e.activation, e.alpha, e.beta, e.bias.data ? bias_of(q, per_row, buffer) : nullptr,
                        per_row,      q.m,     q.n,    e.residual,
                        e.z,          q.c};
  const bool sums_fit = q.c.type == DType::kFloat32 && !is_gated(e.activation);
  product(q, sums_fit ? static_cast<float*>(q.c.data) : nullptr,
          [&forward](const SumsBlock& block) { finish_forward(forward, block); });
}

// ---- backward

struct Backward {
  ActivationGradient gradient;
  float* sums;  // of the columns of each unit of rows, `width` each, or null

  AK_SIMD_INLINE void row(const float* grad, int64_t r, int64_t unit, int64_t c, int64_t n) const {
    gradient.span(grad, r, c, n, [&](const float* dz, int64_t column, int64_t some) __attribute__((always_inline)) {
      if (!sums) return;
      float* __restrict to = sums + unit * gradient.width + column;
      for (int64_t i = 0; i < some; ++i) to[i] += dz[i];
    });
  }
};

AK_SIMD_CLONES void finish_backward(const Backward& backward, const SumsBlock& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t c = 0; c < block.columns; c += kTile)
      backward.row(block.sums + i * block.stride + c, block.row + i, block.unit + i / kRowUnit, block.column + c,
                   std::min(kTile, block.columns - c));
  }
}

void run_backward(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  const int64_t width = columns_of_c(q);
  if (e.column_sums) std::fill_n(e.column_sums, row_units(q.batch, q.m) * width, 0.0f);
  const Backward backward{{e.activation, q.n, width, e.preact.data, e.preact.type, q.c.data, q.c.type}, e.column_sums};
  product(q, nullptr, [&backward](const SumsBlock& block) { finish_backward(backward, block); });
}

// ---- accumulation

// c[i] = alpha * acc[i] + beta * c[i] with one stride for c; beta = 0 does not read c.
AK_SIMD_INLINE void accumulate_row(float* c, const float* acc, int64_t n, int64_t stride, float alpha, float beta) {
  if (beta == 0.0f) {
    for (int64_t i = 0; i < n; ++i) c[i * stride] = alpha * acc[i];
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) c[i * stride] = fma(beta, c[i * stride], alpha * acc[i]);
  }
}

AK_SIMD_CLONES void accumulate_block(const GemmProblem& q, float beta, const SumsBlock& block) {
  const int64_t stride = q.c.column_stride;
  for (int64_t i = 0; i < block.rows; ++i) {
    const int64_t r = block.row + i;
    float* row =
        static_cast<float*>(q.c.data) + r / q.m * q.c.batch_stride + r % q.m * q.c.row_stride + block.column * stride;
    const float* sums = block.sums + i * block.stride;
    if (stride == 1) {
      accumulate_row(row, sums, block.columns, 1, q.epilogue.alpha, beta);
    } else {
      accumulate_row(row, sums, block.columns, stride, q.epilogue.alpha, beta);
    }
  }
}

void run_accumulation(const GemmProblem& q) {
  const float beta = is_chained(q) ? 0.0f : q.accumulate ? 1.0f : q.epilogue.residual.data ? q.epilogue.beta : 0.0f;
  product(q, nullptr, [&q, beta](const SumsBlock& block) { accumulate_block(q, beta, block); });
}

bool has_contiguous_c(const GemmProblem& q) {
  const int64_t columns = columns_of_c(q);
  return q.c.column_stride == 1 && q.c.row_stride == columns && (q.batch == 1 || q.c.batch_stride == q.m * columns);
}

}  // namespace

AK_EXPORT Status gemm_cpu(const GemmProblem& q, Stream) {
  if (q.batch == 0 || q.m == 0 || q.n == 0) return {};
  if (q.symmetric) {
    run_symmetric(q);
  } else if (q.epilogue.preact.data) {
    run_backward(q);
  } else if (q.accumulate || q.epilogue.residual.data == q.c.data || !has_contiguous_c(q)) {
    run_accumulation(q);
  } else {
    run_forward(q);
  }
  return {};
}

Status gemm_column_sums(const GemmProblem& q, float* out, Stream) {
  const int64_t width = columns_of_c(q);
  sum_rows(0, row_units(q.batch, q.m), width, out, [&](int64_t begin, int64_t end, float* sums) {
    add_rows(q.epilogue.column_sums + begin * width, DType::kFloat32, end - begin, width, sums);
  });
  return {};
}

}  // namespace ak
