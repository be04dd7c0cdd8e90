// The plain form (update/cpu_plain8.h) with vectors of 512 bits, for groups of 64 elements.
//
// Work of AdamW: some 190 vector instructions for 64 elements, and 70 for their random bits. A group is encoded after
// the next one is updated: the maximum of a block is few instructions, but each waits for the one before.
#pragma once

#include <utility>

#include "update/cpu_plain8_formula.h"

#if AK_HAS_PLAIN8
#define AK_V4 __attribute__((target("arch=x86-64-v4")))
#define AK_V4_INLINE __attribute__((target("arch=x86-64-v4"), always_inline)) inline
#define AK_V4_LAMBDA __attribute__((target("arch=x86-64-v4"), always_inline))

namespace ak::plain8::avx512 {

inline constexpr int kGroup = 64, kVectors = 4, kBlocks = 2;  // elements; vectors and blocks of as many

// New values of 64 elements that are not stored yet.
template <int kMoments>
struct Group {
  __m512 weight[kVectors], moments[kMoments][kVectors];
  // Of moments 2 k and 2 k + 1: lanes of 128 bits for the first block of each, then for the second.
  __m512 scales[(kMoments + 1) / 2];
  __m128i exponents[(kMoments + 1) / 2];
  __mmask16 nan;
};

// A constant in a register or in memory: the compiler makes known ones anew in each round, by a slow broadcast.
AK_V4_INLINE __m512i constant(uint32_t x) {
  asm("" : "+r"(x));
  return _mm512_set1_epi32(static_cast<int>(x));
}
struct Constants {
  __m512i code_bits, upper, sign, least_code, round_up, nan;
};

// ---- decoding

// Numbers of a tile's blocks: what decoding adds to the codes of an unsigned block, and multiplies those of a signed
// one by. Returns the unsigned blocks that are NaN, a bit each.
template <class Code>
AK_V4_INLINE uint32_t first_numbers(const uint8_t* exponents, int64_t blocks, float* first) {
  static_assert(kTile / kBlock8 == 32);
  const __m256i bytes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(~0ull >> (64 - blocks)), exponents);
  for (int half = 0; half < 2; ++half) {
    const __m512i exponent =
        _mm512_cvtepu8_epi32(half == 0 ? _mm256_castsi256_si128(bytes) : _mm256_extracti128_si256(bytes, 1));
    const __m512i number =
        _mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(Code::kSigned ? 0 : Code::kTop)), 23);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(kBlock8NaN));
    _mm512_storeu_si512(first + 16 * half, _mm512_mask_mov_epi32(number, nan, _mm512_set1_epi32(0x7fc00000)));
  }
  return Code::kSigned ? 0 : _mm256_cmpeq_epi8_mask(bytes, _mm256_set1_epi8(static_cast<char>(kBlock8NaN)));
}

// A block of 32. A signed code has the fields of fp16, subnormals included.
template <class Code>
AK_V4_INLINE void decode_block(const Constants& c, const uint8_t* codes, float first, __m512* x) {
  if constexpr (Code::kSigned) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), c.code_bits);
    x[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_set1_ps(first));
    x[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), _mm512_set1_ps(first));
  } else {
    const __m512i base = _mm512_set1_epi32(static_cast<int>(bits_of(first)));
    for (int half = 0; half < 2; ++half) {
      const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * half));
      x[half] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(code), 20), base));
    }
  }
}

// ---- encoding

AK_V4_INLINE __m512i larger_magnitude(const __m512* x) {
  return _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(x[0])), _mm512_castps_si512(_mm512_abs_ps(x[1])));
}

// The larger of lanes of a and b: those that the lower and the upper half of `kOrder` name.
template <int kLower, int kUpper>
AK_V4_INLINE __m512i larger_lanes(__m512i a, __m512i b) {
  return _mm512_max_epu32(_mm512_shuffle_i64x2(a, b, kLower), _mm512_shuffle_i64x2(a, b, kUpper));
}

// In each pair of lanes, a and b.
AK_V4_INLINE __m512i in_lanes(uint32_t a, uint32_t b) {
  const int x = static_cast<int>(a), y = static_cast<int>(b);
  return _mm512_setr_epi32(x, x, x, x, y, y, y, y, x, x, x, x, y, y, y, y);
}

// The largest magnitudes of two moments' blocks, in the lanes of Group::scales; the same for the four numbers of a
// lane.
AK_V4_INLINE __m512i largest_of(const __m512* moment, const __m512* next) {
  const __m512i first = larger_lanes<0x44, 0xee>(larger_magnitude(moment), larger_magnitude(next)),
                second = larger_lanes<0x44, 0xee>(larger_magnitude(moment + 2), larger_magnitude(next + 2));
  __m512i largest = larger_lanes<0x88, 0xdd>(first, second);
  largest = _mm512_max_epu32(largest, _mm512_shuffle_epi32(largest, _MM_PERM_BADC));
  return _mm512_max_epu32(largest, _mm512_shuffle_epi32(largest, _MM_PERM_CDAB));
}

