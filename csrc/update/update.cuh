// Shared by the optimizer kernels: storage and rounding of weights, and the average of the weights.
//
// One launch serves tensors of many dtypes. A loop for each combination of gradient, moments and weight would be a
// hundred loops; instead a conversion is selected at run time (uniformly for a block; the kernel is bandwidth-bound, so
// the branch is free), and only the kinds of weight have loops of their own. The order is always: fetch everything,
// then convert. A conversion waits for its load, so a load issued after one would wait too, and memory would idle.
#pragma once
#include "base/half.h"
#include "base/permute_bytes.h"
#include "base/philox.h"
#include "base/rounding.h"
#include "base/split_master.h"
#include "device/memory.cuh"
#include "device/tensor_list.cuh"
#include "device/warp.cuh"
#include "update/elements.cuh"
#include "update/ema.h"
#include "update/update.h"

namespace ak {

/// Storage of a tensor's weights: `main` is read and written; `second` depends on the kind.
enum class WeightKind : uint8_t {
  kFp32,          ///< main: fp32
  kFp32CopyFp16,  ///< main: fp32; second: an fp16 copy, written only (the weight of an fp32 master, or the shadow of an
                  ///< fp32 weight)
  kFp32CopyBf16,  ///< the same with a bf16 copy
  kFp16,          ///< main: fp16, its own master
  kBf16,          ///< main: bf16, its own master
  kSplitFp16,     ///< main: fp16 weight; second: 16-bit remainder, read and written
  kSplitBf16,     ///< main: bf16 weight; second: 16-bit remainder, read and written
  kSplit24Fp16,   ///< main: fp16 weight; second: 8-bit remainder; rounded stochastically to 24 bits
  kSplit24Bf16,   ///< main: bf16 weight; second: 8-bit remainder; rounded stochastically to 24 bits
  kStochasticFp16,  ///< main: fp16, its own master, rounded stochastically
  kStochasticBf16,  ///< main: bf16, its own master, rounded stochastically
};

AK_HD bool rounds_stochastically(WeightKind kind) { return kind >= WeightKind::kSplit24Fp16; }

/// Kind and addresses of a weight.
struct WeightPlace {
  WeightKind kind;
  void *main, *second;

