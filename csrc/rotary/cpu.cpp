// rotary_forward and rotary_backward on the CPU.
//
// Work: reads each head once and writes it once; backward of a norm also reads the heads, in addition to their
// gradients. Plan: a token at a time, whose cosines and signed sines are brought into the order of pairs once for all
// of its heads. Heads are independent; gradients of the weights are summed in strips of tokens
// (base/cpu/column_sums.h): the same bits for any number of threads.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "base/cpu/chunks.h"
#include "base/cpu/column_sums.h"
#include "base/cpu/row_sums.h"
#include "base/cpu/tile.h"
#include "rotary/call.h"

namespace ak {
namespace {

constexpr int kMaxPairs = kMaxHeadWidth / 2;
using HeadBuffer = float[kMaxHeadWidth];

struct Turns {
  alignas(64) float cos[2][kMaxPairs], sin[2][kMaxPairs];
};

// ---- a token

Turns turns_of(const Rotary& p, int64_t batch, int64_t token, bool transposed) {
  alignas(64) HeadBuffer cos_buffer, sin_buffer;
  const int64_t at = batch * p.angle_batch + token * p.rotary;
  const float* cos = load_tile(p.cos, p.angle_type, at, p.rotary, cos_buffer);
  const float* sin = load_tile(p.sin, p.angle_type, at, p.rotary, sin_buffer);
  const int pairs = p.rotary / 2, step = p.interleaved ? 2 : 1, apart = p.interleaved ? 1 : pairs;
  Turns turns;
  for (int i = 0; i < pairs; ++i) {
    const int first = i * step, second = first + apart;
    const PairSines sines = pair_sines(sin[first], sin[second], transposed);
    turns.cos[0][i] = cos[first], turns.cos[1][i] = cos[second];
    turns.sin[0][i] = sines.first, turns.sin[1][i] = sines.second;
  }
  return turns;
}

// The weights of the norm, of queries and keys.
struct Weights {
  alignas(64) float of[2][kMaxHeadWidth];

  explicit Weights(const Rotary& p) {
    for (int side = 0; side < 2; ++side) {
      if (!p.sides[side].weight) return;
      const float* values = load_tile(p.sides[side].weight, p.weight_type, 0, p.width, of[side]);
      if (values != of[side]) std::copy_n(values, p.width, of[side]);
    }
  }
};

// ---- a head

// `out` does not alias x.
template <bool kInterleaved>
AK_SIMD_CLONES void turn_head(const float* __restrict x, const Turns& turns, int rotary, int width,
                              float* __restrict out) {
  const int pairs = rotary / 2;
  for (int i = 0; i < pairs; ++i) {
    const int first = kInterleaved ? 2 * i : i, second = kInterleaved ? first + 1 : first + pairs;
    out[first] = turned(x[first], x[second], turns.cos[0][i], turns.sin[0][i]);
    out[second] = turned(x[second], x[first], turns.cos[1][i], turns.sin[1][i]);
  }
  for (int i = rotary; i < width; ++i) out[i] = x[i];
}
void turn_head(const Rotary& p, const float* x, const Turns& turns, float* out) {
  (p.interleaved ? turn_head<true> : turn_head<false>)(x, turns, p.rotary, p.width, out);
}

float dot(const float* a, const float* b, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    const auto product = [](float x, float y) AK_ALWAYS_INLINE { return x * y; };
    const auto terms = [=](int64_t i, Floats& t) AK_ALWAYS_INLINE {
      Floats other;
      load_floats(a + i, t), load_floats(b + i, other);
      t = of_lanes(product, t, other);
    };
    return sum_of_lanes<Floats>(n, terms,
                                [=](int64_t i, float* rest) AK_ALWAYS_INLINE { make_rest(i, n, rest, product, a, b); });
  });
}

float deviation_of(const float* x, int n, float eps) {
  const float count = static_cast<float>(n), square = dot(x, x, n) / count;
  if (is_finite(square)) [[likely]]
    return reciprocal_deviation(square, eps, 1.0f);
  HeadBuffer small;
  for (int i = 0; i < n; ++i) small[i] = x[i] * kShrink;
  return reciprocal_deviation(dot(small, small, n) / count, eps, kShrink);
}

AK_SIMD_CLONES void norm_head(const float* __restrict x, float rstd, const float* __restrict weight, int n,
                              float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = normed(x[i], rstd, weight[i]);
}