// Exponents and scales of two moments. `largest`: from largest_of.
template <class Code, class Next, int kMoments>
AK_V4_INLINE void find_exponents(const Constants& c, __m512i largest, Group<kMoments>& group, int pair) {
  // block8_exponent; a NaN becomes one of more than 8 bits
  const __m512i exponent = _mm512_max_epu32(_mm512_srli_epi32(_mm512_add_epi32(largest, c.round_up), 23),
                                            in_lanes(Code::kLeastExponent, Next::kLeastExponent));
  group.nan |= _mm512_cmpge_epu32_mask(exponent, c.nan);
  // Half of block8_scale: codes of kLeastCode and above begin at 2.
  group.scales[pair] = _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_sub_epi32(in_lanes(253 + Code::kTop, 253 + Next::kTop), exponent), 23));
  group.exponents[pair] = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(exponent), _mm_set1_epi32(0x0c040800));
}

struct Places {
  alignas(64) uint16_t at[32] = {};
};

// For vpermw: the numbers of a value (base/philox.h) for half a block, in the lower halves of 16 words.
template <int kValue, int kHalf>
inline constexpr Places kRandom = [] {
  Places places;
  for (int i = 0; i < 16; ++i) places.at[2 * i] = static_cast<uint16_t>((16 * kHalf + i) ^ 2 * kValue);
  return places;
}();
// For vpermt2w: the upper halves of 32 words.
inline constexpr Places kUpper = [] {
  Places places;
  for (int i = 0; i < 32; ++i) places.at[i] = static_cast<uint16_t>(2 * i + 1);
  return places;
}();

// The codes of a block in the lower bytes of 16-bit words. `wrong`: set where a code is below kLeastCode.
template <class Code, int kValue>
AK_V4_INLINE __m512i encode_block(const Constants& c, const __m512* x, __m512 scale, __m512i random, __mmask32& wrong) {
  const auto rounded = [&](__m512 value, const Places& places) AK_V4_LAMBDA {
    const __m512i wide = _mm512_castps_si512(_mm512_mul_ps(value, scale));
    const __m512i drawn = _mm512_maskz_permutexvar_epi16(0x55555555, _mm512_load_si512(places.at), random);
    return _mm512_add_epi32(_mm512_srli_epi32(wide, 4), drawn);
  };
  __m512i words = _mm512_permutex2var_epi16(rounded(x[0], kRandom<kValue, 0>), _mm512_load_si512(kUpper.at),
                                            rounded(x[1], kRandom<kValue, 1>));
  wrong |= _mm512_testn_epi16_mask(words, c.upper);  // below 2
  if constexpr (Code::kSigned) {
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    words = _mm512_ternarylogic_epi32(words, _mm512_srli_epi16(words, 4), c.sign, kOrAnd);
  }
  return _mm512_add_epi16(words, c.least_code);
}

// ---- the pass

// Calls f<m>() for m = 0 .. N - 1.
template <int N, class F>
AK_V4_INLINE void for_each_moment(const F& f) {
  [&]<int... m>(std::integer_sequence<int, m...>)
      AK_V4_LAMBDA { (f.template operator()<m>(), ...); }(std::make_integer_sequence<int, N>{});
}

// A tile of a parameter. `element`: the formula, element(weight, moments, gradient).
template <class Rule, bool kOptional, class Element>
struct Pass {
  static constexpr int kThere = kOptional ? Rule::kMoments : Rule::kRequiredMoments, kPairs = (kThere + 1) / 2;

  const Param& p;
  const int64_t at;
  float* const weights;
  const float* const grads;
  TileNumbers& numbers;
  const Element element;
  const Constants c{constant(0xbf80bf80),           constant(0x04000400), constant(0x00800080),
                    constant(kLeastCode * 0x10001), constant(0xfffff),    constant(kBlock8NaN)};
  const uint16_t* const random = numbers.of(0);
  uint8_t *codes[kThere], *exponents[kThere];
  alignas(64) float first[kThere][kTile / kBlock8];
  uint32_t nan = 0;  // old blocks, a bit each

  AK_V4_INLINE Pass(const Param& param, int64_t begin, int64_t n, float* weights, const float* grads,
                    TileNumbers& numbers, const Element& element)
      : p(param), at(begin), weights(weights), grads(grads), numbers(numbers), element(element) {
    for_each_moment<kThere>([&]<int m>() AK_V4_LAMBDA {
      codes[m] = static_cast<uint8_t*>(p.moments[m]) + at;
      exponents[m] = p.exponents[m] + at / kBlock8;
      nan |= first_numbers<CodeOf<Rule, m>>(exponents[m], n / kBlock8, first[m]);
    });
  }

  // True if the old moments of group i are.
  AK_V4_INLINE bool is_plain(int64_t i) const {
    bool plain = (nan >> i / kBlock8 & 3) == 0;
    for_each_moment<kThere>([&]<int m>() AK_V4_LAMBDA {
      if constexpr (!CodeOf<Rule, m>::kSigned) {
        plain &= _mm512_cmplt_epu8_mask(_mm512_loadu_si512(codes[m] + i), _mm512_set1_epi8(8)) == 0;
      }
    });
    return plain;
  }

