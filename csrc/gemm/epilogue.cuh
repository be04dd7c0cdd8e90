// Epilogue arithmetic on the accumulators of mma.sync, in registers.
//
// mma.sync leaves a 16 x 8 block of sums in a warp: a thread holds rows lane / 4 and 8 + lane / 4, columns 2 (lane % 4)
// and the next. A chunk is two halves of kBlocks adjacent blocks; the halves may be anywhere in the row, so that with
// swiglu the gate and the value of an element are in one thread. Work: one pass over the chunk, in fp32, in place.
// Other operands are accessed directly in global memory, 4 or 8 bytes per thread: a quarter of a warp covers 16 or 32
// bytes of a row. Plan: all loads of an operand are issued before the first use, since nothing else hides their
// latency. Traps: values out of bounds may not be read, written or counted in the column sums. A kernel without an
// epilogue must skip this code by a uniform branch on is_plain().
#pragma once
#include "base/element.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/warp.cuh"
#include "gemm/call.h"

namespace ak {

/// Kernel arguments of the epilogue.
struct EpilogueArgs {
  GemmEpilogue epilogue;
  GemmValues c;
  int m, n;    ///< rows of A and columns of B
  bool plain;  ///< no epilogue: skip finish_chunk
};

/// Position of a thread's first value in each half of a chunk. Half h ends before column `end[h]`.
struct Chunk {
  int batch;
  int row;
  int column[2];
  int end[2];

