// rotary_forward and rotary_backward: queries and keys turn by the angles of their tokens, optionally after an RMS norm
// of each head.
//
// Work: reads each head and writes it, 4 bytes an element in 16 bits; backward of a norm also reads the heads: 6
// bytes. Some 10 to 20 instructions an element, so memory bandwidth is the limit. Cosines and sines are
// read once a token, 1 / heads of the traffic.
//
// Plan: a warp takes a token. It is cut into teams of 1 to 32 lanes; a team takes a head, a lane holds a vector of
// columns and the vector of columns that they are paired with, so that no element leaves its lane. A token's cosines
// and sines stay in registers while its heads pass, kAhead heads of a team in flight: 2 KB a warp in 16 bits. Sums over
// a head are butterflies within its team. The statistics of a norm are computed again for the gradient, which costs no
// memory traffic. Gradients of weights stay in registers over all tokens of a persistent warp; then a block adds those
// of its teams and warps and stores them in its slot, and another kernel adds the slots.
//
// Traps: no atomics, whose order would change the bits from run to run. Lanes without a head or columns take part in
// every exchange. Columns that do not turn are copied, not multiplied by a sine of 0, which makes NaN of infinity.
#include "rotary/call.h"

#include <algorithm>
#include <cstring>

#include "base/elementwise.cuh"
#include "base/row.cuh"
#include "device/dependent_launch.cuh"
#include "gemm/column_sums.h"

namespace ak {
namespace {

constexpr int kTurnThreads = 256, kTurnBlocks = 2;          // and blocks an SM
constexpr int kGradientThreads = 128, kGradientBlocks = 3;  // of the norm's gradient
constexpr int kAhead = 2;

/// Columns that a lane holds: kVectors times two vectors, with kVec pairs between them. Halves: the first vector has
/// the first elements of the pairs. Interleaved: each vector has whole pairs, unless it is one element, and the second
/// vector lies half a head after the first, so that a team's stores fill sectors.
template <int kVec>
struct Slice {
  static constexpr int kVectors = kVec == 1 ? 4 : 1, kPairs = kVec * kVectors;

  int lanes, lane, team;  // lanes of a team, this lane in it, and its team in the warp
  int half, turning;      // pairs of a head, and those that turn
  bool interleaved;

  AK_DEVICE explicit Slice(const Rotary& p) : half(p.width / 2), turning(p.rotary / 2), interleaved(p.interleaved) {
    lanes = 1;
    while (lanes < kWarpThreads && lanes * kVec < half) lanes *= 2;
    lane = lane_index() % lanes;
    team = lane_index() / lanes;
  }
  AK_DEVICE int teams() const { return kWarpThreads / lanes; }
  AK_DEVICE bool has(int v) const { return first(v) < half; }
  /// The first column of a vector. Columns of halves that do not turn are in pairs, too.
  AK_DEVICE int vector(int v, bool second) const {
    const int at = first(v);
    if (interleaved) return kVec == 1 ? 2 * at + second : at + (second ? half : 0);
    return at + (at < turning ? (second ? turning : 0) : (second ? half : turning));
  }
  /// True if a vector is among the first `columns` of a head, whose second half begins at columns / 2.
  AK_DEVICE bool is_within(int v, bool second, int columns) const {
    return interleaved ? vector(v, second) < columns : first(v) < columns / 2;
  }
  /// The column of an element of pair j.
  AK_DEVICE int column(int j, bool second) const {
    const int v = j / kVec, i = j % kVec;
    if (!interleaved || kVec == 1) return vector(v, second) + i;
    return vector(v, i >= kVec / 2) + 2 * i % kVec + second;
  }
  AK_DEVICE bool turns(int j) const { return is_within(j / kVec, kVec > 1 && j % kVec >= kVec / 2, 2 * turning); }

