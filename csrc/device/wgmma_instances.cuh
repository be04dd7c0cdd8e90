#pragma once
// The wgmma instruction for each N of a tile (gemm/sm90/gemm.h). Inline assembly needs explicit register lists:
// AK_NAMES_j are the names of the first 4 j accumulators in the assembly text, AK_OUTPUTS_j the same as operands.
#include <type_traits>

#include "base/half.h"
#include "device/platform.cuh"

#define AK_OUTPUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define AK_NAMES_1 "%0,%1,%2,%3"
#define AK_NAMES_2 AK_NAMES_1 ",%4,%5,%6,%7"
#define AK_NAMES_3 AK_NAMES_2 ",%8,%9,%10,%11"
#define AK_NAMES_4 AK_NAMES_3 ",%12,%13,%14,%15"
#define AK_NAMES_5 AK_NAMES_4 ",%16,%17,%18,%19"
#define AK_NAMES_6 AK_NAMES_5 ",%20,%21,%22,%23"
#define AK_NAMES_7 AK_NAMES_6 ",%24,%25,%26,%27"
#define AK_NAMES_8 AK_NAMES_7 ",%28,%29,%30,%31"
#define AK_NAMES_9 AK_NAMES_8 ",%32,%33,%34,%35"
#define AK_NAMES_10 AK_NAMES_9 ",%36,%37,%38,%39"
#define AK_NAMES_11 AK_NAMES_10 ",%40,%41,%42,%43"
#define AK_NAMES_12 AK_NAMES_11 ",%44,%45,%46,%47"
#define AK_NAMES_13 AK_NAMES_12 ",%48,%49,%50,%51"
#define AK_NAMES_14 AK_NAMES_13 ",%52,%53,%54,%55"
#define AK_NAMES_15 AK_NAMES_14 ",%56,%57,%58,%59"
#define AK_NAMES_16 AK_NAMES_15 ",%60,%61,%62,%63"
#define AK_NAMES_17 AK_NAMES_16 ",%64,%65,%66,%67"
#define AK_NAMES_18 AK_NAMES_17 ",%68,%69,%70,%71"
#define AK_NAMES_19 AK_NAMES_18 ",%72,%73,%74,%75"
#define AK_NAMES_20 AK_NAMES_19 ",%76,%77,%78,%79"
#define AK_NAMES_21 AK_NAMES_20 ",%80,%81,%82,%83"
#define AK_NAMES_22 AK_NAMES_21 ",%84,%85,%86,%87"
#define AK_NAMES_23 AK_NAMES_22 ",%88,%89,%90,%91"
#define AK_NAMES_24 AK_NAMES_23 ",%92,%93,%94,%95"
#define AK_NAMES_25 AK_NAMES_24 ",%96,%97,%98,%99"
#define AK_NAMES_26 AK_NAMES_25 ",%100,%101,%102,%103"
#define AK_NAMES_27 AK_NAMES_26 ",%104,%105,%106,%107"
#define AK_NAMES_28 AK_NAMES_27 ",%108,%109,%110,%111"
#define AK_NAMES_29 AK_NAMES_28 ",%112,%113,%114,%115"
#define AK_NAMES_30 AK_NAMES_29 ",%116,%117,%118,%119"
#define AK_NAMES_31 AK_NAMES_30 ",%120,%121,%122,%123"
#define AK_NAMES_32 AK_NAMES_31 ",%124,%125,%126,%127"
#define AK_OUTPUTS_1 AK_OUTPUT_4(0)
#define AK_OUTPUTS_2 AK_OUTPUTS_1, AK_OUTPUT_4(4)
#define AK_OUTPUTS_3 AK_OUTPUTS_2, AK_OUTPUT_4(8)
#define AK_OUTPUTS_4 AK_OUTPUTS_3, AK_OUTPUT_4(12)
#define AK_OUTPUTS_5 AK_OUTPUTS_4, AK_OUTPUT_4(16)
#define AK_OUTPUTS_6 AK_OUTPUTS_5, AK_OUTPUT_4(20)
#define AK_OUTPUTS_7 AK_OUTPUTS_6, AK_OUTPUT_4(24)
#define AK_OUTPUTS_8 AK_OUTPUTS_7, AK_OUTPUT_4(28)
#define AK_OUTPUTS_9 AK_OUTPUTS_8, AK_OUTPUT_4(32)
#define AK_OUTPUTS_10 AK_OUTPUTS_9, AK_OUTPUT_4(36)
#define AK_OUTPUTS_11 AK_OUTPUTS_10, AK_OUTPUT_4(40)
#define AK_OUTPUTS_12 AK_OUTPUTS_11, AK_OUTPUT_4(44)
#define AK_OUTPUTS_13 AK_OUTPUTS_12, AK_OUTPUT_4(48)
#define AK_OUTPUTS_14 AK_OUTPUTS_13, AK_OUTPUT_4(52)
#define AK_OUTPUTS_15 AK_OUTPUTS_14, AK_OUTPUT_4(56)
#define AK_OUTPUTS_16 AK_OUTPUTS_15, AK_OUTPUT_4(60)
#define AK_OUTPUTS_17 AK_OUTPUTS_16, AK_OUTPUT_4(64)
#define AK_OUTPUTS_18 AK_OUTPUTS_17, AK_OUTPUT_4(68)
#define AK_OUTPUTS_19 AK_OUTPUTS_18, AK_OUTPUT_4(72)
#define AK_OUTPUTS_20 AK_OUTPUTS_19, AK_OUTPUT_4(76)
#define AK_OUTPUTS_21 AK_OUTPUTS_20, AK_OUTPUT_4(80)
#define AK_OUTPUTS_22 AK_OUTPUTS_21, AK_OUTPUT_4(84)
#define AK_OUTPUTS_23 AK_OUTPUTS_22, AK_OUTPUT_4(88)
#define AK_OUTPUTS_24 AK_OUTPUTS_23, AK_OUTPUT_4(92)
#define AK_OUTPUTS_25 AK_OUTPUTS_24, AK_OUTPUT_4(96)
#define AK_OUTPUTS_26 AK_OUTPUTS_25, AK_OUTPUT_4(100)
#define AK_OUTPUTS_27 AK_OUTPUTS_26, AK_OUTPUT_4(104)
#define AK_OUTPUTS_28 AK_OUTPUTS_27, AK_OUTPUT_4(108)
#define AK_OUTPUTS_29 AK_OUTPUTS_28, AK_OUTPUT_4(112)
#define AK_OUTPUTS_30 AK_OUTPUTS_29, AK_OUTPUT_4(116)
#define AK_OUTPUTS_31 AK_OUTPUTS_30, AK_OUTPUT_4(120)
#define AK_OUTPUTS_32 AK_OUTPUTS_31, AK_OUTPUT_4(124)