  // Not column[h]: a dynamic index would put the array into local memory.
  AK_DEVICE int column_of(int h) const { return h == 0 ? column[0] : column[1]; }
  AK_DEVICE int end_of(int h) const { return h == 0 ? end[0] : end[1]; }
};

namespace detail {

/// Address of an element of `t`, whose type is T.
template <class T>
AK_DEVICE T* address(const GemmValues& t, int batch, int row, int column) {
  return static_cast<T*>(t.data) + batch * t.batch_stride + row * t.row_stride + column * t.column_stride;
}
/// True if two adjacent columns can be one access.
template <class T>
AK_DEVICE bool in_pairs(const GemmValues& t, const T* p) {
  return t.column_stride == 1 && reinterpret_cast<uintptr_t>(p) % (2 * sizeof(T)) == 0;
}

/// A 16-bit value whose type is known at run time, so that fp16 and bf16 share the code.
struct Half {
  uint16_t bits;
};
AK_DEVICE float widen(float x, DType) { return x; }
AK_DEVICE float widen(Half x, DType type) { return widen_half(type, x.bits); }
AK_DEVICE void store_value(float* p, float x, DType) { store(p, x); }
AK_DEVICE void store_value(Half* p, float x, DType type) { store(p, Half{round_half(type, x)}); }
AK_DEVICE void store_pair(float* p, float x, float y, DType) { store_vec(p, Vec<float, 2>{{x, y}}); }
AK_DEVICE void store_pair(Half* p, float x, float y, DType type) {
  store(reinterpret_cast<uint32_t*>(p), type == DType::kBFloat16 ? round_pair<bf16>(x, y) : round_pair<fp16>(x, y));
}

template <class T, int kBlocks>
AK_DEVICE void read_half(const GemmValues& t, int rows, int batch, int row, int column, int end,
                         float (&v)[kBlocks][4]) {
  const T* p[2] = {address<const T>(t, batch, row, column), address<const T>(t, batch, row + 8, column)};
  const bool inside[2] = {row < rows, row + 8 < rows};
  if (column + 8 * kBlocks - 7 < end && in_pairs(t, p[0]) && in_pairs(t, p[1])) {
    Vec<T, 2> raw[kBlocks][2];
    AK_UNROLL
    for (int i = 0; i < 2 * kBlocks; i++) {
      raw[i / 2][i % 2] = inside[i % 2] ? load_vec<2>(p[i % 2] + 8 * (i / 2)) : Vec<T, 2>{};
    }
    AK_UNROLL
    for (int i = 0; i < 4 * kBlocks; i++) v[i / 4][i % 4] = widen(raw[i / 4][i / 2 % 2][i % 2], t.type);
    return;
  }
  T raw[kBlocks][4];
  AK_UNROLL
  for (int i = 0; i < 4 * kBlocks; i++) {
    const int x = 8 * (i / 4) + i % 2;
    raw[i / 4][i % 4] = inside[i / 2 % 2] && column + x < end ? load(p[i / 2 % 2] + x * t.column_stride) : T{};
  }
  AK_UNROLL
  for (int i = 0; i < 4 * kBlocks; i++) v[i / 4][i % 4] = widen(raw[i / 4][i % 4], t.type);
}

template <class T, int kBlocks>
AK_DEVICE void write_half(const GemmValues& t, int rows, int batch, int row, int column, int end,
                          const float (&v)[kBlocks][4]) {
  AK_UNROLL
  for (int r = 0; r < 2; r++) {
    T* p = address<T>(t, batch, row + 8 * r, column);
    const bool pairs = in_pairs(t, p);
    AK_UNROLL
    for (int j = 0; j < kBlocks; j++) {
      const int x = column + 8 * j;
      if (row + 8 * r >= rows || x >= end) continue;
      if (pairs && x + 1 < end) {
        store_pair(p + 8 * j, v[j][2 * r], v[j][2 * r + 1], t.type);
      } else {
        store_value(p + 8 * j * t.column_stride, v[j][2 * r], t.type);
        if (x + 1 < end) store_value(p + (8 * j + 1) * t.column_stride, v[j][2 * r + 1], t.type);
      }
    }
  }
}

}  // namespace detail

/// Reads half `h` of a chunk from `t`, `shift` columns to the right; 0 out of bounds.
template <int kBlocks>
AK_DEVICE void read_values(const GemmValues& t, int rows, const Chunk& at, int h, int shift, float (&v)[kBlocks][4]) {
  const int column = at.column_of(h) + shift, end = at.end_of(h) + shift;
  if (t.type == DType::kFloat32) {
    detail::read_half<float>(t, rows, at.batch, at.row, column, end, v);
  } else {
    detail::read_half<detail::Half>(t, rows, at.batch, at.row, column, end, v);
  }
}

/// Rounds the values to `t`'s type and writes those in bounds.
template <int kBlocks>
AK_DEVICE void write_values(const GemmValues& t, int rows, const Chunk& at, int h, int shift,
                            const float (&v)[kBlocks][4]) {
  const int column = at.column_of(h) + shift, end = at.end_of(h) + shift;
  if (t.type == DType::kFloat32) {
    detail::write_half<float>(t, rows, at.batch, at.row, column, end, v);
  } else {
    detail::write_half<detail::Half>(t, rows, at.batch, at.row, column, end, v);
  }
}

/// Stores the column sums of the 16 rows of a chunk's half, in the order shared by all kernels and tiles.
template <int kBlocks>
AK_DEVICE void sum_columns(const EpilogueArgs& args, const Chunk& at, int h, int shift, const float (&v)[kBlocks][4]) {
  const int groups = (args.m + 15) / 16, group = at.row / 16, lane = lane_index();
  const int pitch = args.epilogue.activation == Activation::swiglu ? 2 * args.n : args.n;
  float* to = args.epilogue.column_sums + (static_cast<int64_t>(at.batch) * groups + group) * pitch + shift;
  AK_UNROLL
  for (int j = 0; j < kBlocks; j++) {
    AK_UNROLL
    for (int i = 0; i < 2; i++) {
      float sum = (at.row < args.m ? v[j][i] : 0.0f) + (at.row + 8 < args.m ? v[j][i + 2] : 0.0f);
      AK_UNROLL
      for (int mask = 4; mask < kWarpThreads; mask *= 2) sum += shuffle_xor(sum, mask);
      const int x = at.column_of(h) + 8 * j + i;
      if (lane < 4 && group < groups && x < at.end_of(h)) store(to + x, sum);
    }
  }
}

/// Applies the epilogue to the sums `v` of A B, in place. Forward of swiglu: half 0 holds gates, half 1 the values of
/// the same columns, n / 2 to the right; results replace half 0. Backward of swiglu: gate gradients replace both
/// halves, and value gradients are written to C here. Called by all lanes of a warp.
template <int kBlocks>
AK_DEVICE void finish_chunk(const EpilogueArgs& args, const Chunk& at, float (&v)[2][kBlocks][4]) {
  const GemmEpilogue& e = args.epilogue;
  const bool gated = e.activation == Activation::swiglu, backward = e.preact.data != nullptr;
  // Not unrolled, to keep one copy of the code. Registers cannot be indexed dynamically, so each iteration swaps the
  // halves; two swaps restore the order.
  const auto each_half = [&](auto f) {
    AK_NO_UNROLL
    for (int h = 0; h < 2; h++) {
      f(opaque(h));
      AK_UNROLL
      for (int i = 0; i < 4 * kBlocks; i++) {
        const float x = v[0][i / 4][i % 4];
        v[0][i / 4][i % 4] = v[1][i / 4][i % 4];
        v[1][i / 4][i % 4] = x;
      }
    }
  };
  // v = f(v, other) over the current half.
  const auto each = [&](const float (&other)[kBlocks][4], auto f) {
    AK_UNROLL
    for (int i = 0; i < 4 * kBlocks; i++) v[0][i / 4][i % 4] = f(v[0][i / 4][i % 4], other[i / 4][i % 4]);
  };

  each_half([&](int h) {
    float other[kBlocks][4];
    if (e.bias.data) {
      read_values(e.bias, args.m, at, h, 0, other);
      each(other, [&](float x, float bias) { return fma(e.alpha, x, bias); });
    } else if (e.alpha != 1.0f) {
      each(v[0], [&](float x, float) { return e.alpha * x; });
    }
    if (e.z.data) write_values(e.z, args.m, at, h, 0, v[0]);
    if (!backward) {
      switch (e.activation) {
        case Activation::relu:
          return each(v[0], [](float x, float) { return activate(Activation::relu, x); });
        case Activation::gelu:
          return each(v[0], [](float x, float) { return activate(Activation::gelu, x); });
        case Activation::gelu_tanh:
          return each(v[0], [](float x, float) { return activate(Activation::gelu_tanh, x); });
        case Activation::silu:
          return each(v[0], [](float x, float) { return activate(Activation::silu, x); });
        case Activation::none:
        case Activation::swiglu:
          return;
      }
    }
    if (e.activation != Activation::none) read_values(e.preact, args.m, at, h, 0, other);
    switch (e.activation) {
      case Activation::relu:
        each(other, [](float x, float z) { return activate_backward(Activation::relu, x, z); });
        break;
      case Activation::gelu:
        each(other, [](float x, float z) { return activate_backward(Activation::gelu, x, z); });
        break;
      case Activation::gelu_tanh:
        each(other, [](float x, float z) { return activate_backward(Activation::gelu_tanh, x, z); });
        break;
      case Activation::silu:
        each(other, [](float x, float z) { return activate_backward(Activation::silu, x, z); });
        break;
      case Activation::swiglu: {
        float up[kBlocks][4];
        read_values(e.preact, args.m, at, h, args.n, up);
        AK_UNROLL
        for (int i = 0; i < 4 * kBlocks; i++) {
          const GatedGradient g = swiglu_backward(v[0][i / 4][i % 4], other[i / 4][i % 4], up[i / 4][i % 4]);
          v[0][i / 4][i % 4] = g.gate;
          up[i / 4][i % 4] = g.up;
        }
        write_values(args.c, args.m, at, h, args.n, up);
        if (e.column_sums) sum_columns(args, at, h, args.n, up);
        break;
      }
      case Activation::none:
        break;
    }
    if (e.column_sums) sum_columns(args, at, h, 0, v[0]);
  });
  if (gated && !backward) each(v[1], [](float gate, float up) { return swiglu(gate, up); });
  if (!e.residual.data) return;
  each_half([&](int h) {
    if (h == 1 && gated && !backward) return;
    float residual[kBlocks][4];
    read_values(e.residual, args.m, at, h, 0, residual);
    each(residual, [&](float x, float r) { return fma(e.beta, r, x); });
  });
}

}  // namespace ak