 private:
  AK_DEVICE int first(int v) const { return (lane + v * lanes) * kVec; }
};

/// A lane's pairs of a head: the first elements, and the second ones.
template <int kVec>
using Pairs = float[2][Slice<kVec>::kPairs];

/// Two vectors of T as pairs, in place of kVec pairs from the first of vector v on.
template <int kVec, class T>
AK_DEVICE void unpack_pairs(Pairs<kVec>& pairs, const Slice<kVec>& slice, int v, const Vec<T, kVec>& first,
                            const Vec<T, kVec>& second) {
  const auto a = to_floats(first), b = to_floats(second);
  const auto value = [&](int j) { return j < kVec ? a[j] : b[j - kVec]; };
  AK_UNROLL
  for (int j = 0; j < kVec; j++) {
    pairs[0][v * kVec + j] = slice.interleaved ? value(2 * j) : value(j);
    pairs[1][v * kVec + j] = slice.interleaved ? value(2 * j + 1) : value(kVec + j);
  }
}

/// This lane's cosines, sines or weights from element `at` on, 0 past the `columns` that there are.
template <int kVec>
AK_DEVICE void load_factors(Pairs<kVec>& pairs, const Slice<kVec>& slice, const void* data, DType dtype, int64_t at,
                            int columns) {
  with_row_dtype(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(data) + at;
    AK_UNROLL
    for (int v = 0; v < Slice<kVec>::kVectors; v++) {
      Vec<T, kVec> vectors[2] = {};
      AK_UNROLL
      for (int second = 0; second < 2; second++) {
        if (slice.is_within(v, second, columns)) vectors[second] = load_vec<kVec>(from + slice.vector(v, second));
      }
      unpack_pairs<kVec, T>(pairs, slice, v, vectors[0], vectors[1]);
    }
  });
}

/// This lane's part of a head as it is laid out in memory, so that loads of several heads are issued before the first
/// is used, whatever their types are. 8 columns of a vector have 16 bits each.
template <int kVec>
struct HeldHead {
  static constexpr int kWords = kVec == 8 ? 4 : kVec;
  Vec<uint32_t, kWords> words[Slice<kVec>::kVectors][2];
  bool there;

  /// Head `head` of a token, of `heads`. A lane without a vector reads the tensor's first one.
  AK_DEVICE void load(const Slice<kVec>& slice, const HeadRows& rows, DType dtype, int64_t batch, int64_t token,
                      int head, int heads) {
    there = head < heads;
    const int64_t begin = rows.at(batch, token, head);
    AK_UNROLL
    for (int v = 0; v < Slice<kVec>::kVectors; v++) {
      AK_UNROLL
      for (int second = 0; second < 2; second++) {
        const int64_t at = there && slice.has(v) ? begin + slice.vector(v, second) : 0;
        auto& to = words[v][second];
        if (kVec == 8 || dtype == DType::kFloat32) {
          to = load_vec<kWords>(static_cast<const uint32_t*>(rows.data) + (kVec == 8 ? at / 2 : at));
        } else if constexpr (kVec == 1) {
          to[0] = ak::load(static_cast<const uint16_t*>(rows.data) + at);
        } else {
          const auto half = load_vec<kWords / 2>(static_cast<const uint32_t*>(rows.data) + at / 2);
          AK_UNROLL
          for (int i = 0; i < kWords / 2; i++) to[i] = half[i];
        }
      }
    }
  }
  /// Columns out of bounds, and those of a head that is not there, are 0.
  AK_DEVICE void unpack(Pairs<kVec>& pairs, const Slice<kVec>& slice, DType dtype) const {
    with_row_dtype(dtype, [&]<class T>(T) {
      if constexpr (kVec <= kVectorOf<T>) {
        AK_UNROLL
        for (int v = 0; v < Slice<kVec>::kVectors; v++) {
          Vec<T, kVec> vectors[2];
          AK_UNROLL
          for (int second = 0; second < 2; second++) {
            Vec<uint32_t, kWords> kept;
            AK_UNROLL
            for (int i = 0; i < kWords; i++) kept[i] = there && slice.has(v) ? words[v][second][i] : 0;
            memcpy(&vectors[second], &kept, sizeof vectors[second]);
          }
          unpack_pairs<kVec, T>(pairs, slice, v, vectors[0], vectors[1]);
        }
      }
    });
  }
};

/// Rounds the pairs and stores them as the head at element `at`.
template <int kVec>
AK_DEVICE void store_pairs(const Pairs<kVec>& pairs, const Slice<kVec>& slice, void* data, DType dtype, int64_t at) {
  with_row_dtype(dtype, [&]<class T>(T) {
    if constexpr (kVec <= kVectorOf<T>) {
      T* head = static_cast<T*>(data) + at;
      AK_UNROLL
      for (int v = 0; v < Slice<kVec>::kVectors; v++) {
        if (!slice.has(v)) continue;
        Vec<T, kVec> a, b;
        const auto value = [&](int j) {  // element j of the pairs, one pair after the other
          return pairs[j % 2][v * kVec + j / 2];
        };
        AK_UNROLL
        for (int j = 0; j < kVec; j++) {
          a[j] = round_to<T>(slice.interleaved ? value(j) : pairs[0][v * kVec + j]);
          b[j] = round_to<T>(slice.interleaved ? value(kVec + j) : pairs[1][v * kVec + j]);
        }
        store_vec(head + slice.vector(v, false), a);
        store_vec(head + slice.vector(v, true), b);
      }
    }
  });
}

/// Cosines and signed sines of a token.
template <int kVec>
struct TokenTurn {
  Pairs<kVec> cos, sin;

