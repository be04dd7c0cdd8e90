"""Bugs in moments in 8 bits: in their format, the random bits, the kernel, its arguments and the list; and in 24-bit masters."""

from . import Mutant

TEST = "test_adamw"
FORMAT = "base/block8.h"
PHILOX = "base/philox.h"
CODES = "update/codes.cuh"
KERNEL = "update/update8.cuh"
ARGS = "update/arguments.cuh"
STEP = "update/step.cuh"
WEIGHTS = "update/update.cuh"

MUTANTS = [
    # ---- codes
    Mutant(CODES, "static_cast<const uint8_t*>(codes) + i));", "static_cast<const uint8_t*>(codes) + i / 16 * 8));", "codes of other elements are read"),
    Mutant(CODES, "raw.exponent = load(exponents + block8_of(i));", "raw.exponent = load(exponents);", "every block is read with the exponent of the first"),
    Mutant(CODES, "if (i % kBlock8 == 0) store(exponents + block8_of(i)", "if (i % kBlock8 == 0) store(exponents + block8_of(i) / 2 * 2", "an exponent goes to the neighbour block"),
    Mutant(CODES, "if (i % kBlock8 == 0) store", "if (i == 0) store", "only the first exponent is written"),
    Mutant(CODES, "if (i % kBlock8 == 0) store(exponents", "if (i % kBlock8 == 8) store(exponents", "another lane writes the exponent: at the end of a tensor none"),
    Mutant(CODES, "Vec<uint32_t, 2>{{raw.words[0], raw.words[1]}}", "Vec<uint32_t, 2>{{raw.words[1], raw.words[0]}}", "fours of codes are swapped"),
    Mutant(CODES, ">> 8 * (j % 4) & 0xffu", ">> 8 * (3 - j % 4) & 0xffu", "codes are read backwards"),
    Mutant(CODES, "constexpr int kLanes = kBlock8 / V;", "constexpr int kLanes = kBlock8 / V / 2;", "half of a block has its own exponent"),
    Mutant(CODES, "constexpr int kLanes = kBlock8 / V;", "constexpr int kLanes = 2 * kBlock8 / V;", "the exponent of two blocks"),
    Mutant(CODES, "constexpr int kLanes = kBlock8 / V;", "constexpr int kLanes = kBlock8 / 8;", "one by one, a block has many exponents"),
    Mutant(CODES, "largest = max_or_nan(largest, abs(x[j]));", "", "seven of eight do not count for the exponent"),
    Mutant(CODES, "largest = larger(largest, bits_of(x[j]));", "", "seven of eight second moments do not count for the exponent"),
    Mutant(CODES, "max_or_nan(largest, abs(x[j]))", "max_or_nan(largest, x[j])", "a negative value does not count for the exponent"),
    Mutant(CODES, "(all & kBlock8Upper) != 0", "true", "small values are encoded as if of the upper binades"),
    Mutant(CODES, "all &= wide[j] =", "all = wide[j] =", "the last of eight decides for all"),
    Mutant(CODES, "raw.normal ? 0x08080808u : 0u", "0u", "codes of the upper binades lack their 8"),
    Mutant(CODES, "wide[4 * w + j] * 16 + random[4 * w + j]", "wide[4 * w + j] * 16 + kNearest16 * 256", "to nearest"),
    Mutant(CODES, "raw.exponent, random[0] / 256);", "raw.exponent, kNearest16);", "one by one, to nearest"),
    Mutant(CODES, "raw.exponent, random[0] / 256);", "raw.exponent, random[0]);", "one by one, a number times 256"),
    Mutant(CODES, "16 + random[4 * w + j]", "16 + random[j]", "eight elements share four numbers"),
    Mutant(CODES, "bits_of(four[3])) & sign;", "bits_of(four[3])) & 0u;", "signs are dropped"),
    Mutant(CODES, "raw.exponent == kBlock8NaN ? 0 : block8_wide", "false ? 0 : block8_wide", "a block that is NaN keeps codes"),
    Mutant("update/rule.h", "UnsignedCode8, SignedCode8>", "SignedCode8, SignedCode8>", "the second moment has a sign"),
    # ---- the kernel
    Mutant(KERNEL, "random_numbers<256>(key, 1 + m, i, random);", "random_numbers<256>(key, 1, i, random);", "both moments have the same random bits"),
    Mutant(KERNEL, "random_numbers<256>(key, 1 + m, i, random);", "random_numbers<256>(key, m, i, random);", "the first moment has the random bits of the weight"),
    Mutant(KERNEL, "warp_sync(); // other lanes may have read", "// other lanes may have read", "nothing orders the reads of eight elements before the writes of one",
           missed="here all gradients are finite; tests/ops/test_moments8.py has others and catches it"),
    Mutant(KERNEL, "if constexpr (kStores) warp_sync();", "", "nothing orders the reads of an exponent before its write"),
    Mutant(KERNEL, "warp_sync(); // every lane of a block has read", "// every lane of a block has read", "the same in a plain step"),
    Mutant(KERNEL, "small &= V == 1 ||", "small &= true ||", "large moments are read as small ones", missed="the host decodes both by one formula"),
    Mutant(KERNEL, "if (warp_any(!(fits && share.are_normal()))) return false;", "warp_any(!(fits && share.are_normal()));", "a plain step of any moments", missed="its values are normal; tests/ops/test_moments8.py has others and catches it"),
    Mutant(KERNEL, "if (warp_any(!(fits && share.are_normal()))) return false;", "if (!(fits && share.are_normal())) return false;", "lanes take different ways"),
    Mutant(KERNEL, "t.ema == nullptr && Rule::is_plain", "Rule::is_plain", "a plain step leaves the average as it is", missed="its plain steps have no average; tests/ops/test_moments8.py has one and catches it"),
    Mutant(KERNEL, "(row.inv_scale == 1.0f || row.clip == 1.0f) &&", "", "a plain step drops one of two factors"),
    Mutant("update/rules/adamw.h", "s.l2 == 0.0f && !s.cautious", "!s.cautious", "a plain step drops the coupled decay"),
    Mutant("update/rules/adamw.h", "s.l2 == 0.0f && !s.cautious", "s.l2 == 0.0f", "a plain step is not cautious"),
    Mutant("update/normal_numbers.cuh", "fma(fma(-root, root, x), 0.5f * reciprocal, root)", "root", "a root that is not corrected"),
    Mutant("update/normal_numbers.cuh", "x + 0x1p-126f", "x", "the root of 0 is NaN", missed="its values are normal; tests/ops/test_moments8.py has others and catches it"),
    Mutant("update/normal_numbers.cuh", "fma(reciprocal, fma(-b, quotient, a), quotient)", "quotient", "a quotient that is not corrected"),
    Mutant(KERNEL, "if (kStores && inside) store_codes", "if (kStores) store_codes", "lanes without an element write codes"),
    Mutant(KERNEL, "if (!inside) return; RawElements", "RawElements", "lanes without an element read"),
    Mutant(KERNEL, "span.count / kWarp * kWarp", "span.count / 8 * 8", "a part of a warp takes eights"),
    Mutant(KERNEL, "aligned ? span.count / kWarp * kWarp : 0", "span.count / kWarp * kWarp", "unaligned tensors take eights"),
    Mutant(KERNEL, "left + kBlock8 - 1 : kWarp", "left : kWarp", "the last block is left out"),
    Mutant(KERNEL, "(i + j, j < left);", "(i + j, true);", "elements beyond the end"),
    Mutant(KERNEL, "if (skipped(decisions)) return; ListWalk", "ListWalk", "a skipped step writes codes and exponents"),
    Mutant(KERNEL, "exponents[m][place] = p.exponents[m];", "exponents[m][place] = p.exponents[0];", "the second moment has the exponents of the first"),
    Mutant(KERNEL, "decode_code<CodeOf<Rule, m>>(raw[m], j);", "decode_code<CodeOf<Rule, 0>>(raw[m], j);", "the second moment is read as a first"),
    Mutant(KERNEL, "if (t.moments[Rule::kRequiredMoments] != nullptr) {", "if (false) {", "optional moments are left out"),
    Mutant(KERNEL, "effective_grad(share.grad[j], row.inv_scale, row.clip)", "share.grad[j]", "does not unscale"),
    Mutant(KERNEL, "if (t.ema != nullptr) store_ema", "if (false) store_ema", "the average stays"),
    # ---- the list
    Mutant(KERNEL, "return p.in_8_bits();", "return true;", "takes parameters with other moments"),
    Mutant(ARGS, "return !p.in_8_bits();", "return true;", "update_kernel takes parameters in 8 bits"),
    Mutant(STEP, "if (p.in_8_bits()) return false;", "", "a parameter in 8 bits selects the kernel with extras for the others",
           missed="the same results, with more registers"),
    # ---- the random bits
    Mutant(PHILOX, "bits.word[lane >> 1 ^ value]", "bits.word[lane >> 1]", "all values of an element have the same bits"),
    Mutant(PHILOX, ">> 16 * (lane & 1) & 0xffffu", "& 0xffffu", "two elements have the same bits"),
    Mutant(PHILOX, "static_cast<uint32_t>(group >> 32), param", "0, param", "pieces beyond 2^35 elements repeat the bits of the first"),
    Mutant(PHILOX, "return first + q + uint64_t", "return q + uint64_t", "a piece has the random bits of the beginning"),
    Mutant(STEP, "args.random[i] = p.random;", "args.random[i] = {0, p.random.index, 0, 0, 0};", "the piece's place is dropped"),
    Mutant(STEP, "row.random = args.random[i];", "row.random = args.random[0];", "the place of the first of the list"),
    Mutant(PHILOX, ">> 32) >> shift} * gap", ">> 32) >> shift} * 0", "a column piece has the random bits of consecutive elements"),
    Mutant(PHILOX, ">> 32) >> shift} * gap", ">> 32)} * gap", "the quotient of a width of 4 and more is too large"),
    Mutant(PHILOX, "uint64_t{static_cast<uint32_t>(product >> 32) >> shift} * gap", "(static_cast<uint32_t>(product >> 32) >> shift) * gap", "rows beyond 2^32 groups wrap around"),
    Mutant(PHILOX, "+ width - 1) / width;", ") / width;", "the reciprocal is rounded down: the first of a row counts for the row before"),
    Mutant(PHILOX, "std::bit_width(width - 1)) - 1;", "std::bit_width(width)) - 1;", "a power of two has a reciprocal of 0"),
    Mutant(PHILOX, "pitch - width, static_cast", "pitch, static_cast", "the gap is a whole row"),
    # ---- 24-bit masters
    Mutant(WEIGHTS, "random[j] & 0xffu", "0x80u", "a 24-bit master is rounded to nearest"),
    Mutant(WEIGHTS, "k24 ? split.remainder >> 8 : split.remainder", "split.remainder", "the lower byte is stored"),
    Mutant(WEIGHTS, "if constexpr (k24) random_numbers(key, 0, i, random);", "if constexpr (k24) random_numbers(key, 1, i, random);", "the random bits of the first moment"),
    Mutant(WEIGHTS, "half ? WeightKind::kSplit24Fp16 : WeightKind::kSplit24Bf16", "WeightKind::kSplit24Bf16", "an fp16 24-bit master is taken for bf16"),
]  # fmt: skip