  AK_V4_INLINE void prefetch(int64_t i) const {
    prefetch_lines(p.grad, bytes_of(p.grad_dtype), at + i);
    prefetch_lines(p.param, bytes_of(p.param_dtype), at + i);
    prefetch_lines(p.master, master_bytes(p.master_kind), at + i);
    for (int m = 0; m < kThere; ++m) prefetch_lines(p.moments[m], 1, at + i);
  }

  // The new values of group i, and what find_scales needs of them while it is in registers.
  AK_V4_INLINE void compute(int64_t i, Group<kThere>& group, __m512i (&largest)[kPairs]) const {
    __m512 moments[kThere][kVectors];
    for_each_moment<kThere>([&]<int m>() AK_V4_LAMBDA {
      for (int block = 0; block < kBlocks; ++block) {
        decode_block<CodeOf<Rule, m>>(c, codes[m] + i + kBlock8 * block, first[m][i / kBlock8 + block],
                                      moments[m] + 2 * block);
      }
    });
    for_each_moment<kVectors>([&]<int v>() AK_V4_LAMBDA {
      __m512 weight = _mm512_loadu_ps(weights + i + 16 * v);
      update_vector<Rule>(element, _mm512_loadu_ps(grads + i + 16 * v), weight, moments, v);
      group.weight[v] = weight;
    });
    for (int k = 0; k < kPairs; ++k) {
      largest[k] = largest_of(moments[2 * k], moments[2 * k + 1 < kThere ? 2 * k + 1 : 2 * k]);
    }
    std::memcpy(group.moments, moments, sizeof moments);
  }

  AK_V4_INLINE void find_scales(const __m512i (&largest)[kPairs], Group<kThere>& group) const {
    group.nan = 0;
    for_each_moment<kPairs>([&]<int k>() AK_V4_LAMBDA {
      constexpr int m = 2 * k, kNext = m + 1 < kThere ? m + 1 : m;
      find_exponents<CodeOf<Rule, m>, CodeOf<Rule, kNext>>(c, largest[k], group, k);
    });
  }

  // A group that is not NaN.
  AK_V4_INLINE void store(int64_t i, const Group<kThere>& group) const {
    __m512i words[kThere][kBlocks];
    __mmask32 wrong = 0;
    for_each_moment<kThere>([&]<int m>() AK_V4_LAMBDA {
      const __m512 scales = group.scales[m / 2];
      constexpr int kLane = 0x55 * (m % 2);
      words[m][0] = encode_block<CodeOf<Rule, m>, 1 + m>(
          c, group.moments[m], _mm512_shuffle_f32x4(scales, scales, kLane), _mm512_loadu_si512(random + i), wrong);
      words[m][1] = encode_block<CodeOf<Rule, m>, 1 + m>(c, group.moments[m] + 2,
                                                         _mm512_shuffle_f32x4(scales, scales, kLane + 0xaa),
                                                         _mm512_loadu_si512(random + i + kBlock8), wrong);
    });
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(weights + i + 16 * v, group.weight[v]);
    for_each_moment<kThere>([&]<int m>() AK_V4_LAMBDA {
      if (wrong != 0) [[unlikely]] {
        return store_moment(p, m, is_unsigned<Rule>(m), reinterpret_cast<const float*>(group.moments[m]), at + i,
                            kGroup, i, numbers);
      }
      for (int block = 0; block < kBlocks; ++block) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes[m] + i + kBlock8 * block),
                            _mm512_cvtepi16_epi8(words[m][block]));
      }
      const auto two = static_cast<uint16_t>(_mm_extract_epi16(group.exponents[m / 2], m % 2));
      std::memcpy(exponents[m] + i / kBlock8, &two, sizeof two);
    });
  }
};

// Elements [at, at + n) of a parameter, a tile at most and whole groups. Calls general(first, kGroup) for groups that
// are not plain, with places in the tile.
template <class Rule, bool kOptional, class Element, class General>
AK_V4 void update(const Param& p, int64_t at, int64_t n, float* weights, const float* grads, TileNumbers& numbers,
                  const Element& element, const General& general) {
  using Tile = Pass<Rule, kOptional, Element>;
  Tile tile(p, at, n, weights, grads, numbers, element);
  Group<Tile::kThere> groups[2];
  bool pending = false;
  for (int64_t i = 0; i <= n; i += kGroup) {  // one more for the last to be stored
    auto &now = groups[i / kGroup % 2], &before = groups[(i / kGroup + 1) % 2];
    const bool inside = i < n;
    if (inside) tile.prefetch(i);
    const bool plain = inside && tile.is_plain(i);
    __m512i largest[Tile::kPairs];
    if (plain) tile.compute(i, now, largest);
    if (pending) {
      if (before.nan == 0) [[likely]] {
        tile.store(i - kGroup, before);
      } else {
        general(i - kGroup, kGroup);
      }
    }
    pending = plain;
    if (plain) {
      tile.find_scales(largest, now);
    } else if (inside) {
      general(i, kGroup);
    }
  }
}

}  // namespace ak::plain8::avx512
#endif
