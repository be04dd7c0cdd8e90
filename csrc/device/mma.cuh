#pragma once
// Warp-level tensor core instructions: ldmatrix, stmatrix, mma.sync. Fragment layout of the PTX manual: of an 8 x 8
// matrix of 16-bit elements, lane l holds row l / 4, columns 2 (l % 4) and the next, in one 32-bit register (the lower
// column in the lower half).
#include "base/half.h"
#include "device/platform.cuh"

namespace ak {

/// Contiguous dimension of an operand: k, or m of A or n of B.
enum class Major { kK, kMN };

}  // namespace ak

#ifdef AK_EMULATE
#include "emulator/mma.h"
#else
#include <type_traits>

namespace ak {

/// Rounds two values to nearest even and packs them into a fragment register: `low` is the lower column.
template <class T>
AK_DEVICE uint32_t round_pair(float low, float high) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    static_assert(std::is_same_v<T, fp16>, "fp16 or bf16");
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

/// Loads four 8 x 8 matrices; lanes 8 i to 8 i + 7 pass the addresses of the eight 16-byte rows of matrix i (sm_75).
AK_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
/// ldmatrix_x4, if `transposed` with every matrix transposed; that is uniform in the warp.
AK_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address, bool transposed) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
      "@!p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
      "}"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(row_address), "r"(static_cast<int>(transposed))
      : "memory");
}
/// Stores four 8 x 8 matrices, addresses as for ldmatrix_x4 (sm_90).
AK_DEVICE void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row_address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
/// stmatrix_x4 with every matrix transposed.
AK_DEVICE void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row_address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// d[16 x 8] += a[16 x 16] b[16 x 8]; T is fp16 or bf16, accumulation is fp32 (sm_80). Lane l holds rows l / 4 and 8 +
/// l / 4 and columns 2 (l % 4) and the next of d; the 8 x 8 matrices top left, bottom left, top right, bottom right of
/// a; and top, bottom of b, transposed.
template <class T>
AK_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, fp16>, "mma takes fp16 or bf16");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace ak
#endif