// a, b, p, ta and tb are the names of the operands after the accumulators.
#define AK_WGMMA_TEXT(n, type, j, a, b, p, ta, tb)                                                                  \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " p                                                                             \
  ", 0;\n"                                                                                                          \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" AK_NAMES_##j "}, " a ", " b ", p, 1, 1, " ta \
                                                                                    ", " tb ";\n}\n"

#define AK_WGMMA(n, j, a, b, p, ta, tb)                                                                \
  template <class T, int kTransposeA, int kTransposeB>                                                 \
  AK_DEVICE void wgmma_instance(float (&d)[n / 2], uint64_t desc_a, uint64_t desc_b, int accumulate) { \
    if constexpr (std::is_same_v<T, bf16>) {                                                           \
      asm volatile(AK_WGMMA_TEXT(n, "bf16", j, a, b, p, ta, tb)                                        \
                   : AK_OUTPUTS_##j                                                                    \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));   \
    } else {                                                                                           \
      static_assert(std::is_same_v<T, fp16>, "wgmma takes fp16 or bf16");                              \
      asm volatile(AK_WGMMA_TEXT(n, "f16", j, a, b, p, ta, tb)                                         \
                   : AK_OUTPUTS_##j                                                                    \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));   \
    }                                                                                                  \
  }

namespace ak::detail {

AK_WGMMA(16, 2, "%8", "%9", "%10", "%11", "%12")
AK_WGMMA(32, 4, "%16", "%17", "%18", "%19", "%20")
AK_WGMMA(64, 8, "%32", "%33", "%34", "%35", "%36")
AK_WGMMA(80, 10, "%40", "%41", "%42", "%43", "%44")
AK_WGMMA(128, 16, "%64", "%65", "%66", "%67", "%68")
AK_WGMMA(144, 18, "%72", "%73", "%74", "%75", "%76")
AK_WGMMA(160, 20, "%80", "%81", "%82", "%83", "%84")
AK_WGMMA(176, 22, "%88", "%89", "%90", "%91", "%92")
AK_WGMMA(192, 24, "%96", "%97", "%98", "%99", "%100")
AK_WGMMA(208, 26, "%104", "%105", "%106", "%107", "%108")
AK_WGMMA(256, 32, "%128", "%129", "%130", "%131", "%132")

}  // namespace ak::detail

#undef AK_WGMMA
#undef AK_WGMMA_TEXT

namespace ak {

/// d = A B, or d += A B if `accumulate`, for operands of type T (fp16 or bf16). N = 2 * kRegisters.
template <class T, Major kA, Major kB, int kRegisters>
AK_DEVICE void wgmma(float (&d)[kRegisters], uint64_t desc_a, uint64_t desc_b, bool accumulate) {
  detail::wgmma_instance<T, kA == Major::kMN, kB == Major::kMN>(d, desc_a, desc_b, accumulate);
}

}  // namespace ak
