// Maps a strided tensor to a GEMM operand without a copy. Torch-free: the ops and the emulator share it.
#pragma once
#include <cstdint>
#include <optional>

namespace ak {

/// Layout of an operand: contiguous lines, `ld` elements apart, along k or along its other dimension.
struct GemmOperand {
  int64_t ld;
  bool k_contiguous;
};

/// None if neither dimension is contiguous or if lines overlap, which tensor maps do not allow; the caller then copies.
/// The stride of a dimension of size 1, and every stride of an operand without elements, is meaningless, so a multiple
/// of 8 is assumed, which suits the kernels.
inline std::optional<GemmOperand> gemm_operand(int64_t k, int64_t k_stride, int64_t other, int64_t other_stride) {
  const auto distance = [](int64_t lines, int64_t stride, int64_t length) {
    return lines == 1 ? (length + 7) / 8 * 8 : stride;
  };
  const bool along_k = k_stride == 1 || k == 1, along_other = other_stride == 1 || other == 1;
  for (bool k_contiguous : {true, false}) {
    const bool one = k_contiguous ? k == 1 && along_other : false;  // avoid lines of one element
    if (!(k_contiguous ? along_k : along_other) || one) continue;
    const int64_t ld = k_contiguous ? distance(other, other_stride, k) : distance(k, k_stride, other);
    if (ld > 0 && ld >= (k_contiguous ? k : other)) return GemmOperand{ld, k_contiguous};
  }
  if (k == 0 || other == 0) return GemmOperand{k / 8 * 8 + 8, true};
  return std::nullopt;
}

}  // namespace ak