  bool stochastic() const { return rounds_stochastically(kind); }
};

inline WeightPlace weight_place(const Param& p) {
  const bool half = p.param_dtype == DType::kFloat16;
  auto of_copy = [](bool is_fp16) { return is_fp16 ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16; };
  if (p.master_kind == Master::kFloat32) return {of_copy(half), p.master, p.param};
  if (p.master_kind == Master::kSplit)
    return {half ? WeightKind::kSplitFp16 : WeightKind::kSplitBf16, p.param, p.master};
  if (p.master_kind == Master::kSplit24)
    return {half ? WeightKind::kSplit24Fp16 : WeightKind::kSplit24Bf16, p.param, p.master};
  if (p.shadow != nullptr) return {of_copy(p.shadow_dtype == DType::kFloat16), p.param, p.shadow};
  if (p.param_dtype == DType::kFloat32) return {WeightKind::kFp32, p.param, nullptr};
  if (p.stochastic) return {half ? WeightKind::kStochasticFp16 : WeightKind::kStochasticBf16, p.param, nullptr};
  return {half ? WeightKind::kFp16 : WeightKind::kBf16, p.param, nullptr};
}

/// The key of a parameter's random bits. With the number of an element it decides them, whatever the launch. `Seed`: a
/// number, or a reference to its PhiloxKeys.
template <class Seed>
struct RoundingKey {
  Seed seed;
  uint32_t step;
  RandomPlace place;
};

/// The random numbers, times kScale, of one value of elements i .. i + V - 1 (base/philox.h): eight, aligned to eight,
/// share one call of Philox. A thread that needs them for several values makes the call once.
template <uint32_t kScale = 1, class Seed, int V>
AK_DEVICE void random_numbers(const RoundingKey<Seed>& key, int value, int64_t i, uint32_t (&random)[V]) {
  const uint64_t group = key.place.group(static_cast<uint64_t>(i) / 8);
  const Philox4 bits = rounding_bits(key.seed, key.step, key.place.index, group);
  if constexpr (V == 8) {
    AK_UNROLL
    for (int j = 0; j < 8; j++) random[j] = random16<kScale>(bits, j, value);
  } else {
    random[0] = 0;
    AK_UNROLL
    for (int j = 0; j < 8; j++)  // an index would need local memory
      random[0] = i % 8 == j ? random16<kScale>(bits, j, value) : random[0];
  }
}

/// The same of Fours. Two lanes have halves of the same two octets: each makes the call for one of them and hands over
/// the other lane's words. Called by all lanes of a warp.
template <uint32_t kScale = 1, class Seed>
AK_DEVICE void random_numbers(const RoundingKey<Seed>& key, int value, Fours i, uint32_t (&random)[8]) {
  const bool odd = (i & 4) != 0;
  const uint64_t group = key.place.group(static_cast<uint64_t>(i + (odd ? Fours::kApart : 0)) / 8);
  const Philox4 bits = rounding_bits(key.seed, key.step, key.place.index, group);
  Philox4 own;
  AK_UNROLL
  for (int k = 0; k < 2; k++) {
    const uint32_t lower = bits.word[k ^ value], upper = bits.word[(2 + k) ^ value];
    const uint32_t kept = odd ? upper : lower, other = shuffle_xor(odd ? lower : upper, 1);
    own.word[k] = odd ? other : kept;
    own.word[2 + k] = odd ? kept : other;
  }
  AK_UNROLL
  for (int j = 0; j < 8; j++) random[j] = random16<kScale>(own, j, 0);
}

// A weight class has Raw<V>, fetch, decode and store, for the V elements at i.

/// A weight stored as one T (fp32, fp16 or bf16).
template <class T>
struct PlainWeight {
  template <int V>
  using Raw = Vec<T, V>;

  template <int V, class At>
  static AK_DEVICE Raw<V> fetch(const void* main, const void*, At i) {
    return load_at<V, At>(static_cast<const T*>(main) + i);
  }
  template <int V>
  static AK_DEVICE void decode(const Raw<V>& raw, float (&x)[V]) {
    AK_UNROLL
    for (int j = 0; j < V; j++) x[j] = to_float(raw[j]);
  }
  template <int V, class At, class Key>
  static AK_DEVICE void store(void* main, void*, At i, const float (&x)[V], const Key&) {
    store_rounded<T>(main, i, x);
  }
};

/// A 16-bit weight that is rounded stochastically.
template <class T>
struct StochasticWeight : PlainWeight<T> {
  template <int V, class At, class Key>
  static AK_DEVICE void store(void* main, void*, At i, const float (&x)[V], const Key& key) {
    uint32_t random[V];
    random_numbers(key, 0, i, random);
    Vec<T, V> v;
    AK_UNROLL
    for (int j = 0; j < V; j++) v[j] = round_stochastic<T>(x[j], random[j]);
    store_at<At>(static_cast<T*>(main) + i, v);
  }
};

/// An fp32 weight with a T copy, which is only written.
template <class T>
struct CopiedWeight : PlainWeight<float> {
  template <int V, class At, class Key>
  static AK_DEVICE void store(void* main, void* second, At i, const float (&x)[V], const Key&) {
    store_rounded<float>(main, i, x);
    store_rounded<T>(second, i, x);
  }
};

/// An fp32 weight split into a T and a 16-bit remainder (base/split_master.h), or an 8-bit one.
template <class T, class Remainder = int16_t>
struct SplitWeight {
  template <int V>
  struct Raw {
    Vec<T, V> weight;
    Vec<Remainder, V> remainder;
  };