// n = the normalized x; g, the gradient of n * weight, becomes that of n. Adds to the gradient of the weight.
AK_SIMD_CLONES void weight_gradient(const float* __restrict x, float rstd, const float* __restrict weight, int width,
                                    float* __restrict n, float* __restrict g, float* __restrict of_weight) {
  for (int i = 0; i < width; ++i) {
    n[i] = normalized(x[i], 0.0f, rstd);
    of_weight[i] += g[i] * n[i];
    g[i] *= weight[i];
  }
}
AK_SIMD_CLONES void head_gradient(const float* __restrict g, const float* __restrict n, float rstd, float mean_gn,
                                  int width, float* __restrict out) {
  for (int i = 0; i < width; ++i) out[i] = norm_gradient(g[i], n[i], rstd, 0.0f, mean_gn);
}

// make(out) writes a head of floats, which is rounded to its place.
template <typename Make>
void make_head(const Rotary& p, const RotaryHeads& side, int64_t row, int head, const Make& make) {
  const int64_t at = (row * side.heads + head) * p.width;
  with_narrow_dtype(p.out_type, [&]<typename Out>(Out) {
    alignas(64) HeadBuffer tile;
    make_rounded(static_cast<Out*>(side.out) + at, tile, p.width, make);
  });
}

// ---- tokens [begin, end) of all batches

// With weights never transposed.
void turn_tokens(const Rotary& p, bool transposed, int64_t begin, int64_t end) {
  const Weights weights(p);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t batch = row / p.tokens, token = row % p.tokens;
    const Turns turns = turns_of(p, batch, token, transposed);
    for (int s = 0; s < 2; ++s) {
      const RotaryHeads& side = p.sides[s];
      for (int head = 0; head < side.heads; ++head) {
        alignas(64) HeadBuffer buffer, y;
        const float* x = load_tile(side.in.data, p.in_type, side.in.at(batch, token, head), p.width, buffer);
        if (side.weight) {
          norm_head(x, deviation_of(x, p.width, p.eps), weights.of[s], p.width, y);
          x = y;
        }
        make_head(p, side, row, head, [&](float* out) { turn_head(p, x, turns, out); });
      }
    }
  }
}

// The gradients of the weights are added to `sums`, [2, width].
void normed_gradients(const Rotary& p, int64_t begin, int64_t end, float* sums) {
  const Weights weights(p);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t batch = row / p.tokens, token = row % p.tokens;
    const Turns turns = turns_of(p, batch, token, true);
    for (int s = 0; s < 2; ++s) {
      const RotaryHeads& side = p.sides[s];
      for (int head = 0; head < side.heads; ++head) {
        alignas(64) HeadBuffer grad_buffer, x_buffer, g, n;
        const float* grad = load_tile(side.in.data, p.in_type, side.in.at(batch, token, head), p.width, grad_buffer);
        const float* x = load_tile(side.x.data, p.x_type, side.x.at(batch, token, head), p.width, x_buffer);
        turn_head(p, grad, turns, g);
        const float rstd = deviation_of(x, p.width, p.eps);
        weight_gradient(x, rstd, weights.of[s], p.width, n, g, sums + s * p.width);
        const float mean_gn = dot(g, n, p.width) / static_cast<float>(p.width);
        make_head(p, side, row, head, [&](float* out) { head_gradient(g, n, rstd, mean_gn, p.width, out); });
      }
    }
  }
}

void turn(const Rotary& p, bool transposed) {
  const int64_t elements = int64_t{p.sides[0].heads + p.sides[1].heads} * p.width;
  torch::stable::parallel_for(0, p.rows(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)),
                              [&](int64_t begin, int64_t end) { turn_tokens(p, transposed, begin, end); });
}

}  // namespace

Status rotary_forward(const Rotary& p, Stream) {
  turn(p, false);
  return {};
}

int64_t rotary_backward_slots(int64_t, int) { return 0; }

Status rotary_backward(const Rotary& p, Stream) {
  if (!p.sides[0].weight) {
    turn(p, true);
  } else {
    sum_columns(
        p.rows(), 2 * p.width, p.sums,
        [&](int64_t begin, int64_t end, float* strip) { normed_gradients(p, begin, end, strip); },
        std::max<int64_t>({1, p.sides[0].heads, p.sides[1].heads}));
  }
  return {};
}

}  // namespace ak