  AK_DEVICE TokenTurn(const Rotary& p, const Slice<kVec>& slice, int64_t batch, int64_t token, bool transposed) {
    const int64_t at = batch * p.angle_batch + token * p.rotary;
    load_factors<kVec>(cos, slice, p.cos, p.angle_type, at, p.rotary);
    load_factors<kVec>(sin, slice, p.sin, p.angle_type, at, p.rotary);
    AK_UNROLL
    for (int j = 0; j < Slice<kVec>::kPairs; j++) {
      const PairSines sines = pair_sines(sin[0][j], sin[1][j], transposed);
      sin[0][j] = sines.first;
      sin[1][j] = sines.second;
    }
  }
  AK_DEVICE void turn(Pairs<kVec>& x, const Slice<kVec>& slice) const {
    AK_UNROLL
    for (int j = 0; j < Slice<kVec>::kPairs; j++) {
      if (!slice.turns(j)) continue;
      const float first = x[0][j], second = x[1][j];
      x[0][j] = turned(first, second, cos[0][j], sin[0][j]);
      x[1][j] = turned(second, first, cos[1][j], sin[1][j]);
    }
  }
};

/// The sum over a team, with the same bits in each of its lanes.
AK_DEVICE float team_sum(float value, int lanes) {
  AK_NO_UNROLL
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

/// 1 / root mean square of the heads of the warp's teams. Columns out of bounds are 0.
template <int kVec>
AK_DEVICE float deviation_of(const Pairs<kVec>& x, const Slice<kVec>& slice, const Rotary& p) {
  float factor = 1.0f;
  for (;;) {
    float sum = 0.0f;
    AK_UNROLL
    for (int j = 0; j < Slice<kVec>::kPairs; j++) {
      const float first = x[0][j] * factor, second = x[1][j] * factor;
      sum = fma(first, first, sum);
      sum = fma(second, second, sum);
    }
    const float square = div(team_sum(sum, slice.lanes), static_cast<float>(p.width));
    const bool done = is_finite(square) || factor != 1.0f;
    if (!warp_any(!done)) return reciprocal_deviation(square, p.eps, factor);
    if (!done) factor = kShrink;
  }
}

/// The turn, forward after the norm, or the gradient of a turn without a norm.
template <int kVec, bool kNorm>
AK_KERNEL(kTurnThreads, kTurnBlocks)
rotary_turn_kernel(AK_PARAM(Rotary) p, bool transposed) {
  constexpr int kPairs = Slice<kVec>::kPairs, kHeads = kVec == 1 ? 1 : kAhead;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = static_cast<int64_t>(block_index()) * (kTurnThreads / kWarpThreads) + warp_index();
  if (row >= p.rows()) return;
  const int64_t batch = row / p.tokens, token = row - batch * p.tokens;
  const Slice<kVec> slice(p);
  const TokenTurn<kVec> turn(p, slice, batch, token, transposed);
  AK_NO_UNROLL
  for (int side = 0; side < 2; side++) {
    const RotaryHeads& of = p.sides[side];
    Pairs<kVec> weight;
    if constexpr (kNorm) load_factors<kVec>(weight, slice, of.weight, p.weight_type, 0, p.width);
    AK_NO_UNROLL
    for (int begin = 0; begin < of.heads; begin += kHeads * slice.teams()) {
      const int first = begin + slice.team;
      HeldHead<kVec> held[kHeads];
      AK_UNROLL
      for (int i = 0; i < kHeads; i++)
        held[i].load(slice, of.in, p.in_type, batch, token, first + i * slice.teams(), of.heads);
      AK_UNROLL
      for (int i = 0; i < kHeads; i++) {
        Pairs<kVec> x;
        held[i].unpack(x, slice, p.in_type);
        if constexpr (kNorm) {
          const float rstd = deviation_of<kVec>(x, slice, p);
          AK_UNROLL
          for (int j = 0; j < kPairs; j++) {
            x[0][j] = normed(x[0][j], rstd, weight[0][j]);
            x[1][j] = normed(x[1][j], rstd, weight[1][j]);
          }
        }
        turn.turn(x, slice);
        const int head = first + i * slice.teams();
        if (held[i].there) store_pairs<kVec>(x, slice, of.out, p.out_type, (row * of.heads + head) * p.width);
      }
    }
  }
}

/// The gradients of a token's queries or keys. Adds to this lane's part of the gradient of their weight.
template <int kVec>
AK_DEVICE void normed_gradients(const Rotary& p, const RotaryHeads& of, const Slice<kVec>& slice,
                                const Pairs<kVec>& weight, int64_t row, Pairs<kVec>& of_weight) {
  constexpr int kPairs = Slice<kVec>::kPairs;
  const int64_t batch = row / p.tokens, token = row - batch * p.tokens;
  const float count = static_cast<float>(p.width);
  const TokenTurn<kVec> turn(p, slice, batch, token, true);
  AK_NO_UNROLL
  for (int begin = 0; begin < of.heads; begin += slice.teams()) {
    const int head = begin + slice.team;
    HeldHead<kVec> grad, x;
    grad.load(slice, of.in, p.in_type, batch, token, head, of.heads);
    x.load(slice, of.x, p.x_type, batch, token, head, of.heads);
    Pairs<kVec> g, n;
    grad.unpack(g, slice, p.in_type);
    x.unpack(n, slice, p.x_type);
    turn.turn(g, slice);
    const float rstd = deviation_of<kVec>(n, slice, p);
    float sum = 0.0f;
    AK_UNROLL
    for (int element = 0; element < 2; element++) {
      AK_UNROLL
      for (int j = 0; j < kPairs; j++) {
        n[element][j] = normalized(n[element][j], 0.0f, rstd);
        of_weight[element][j] = fma(g[element][j], n[element][j], of_weight[element][j]);
        g[element][j] *= weight[element][j];
        sum = fma(g[element][j], n[element][j], sum);
      }
    }
    const float mean_gn = div(team_sum(sum, slice.lanes), count);
    AK_UNROLL
    for (int element = 0; element < 2; element++) {
      AK_UNROLL
      for (int j = 0; j < kPairs; j++) g[element][j] = norm_gradient(g[element][j], n[element][j], rstd, 0.0f, mean_gn);
    }
    if (x.there) store_pairs<kVec>(g, slice, of.out, p.out_type, (row * of.heads + head) * p.width);
  }
}

struct WarpSums;

/// All queries of the warp's tokens, then all keys, so that one gradient of a weight is in registers.
template <int kVec>
AK_KERNEL(kGradientThreads, kGradientBlocks)
rotary_gradient_kernel(AK_PARAM(Rotary) p) {
  constexpr int kPairs = Slice<kVec>::kPairs, kWarps = kGradientThreads / kWarpThreads;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Slice<kVec> slice(p);
  const auto of_warps = shared<float, kWarps * 2 * kMaxHeadWidth, WarpSums>();
  AK_NO_UNROLL
  for (int side = 0; side < 2; side++) {
    Pairs<kVec> weight, of_weight = {};
    load_factors<kVec>(weight, slice, p.sides[side].weight, p.weight_type, 0, p.width);
    AK_NO_UNROLL
    for (int64_t row = static_cast<int64_t>(block_index()) * kWarps + warp_index(); row < p.rows();
         row += static_cast<int64_t>(grid_blocks()) * kWarps)
      normed_gradients<kVec>(p, p.sides[side], slice, weight, row, of_weight);
    AK_UNROLL
    for (int i = 0; i < 2 * kPairs; i++) {
      const int element = i / kPairs, j = i % kPairs;
      float sum = of_weight[element][j];
      AK_NO_UNROLL
      for (int mask = slice.lanes; mask < kWarpThreads; mask *= 2) sum += shuffle_xor(sum, mask);
      if (slice.team == 0 && slice.has(j / kVec))
        of_warps[(warp_index() * 2 + side) * p.width + slice.column(j, element == 1)] = sum;
    }
  }
  block_sync();
  AK_NO_UNROLL
  for (int i = thread_index(); i < 2 * p.width; i += kGradientThreads) {
    float sum = 0.0f;
    AK_UNROLL
    for (int warp = 0; warp < kWarps; warp++) sum += of_warps[warp * 2 * p.width + i];
    store(p.slots + static_cast<int64_t>(block_index()) * 2 * p.width + i, sum);
  }
}

bool aligned(const HeadRows& rows, DType dtype) {
  bool all = vector_aligned(rows.data);
  for (const int64_t stride : rows.strides) all = all && stride * bytes_of(dtype) % kWord == 0;
  return all;
}

/// Calls f with the number of pairs of a vector: 8 of 16 bits or 4 of fp32 where everything is aligned, else 1.
template <class F>
Status with_vector(const Rotary& p, bool reads_x, const F& f) {
  bool all = vector_aligned(p.cos) && vector_aligned(p.sin);
  for (const RotaryHeads& side : p.sides) {
    all = all && aligned(side.in, p.in_type) && vector_aligned(side.weight) && vector_aligned(side.out);
    if (reads_x) all = all && aligned(side.x, p.x_type);
  }
  const bool wide =
      p.in_type == DType::kFloat32 || p.out_type == DType::kFloat32 || (reads_x && p.x_type == DType::kFloat32);
  const auto fits = [&](int vec) { return all && p.width / 2 % vec == 0 && p.rotary / 2 % vec == 0; };
  if (!wide && fits(8)) return f(std::integral_constant<int, 8>{});
  if (fits(4)) return f(std::integral_constant<int, 4>{});
  return f(std::integral_constant<int, 1>{});
}

/// With weights never transposed: the gradient of a norm has a kernel of its own.
Status turn(const Rotary& p, bool transposed, Stream stream) {
  if (p.rows() == 0) return {};
  constexpr int kWarps = kTurnThreads / kWarpThreads;
  const int64_t blocks = (p.rows() + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX) return {1, "rotary: more than 2^31 - 1 blocks"};
  const LaunchConfig config{.name = "rotary",
                            .grid = static_cast<int>(blocks),
                            .block = kTurnThreads,
                            .overlap_previous = true,
                            .stream = stream};
  return with_vector(p, false, [&]<int kVec>(std::integral_constant<int, kVec>) {
    return p.sides[0].weight != nullptr ? launch(rotary_turn_kernel<kVec, true>, config, p, transposed)
                                        : launch(rotary_turn_kernel<kVec, false>, config, p, transposed);
  });
}

int64_t gradient_blocks(int64_t rows) {
  constexpr int kWarps = kGradientThreads / kWarpThreads, kMostTokens = 64;  // a warp adds their heads in fp32
  const int64_t resident = static_cast<int64_t>(kGradientBlocks) * device_sm_count();
  return std::min((rows + kWarps - 1) / kWarps, std::max(resident, rows / (kWarps * kMostTokens)));
}

}  // namespace

Status rotary_forward(const Rotary& p, Stream stream) { return turn(p, false, stream); }

int64_t rotary_backward_slots(int64_t rows, int width) { return gradient_blocks(rows) * 2 * width; }

Status rotary_backward(const Rotary& p, Stream stream) {
  if (p.sides[0].weight == nullptr) return turn(p, true, stream);
  if (p.rows() == 0) return {};
  const int64_t blocks = gradient_blocks(p.rows());
  const LaunchConfig config{.name = "rotary_gradient",
                            .grid = static_cast<int>(blocks),
                            .block = kGradientThreads,
                            .overlap_previous = true,
                            .stream = stream};
  const Status status = with_vector(p, true, [&]<int kVec>(std::integral_constant<int, kVec>) {
    return launch(rotary_gradient_kernel<kVec>, config, p);
  });
  if (!status.ok()) return status;
  return add_slots(p.slots, blocks, 2 * static_cast<int64_t>(p.width), p.sums, stream);
}

}  // namespace ak