  template <int V, class At>
  static AK_DEVICE Raw<V> fetch(const void* main, const void* second, At i) {
    return {load_at<V, At>(static_cast<const T*>(main) + i), load_at<V, At>(static_cast<const Remainder*>(second) + i)};
  }
  template <int V>
  static AK_DEVICE void decode(const Raw<V>& raw, float (&x)[V]) {
    AK_UNROLL
    for (int j = 0; j < V; j++) x[j] = join_master(raw.weight[j], raw.remainder[j]);
  }
  template <int V, class At, class Key>
  static AK_DEVICE void store(void* main, void* second, At i, const float (&x)[V], const Key& key) {
    constexpr bool k24 = sizeof(Remainder) == 1;
    uint32_t random[V];
    if constexpr (k24) random_numbers(key, 0, i, random);
    Raw<V> raw;
    AK_UNROLL
    for (int j = 0; j < V; j++) {
      const SplitMaster<T> split = k24 ? split_master24<T>(x[j], random[j] & 0xffu) : split_master<T>(x[j]);
      raw.weight[j] = split.weight;
      raw.remainder[j] = static_cast<Remainder>(k24 ? split.remainder >> 8 : split.remainder);
    }
    store_at<At>(static_cast<T*>(main) + i, raw.weight);
    store_at<At>(static_cast<Remainder*>(second) + i, raw.remainder);
  }
};

/// SplitWeight<bf16, int8_t>, eight elements at a time by the bytes of their words: the same bits.
struct SplitWeight24 : SplitWeight<bf16, int8_t> {
  struct Words {
    Vec<uint32_t, 4> weight;
    Vec<uint32_t, 2> remainder;
  };

  template <int V, class At>
  static AK_DEVICE auto fetch(const void* main, const void* second, At i) {
    if constexpr (V == 8) {
      const auto* weight = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(main) + i);
      const auto* remainder = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(second) + i);
      return Words{load_at<4, At>(weight), load_at<2, At>(remainder)};
    } else {
      return SplitWeight::fetch<V>(main, second, i);
    }
  }
  using SplitWeight::decode;
  static AK_DEVICE void decode(const Words& raw, float (&x)[8]) {
    uint32_t crossed = 0;
    AK_UNROLL
    for (int w = 0; w < 2; w++) {
      // A byte with its sign flipped, less 0x80, is itself with its sign extended. Each has a byte of zeros below.
      const uint32_t flipped = raw.remainder[w] ^ 0x80808080u;
      const uint32_t even = permute_bytes(flipped, 0, 0x2404), odd = permute_bytes(flipped, 0, 0x3414);
      AK_UNROLL
      for (int j = 0; j < 4; j++) {
        const uint32_t selector = 0x5410 + j / 2 * 0x22 + j % 2 * 0x2200;
        const uint32_t above = permute_bytes(j % 2 == 0 ? even : odd, raw.weight[2 * w + j / 2], selector);
        const uint32_t code = above - 0x8000u;
        crossed |= above ^ code;
        x[4 * w + j] = float_of(code);
      }
    }
    if (crossed >> 31 == 0) return;
    AK_UNROLL
    for (int j = 0; j < 8; j++) {  // a zero with a negative remainder stays zero
      const uint32_t above = bits_of(x[j]) + 0x8000u;
      if ((above ^ bits_of(x[j])) >> 31 != 0) x[j] = float_of(above & 0x80000000u);
    }
  }

  template <int V, class At, class Key>
  static AK_DEVICE void store(void* main, void* second, At i, const float (&x)[V], const Key& key) {
    if constexpr (V == 8) {
      uint32_t random[V];
      random_numbers(key, 0, i, random);
      const Words raw = encode(x, random);
      store_at<At>(reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(main) + i), raw.weight);
      store_at<At>(reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(second) + i), raw.remainder);
    } else {
      SplitWeight::store(main, second, i, x, key);
    }
  }

 private:
  static AK_DEVICE Words encode(const float (&number)[8], const uint32_t (&random)[8]) {
    float x[8], sum = 0.0f;
    AK_UNROLL
    for (int j = 0; j < 8; j++) x[j] = number[j];
    AK_UNROLL
    for (int j = 0; j < 8; j += 2) sum = fma(x[j], x[j + 1], sum);
    if (sum != sum) {  // one may be NaN
      AK_UNROLL
      for (int j = 0; j < 8; j++) x[j] = x[j] != x[j] ? float_of(0x7fc00000u) : x[j];
    }
    uint32_t rounded[8];  // half away from zero
    Words raw;
    AK_UNROLL
    for (int j = 0; j < 8; j++) rounded[j] = bits_of(x[j]) + (random[j] & 0xffu) + 0x8000u;
    AK_UNROLL
    for (int w = 0; w < 4; w++) raw.weight[w] = permute_bytes(rounded[2 * w], rounded[2 * w + 1], 0x7632);
    AK_UNROLL
    for (int w = 0; w < 2; w++) {
      const uint32_t* four = rounded + 4 * w;
      const uint32_t low = permute_bytes(four[0], four[1], 0x51), high = permute_bytes(four[2], four[3], 0x51);
      raw.remainder[w] = permute_bytes(low, high, 0x5410) ^ 0x80808080u;
    }
    return raw;
  }
};

