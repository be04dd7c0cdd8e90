#pragma once
// Tensor maps: TMA descriptors of a tensor in global memory and of the box that one copy moves. Encoded on the host and
// passed to the kernel by AK_PARAM(TensorMap).
#include <cstddef>
#include <cstdint>

#include "base/config.h"
#include "device/memo.h"
#include "device/platform.cuh"
#include "device/status.h"

namespace ak {

enum class ElementType { kFloat16, kBFloat16, kFloat32 };
constexpr uint32_t bytes_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

/// Swizzle of a box in shared memory, against bank conflicts of column accesses: the index of a 16-byte chunk in its
/// row of 32, 64 or 128 bytes is XORed with the row. The innermost box dimension must fill such a row.
enum class Swizzle { k32, k64, k128 };
constexpr uint32_t row_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::k32 ? 32 : swizzle == Swizzle::k64 ? 64 : 128;
}

/// Tensor of 2 to 4 dimensions, innermost first, which is contiguous, and the box. Base and strides are multiples of 16
/// bytes.
///
/// cuda.h also derives each stride from the one before it: stride[0] >= size[0], stride[1] >= stride[0] * size[1]. The
/// driver is not known to check this, and some maps of gemm_sm90 rely on that: phases and the halves of swiglu, whose
/// matrices begin within each other's rows, and tensors that the caller laid out so (a batch between the rows, a
/// residual of overlapping windows). If a driver refuses such a map, gemm/launch.h takes gemm_sm80. ragged_lines()
/// relies on it, too.
struct TensorMapSpec {
  const void* base;
  ElementType type;
  int rank;
  uint64_t size[4];    ///< elements
  uint64_t stride[3];  ///< elements, of dimensions 1 to 3
  uint32_t box[4];     ///< elements, at most 256
  Swizzle swizzle = Swizzle::k128;

  bool operator==(const TensorMapSpec&) const = default;
  std::size_t hash() const {
    std::size_t h = hash_of(reinterpret_cast<uintptr_t>(base), static_cast<int>(type), rank, static_cast<int>(swizzle));
    for (int i = 0; i < rank; i++) h = hash_of(h, size[i], box[i], i + 1 < rank ? stride[i] : 0);
    return h;
  }
};

/// Lines of a matrix, `ld` elements apart, as a tensor whose bounds the coordinates of a box choose: the box at (x,
/// ragged_line(line, end), kRaggedLines, end) begins at line `line` and is out of bounds from line `end` on. Its last
/// two dimensions add kRaggedLines (2^34 - ld) and end ld elements to the address; the first sum is -kRaggedLines ld
/// modulo 2^64 bytes. `line` may be up to kRaggedLines before `end`. After triton/tools/ragged_tma.py.
inline constexpr int kRaggedLines = 1 << 30;
inline TensorMapSpec ragged_lines(const void* base, ElementType type, int columns, int64_t ld, uint32_t box_columns,
                                  uint32_t box_lines) {
  constexpr uint64_t kAny = INT32_MAX;
  const auto pitch = static_cast<uint64_t>(ld);
  return {base,
          type,
          4,
          {static_cast<uint64_t>(columns), kRaggedLines, kAny, kAny},
          {pitch, (uint64_t{1} << 34) - pitch, pitch},
          {box_columns, box_lines, 1, 1}};
}
AK_HD int ragged_line(int line, int end) { return kRaggedLines - end + line; }

}  // namespace ak

#ifdef AK_EMULATE
#include "emulator/tensor_map.h"
#else
#include <cuda.h>

#if CUDART_VERSION < 12050
#error "amp_kernels needs CUDA 12.5 or newer: before it there is no cudaGetDriverEntryPointByVersion"
#endif

namespace ak {

using TensorMap = CUtensorMap;

namespace detail {

/// Encodes `spec`, or returns the driver's error.
inline Status encode_tensor_map(TensorMap* map, const TensorMapSpec& spec) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // Resolved by the runtime, so that nothing links against libcuda, which a build machine need not have.
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(found == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  if (encode == nullptr)
    return {static_cast<int>(cudaErrorNotSupported), "the CUDA driver has no cuTensorMapEncodeTiled"};
  const CUtensorMapDataType types[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                       CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
  const CUtensorMapSwizzle swizzles[] = {CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B,
                                         CU_TENSOR_MAP_SWIZZLE_128B};
  cuuint64_t size[4], stride[3];
  cuuint32_t box[4];
  const cuuint32_t element_stride[4] = {1, 1, 1, 1};
  for (int i = 0; i < spec.rank; i++) {
    size[i] = spec.size[i];
    box[i] = spec.box[i];
    if (i + 1 < spec.rank) stride[i] = spec.stride[i] * bytes_of(spec.type);
  }
  const auto result_of_encode = [&] {
    return encode(map, types[static_cast<int>(spec.type)], static_cast<cuuint32_t>(spec.rank),
                  const_cast<void*>(spec.base), size, stride, box, element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  swizzles[static_cast<int>(spec.swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = result_of_encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // a new thread has no context before cudaSetDevice
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) result = result_of_encode();
  }
  if (result != CUDA_SUCCESS) return {static_cast<int>(result), "cuTensorMapEncodeTiled refused the tensor"};
  return {};
}

}  // namespace detail

/// Makes the map of `spec`, or returns the driver's error.
///
/// A map depends on its spec alone, so they are memoized per thread: training steps repeat the same weights, and the
/// allocator repeats the same addresses. Large models need thousands.
inline Status make_tensor_map(TensorMap* map, const TensorMapSpec& spec) {
  thread_local Memo<TensorMapSpec, TensorMap> made(1 << 14);
  if (const TensorMap* known = made.find(spec)) {
    *map = *known;
    return {};
  }
  const Status status = detail::encode_tensor_map(map, spec);
  if (status.ok()) made.keep(spec, *map);
  return status;
}

}  // namespace ak
#endif
