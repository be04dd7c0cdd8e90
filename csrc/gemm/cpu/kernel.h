// The micro-kernels of an instruction set, used by blocked.cpp: packing of operands, and multiplication into a tile of
// fp32 sums.
//
// A *word* is the content of a 32-bit lane along K: one fp32 number or a pair of bf16. A *step* is one word of every
// lane. A *panel* is a few lanes of an operand with the words of a step side by side, so that a micro-kernel reads
// consecutive memory; lanes and steps out of bounds are zero.
#pragma once

#include <cstdint>

namespace ak {

// A 16-bit operand. Lanes are rows of a and columns of b. One of the two strides is 1.
struct Operand {
  const uint16_t* data;
  int64_t lane_stride, k_stride;

  Operand at(int64_t lane, int64_t k) const {
    return {data + lane * lane_stride + k * k_stride, lane_stride, k_stride};
  }
};

// The words of a: lane i, step p is at data + i * lane_bytes + p * step_bytes.
struct Words {
  const char* data;
  int64_t lane_bytes, step_bytes;
};

// Most rows, or columns, of a thin product.
inline constexpr int64_t kThin = 16;

struct Kernel {
  int64_t rows, columns;  // of the largest tile of sums; a panel of b is as wide
  int64_t lanes_log2;     // lanes of a panel of a: those of a vector, a multiple of `rows`
  int64_t group;          // elements of K are packed in multiples of this many, a multiple of word_elements
  int64_t word_elements;  // 1 or 2
  int64_t depth;          // elements of K to sum before the next panel, so that a panel fits the L1 cache
  int64_t most_columns;   // columns of b to pack at a time if `a` is read in place, once for each of these blocks
  bool in_place;          // a K-contiguous `a` needs no packing
  bool packs_rows;        // packs `a` as rows for any strides

  // Packs `lanes` x `k` elements of an operand, with zeros up to `steps` words, as panels of `width` lanes,
  void (*pack_panels)(Operand from, int64_t lanes, int64_t k, int64_t steps, int64_t width, uint32_t* to);
  // or as a row of `steps` words for each lane.
  void (*pack_rows)(Operand from, int64_t lanes, int64_t k, int64_t steps, uint32_t* to);
  // sums[i, j] (+)= sum over `steps` of a[i, step] * panel[step, j] for i < rows, j < columns. Whole vectors of sums
  // are written: up to this->columns of them.
  void (*multiply)(int64_t steps, const Words& a, const uint32_t* panel, float* sums, int64_t stride, int64_t rows,
                   int64_t columns, bool accumulate);
  // Thin products: sums[i * row_stride + j * column_stride] = a[i] . b[j] over `k` elements for i < rows <= kThin,
  // j < columns; row i of `a` is the words at a + i * steps, `steps` whole vectors, and K is contiguous in b. Null for
  // instructions on tiles only.
  void (*dot)(int64_t k, const uint32_t* a, int64_t steps, int64_t rows, Operand b, int64_t columns, float* sums,
              int64_t row_stride, int64_t column_stride);
  // Runs `rounds` of independent multiply-adds on registers, after begin(); returns their flops. Measures the machine's
  // peak.
  int64_t (*burn)(int64_t rounds);
  // Called before and after a thread's calls of `multiply`; may be null.
  void (*begin)();
  void (*end)();
};

const Kernel& avx2_kernel(bool is_bf16);
const Kernel& avx512_kernel(bool is_bf16);
const Kernel& avx512_bf16_kernel();
const Kernel& amx_kernel();
const Kernel& amx_emulated_kernel();

}  // namespace ak