/// Calls `f` with the class of a weight that is rounded to nearest.
template <class F>
AK_DEVICE void with_nearest_weight(WeightKind kind, F f) {
  if (kind == WeightKind::kFp32) return f(PlainWeight<float>{});
  if (kind == WeightKind::kFp32CopyFp16) return f(CopiedWeight<fp16>{});
  if (kind == WeightKind::kFp32CopyBf16) return f(CopiedWeight<bf16>{});
  if (kind == WeightKind::kFp16) return f(PlainWeight<fp16>{});
  if (kind == WeightKind::kBf16) return f(PlainWeight<bf16>{});
  if (kind == WeightKind::kSplitFp16) return f(SplitWeight<fp16>{});
  if (kind == WeightKind::kSplitBf16) return f(SplitWeight<bf16>{});
}

/// Calls `f` with the class of a weight that is rounded stochastically.
template <class F>
AK_DEVICE void with_stochastic_weight(WeightKind kind, F f) {
  if (kind == WeightKind::kSplit24Bf16) return f(SplitWeight24{});
  if (kind == WeightKind::kSplit24Fp16) return f(SplitWeight<fp16, int8_t>{});
  if (kind == WeightKind::kStochasticFp16) return f(StochasticWeight<fp16>{});
  if (kind == WeightKind::kStochasticBf16) return f(StochasticWeight<bf16>{});
}

/// Calls `f` with the weight class of `kind`; without `kStochastic` there is no code for stochastic rounding.
template <bool kStochastic, class F>
AK_DEVICE void with_weight(WeightKind kind, F f) {
  if constexpr (kStochastic) {
    if (rounds_stochastically(kind)) return with_stochastic_weight(kind, f);
  }
  with_nearest_weight(kind, f);
}

/// Calls `f` with a weight class that reads weights of `kind`; copies and rounding do not matter here.
template <class F>
AK_DEVICE void with_weight_to_read(WeightKind kind, F f) {
  if (kind == WeightKind::kSplit24Bf16) return f(SplitWeight24{});
  switch (kind) {
    case WeightKind::kFp32:
    case WeightKind::kFp32CopyFp16:
    case WeightKind::kFp32CopyBf16:
      return f(PlainWeight<float>{});
    case WeightKind::kFp16:
    case WeightKind::kStochasticFp16:
      return f(PlainWeight<fp16>{});
    case WeightKind::kBf16:
    case WeightKind::kStochasticBf16:
      return f(PlainWeight<bf16>{});
    case WeightKind::kSplitFp16:
      return f(SplitWeight<fp16>{});
    case WeightKind::kSplitBf16:
      return f(SplitWeight<bf16>{});
    case WeightKind::kSplit24Fp16:
      return f(SplitWeight<fp16, int8_t>{});
    case WeightKind::kSplit24Bf16:
      break;
  }
  __builtin_unreachable();  // so that a weight needs no other value
}

/// Moves the average, fetched with the other operands, towards the new weights.
template <class At, int V>
AK_DEVICE void store_ema(float* ema, At i, Vec<float, V> average, const float (&weight)[V], float take) {
  AK_UNROLL
  for (int j = 0; j < V; j++) average[j] = ak::ema(average[j], weight[j], take);
  store_at<At>(ema + i, average);
}

}  // namespace ak
