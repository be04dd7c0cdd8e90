// A grouped product on the emulator, for the tests of both kernels.
//
// The inputs are small integers, so every sum is exact. Elements that must reach no result are NaN or
// unreadable memory: rows and terms past the last end, the padding of lines, biases of other groups. With `nan_group`
// all elements of one group are NaN, and only that group's results may be. Results start as NaN, or as numbers where
// the product adds to them.
#pragma once
#include <cmath>

#include "emulator/harness.h"
#include "gemm/sm80/grouped.cu"
#include "gemm/sm90/grouped.cuh"

namespace ak::test {

using Ends = std::vector<int>;

struct Setup {
  int total;  // rows or terms
  int other;  // rows: k; sums: m
  int n;
  Ends ends;
  bool sums = false;
  bool n_major_b = false;  // of rows
  bool fp32 = false;       // C
  bool accumulate = false;
  int bias = 0;  // 1: one for all groups, 2: one per group
  bool float_bias = false;
  Activation activation = Activation::none;
  bool keeps_z = false;
  int gap = 0;            // elements between rows of C and z
  bool turned_c = false;  // C by columns
  int sms = 2;
  int offs_stride = 1;
  int nan_group = -1;
  Ends next_ends = {};  // of a second launch

  std::string title() const {
    std::string groups;
    for (const int end : ends) groups += emu::format(" %d", end);
    return emu::format("%s of %d, %d, n %d, ends%s, %s%s C%s%s +%d, bias %d%s, activation %d%s, %d SMs, NaN in %d",
                       sums ? "sums" : "rows", total, other, n, groups.c_str(), n_major_b ? "n-major B, " : "",
                       fp32 ? "fp32" : "16-bit", accumulate ? " added to" : "", turned_c ? " by columns" : "", gap,
                       bias, float_bias ? " fp32" : "", static_cast<int>(activation), keeps_z ? ", z" : "", sms,
                       nan_group);
  }
};

enum class Kernel { kSm90, kSm80 };

/// The ends that a kernel takes the given ones for.
Ends clamped(const Ends& ends, int total) {
  Ends result;
  int previous = 0;
  for (const int end : ends) result.push_back(previous = std::min(std::max(end, previous), total));
  return result;
}

/// One product: its memory, and the expected results.
template <class T, class Out>
class Product {
 public:
  explicit Product(const Setup& s)
      : s_(s),
        groups_(static_cast<int>(s.ends.size())),
        m_(s.sums ? s.other : s.total),
        k_(s.sums ? s.total : s.other),
        columns_(s.activation == Activation::swiglu ? s.n / 2 : s.n),
        ld_a_(padded(s.sums ? m_ : k_)),
        ld_b_(padded(s.sums || s.n_major_b ? s.n : k_)),
        plane_b_(ld_b_ * (s.n_major_b ? k_ : s.n)),
        ld_c_(padded(columns_) + s.gap),
        ld_z_(padded(s.n) + s.gap),
        a_("a", size(ld_a_ * s.total)),
        b_("b", size(s.sums ? ld_b_ * k_ : plane_b_ * groups_)),
        bias_("bias", size(s.bias ? s.n * (s.bias == 2 ? groups_ : 1) : 0)),
        float_bias_("float bias", size(s.bias ? s.n * (s.bias == 2 ? groups_ : 1) : 0)),
        offs_("offs", size((groups_ - 1) * s.offs_stride + 1)),
        c_("c", size(s.sums ? groups_ * m_ * ld_c_ : m_ * ld_c_)),
        z_("z", size(s.keeps_z ? m_ * ld_z_ : 0)) {
    emu::Random random{static_cast<uint64_t>(s.total * 7 + s.other * 3 + s.n)};
    const auto draw = [&](size_t count) {
      std::vector<float> values(count);
      for (float& x : values) x = static_cast<float>(random.below(5)) - 2;
      return values;
    };
    value_a_ = draw(size(s.total * s.other));
    value_b_ = draw(size(s.sums ? k_ * s.n : groups_ * k_ * s.n));
    value_bias_ = draw(bias_.size());
    for (size_t i = 0; i < bias_.size(); i++) {
      bias_.set(i, round_to<T>(value_bias_[i]));
      float_bias_.set(i, value_bias_[i]);
    }
  }

  /// Launches with these ends; "" or what is wrong.
  std::string run(Kernel kernel, const Ends& given) {
    ends_ = clamped(given, s_.total);
    for (int g = 0; g < groups_; g++) offs_.set(size(g * s_.offs_stride), given[size(g)]);
    place(kernel);
    for (size_t i = 0; s_.accumulate && i < c_.size(); i++) {
      const int group = static_cast<int>(i / size(m_ * ld_c_));
      c_.set(i, round_to<Out>(is_empty(group) ? kUntouched : kInitial));
    }
    GroupedProblem p{};
    p.sums = s_.sums, p.groups = groups_, p.offs = offs_.data(), p.offs_stride = s_.offs_stride;
    GemmProblem& q = p.product;
    q.type = kType<T>;
    q.a = a_.data(), q.b = b_.data(), q.ld_a = ld_a_, q.ld_b = ld_b_;
    q.m = m_, q.n = s_.n, q.k = k_;
    q.m_major_a = s_.sums, q.n_major_b = s_.sums || s_.n_major_b;
    q.batch_stride_b = s_.sums ? 0 : plane_b_;
    q.accumulate = s_.accumulate;
    q.c = {c_.data(), kType<Out>, ld_c_, 1, s_.sums ? m_ * ld_c_ : 0};
    if (s_.turned_c) q.c.row_stride = 1, q.c.column_stride = m_;
    q.epilogue.activation = s_.activation;
    if (s_.bias) {
      q.epilogue.bias.data = s_.float_bias ? static_cast<void*>(float_bias_.data()) : bias_.data();
      q.epilogue.bias.type = s_.float_bias ? DType::kFloat32 : kType<T>;
      q.epilogue.bias.batch_stride = s_.bias == 2 ? s_.n : 0;
    }
    if (s_.keeps_z) q.epilogue.z = {z_.data(), kType<Out>, ld_z_, 1, 0};
    const Status status = kernel == Kernel::kSm90 ? gemm_sm90_grouped<T>(p, nullptr) : gemm_sm80_grouped<T>(p, nullptr);
    const std::string error = message_of(status);
    if (!error.empty()) return error;
    const std::string wrong = s_.sums ? check_sums() : check_rows();
    return wrong.empty() ? c_.check_red_zones() + z_.check_red_zones() : wrong;
  }

 private:
  static constexpr float kInitial = 3;
  static constexpr float kUntouched = -0.0f;  // any addition, of zeros too, makes 0 of it
  static int64_t padded(int64_t x) { return (x + 7) / 8 * 8; }
  static size_t size(int64_t x) { return static_cast<size_t>(x); }
  int group_of(int place) const {
    for (int g = 0; g < groups_; g++) {
      if (place < ends_[size(g)]) return g;
    }
    return groups_;
  }
  bool is_empty(int group) const { return ends_[size(group)] == (group == 0 ? 0 : ends_[size(group - 1)]); }
  bool is_nan(int group) const { return group == groups_ || group == s_.nan_group; }

  /// The last group is read up to here: gemm_sm90_grouped reads slices of 64 rows.
  int end_of_reading(Kernel kernel) const {
    if (kernel == Kernel::kSm80) return s_.total;
    int begin = 0, end = 0;
    for (const int next : ends_) {
      if (next > end) begin = end, end = next;
    }
    return s_.sums ? end : begin + (end - begin + 63) / 64 * 64;
  }

  /// Writes the operands; what is in no group, and all of `nan_group`, is NaN, or is not written if nobody reads it.
  void place(Kernel kernel) {
    for (int t = 0; t < std::min(s_.total, end_of_reading(kernel)); t++) {
      const bool nan = is_nan(group_of(t));
      for (int i = 0; i < s_.other; i++)
        a_.set(size(t * ld_a_ + i), round_to<T>(nan ? NAN : value_a_[size(t * s_.other + i)]));
      for (int j = 0; s_.sums && j < s_.n; j++)
        b_.set(size(t * ld_b_ + j), round_to<T>(nan ? NAN : value_b_[size(t * s_.n + j)]));
    }
    for (int g = 0; !s_.sums && g < groups_; g++) {
      for (int k = 0; k < k_; k++) {
        for (int j = 0; j < s_.n; j++) {
          const int64_t at = g * plane_b_ + (s_.n_major_b ? k * ld_b_ + j : j * ld_b_ + k);
          b_.set(size(at), round_to<T>(g == s_.nan_group ? NAN : value_b_[size((g * k_ + k) * s_.n + j)]));
        }
      }
    }
  }

  float preactivation(int group, int row, int column) const {
    if (group == groups_) return 0;
    if (group == s_.nan_group) return NAN;
    float sum = 0;
    for (int k = 0; k < k_; k++) sum += value_a_[size(row * k_ + k)] * value_b_[size((group * k_ + k) * s_.n + column)];
    return sum + (s_.bias ? value_bias_[size((s_.bias == 2 ? group * s_.n : 0) + column)] : 0);
  }
  template <class Value>
  std::string differs(const char* name, Value got, float want, int g, int row, int column) const {
    const float is = to_float(got), rounded = to_float(round_to<Value>(want));
    if (is == rounded || (is != is && rounded != rounded)) return "";
    return emu::format("%s[%d, %d, %d] is %g, expected %g", name, g, row, column, is, rounded);
  }
  std::string check_rows() const {
    for (int row = 0; row < m_; row++) {
      const int g = group_of(row);
      for (int column = 0; column < columns_; column++) {
        const float z = preactivation(g, row, column);
        const float up = s_.activation == Activation::swiglu ? preactivation(g, row, columns_ + column) : 0;
        const float y = s_.activation == Activation::swiglu ? swiglu(z, up) : activate(s_.activation, z);
        std::string wrong = differs("c", c_[size(row * ld_c_ + column)], y, g, row, column);
        if (s_.keeps_z && wrong.empty()) wrong = differs("z", z_[size(row * ld_z_ + column)], z, g, row, column);
        if (s_.keeps_z && wrong.empty() && columns_ < s_.n)
          wrong = differs("z", z_[size(row * ld_z_ + columns_ + column)], up, g, row, columns_ + column);
        if (!wrong.empty()) return wrong;
      }
      for (int64_t x = columns_; x < ld_c_; x++) {
        const float beyond = to_float(c_[size(row * ld_c_ + x)]);
        if (beyond == beyond) return emu::format("beyond row %d of c there is %g", row, beyond);
      }
    }
    return "";
  }
  std::string check_sums() const {
    for (int g = 0; g < groups_; g++) {
      const int begin = g == 0 ? 0 : ends_[size(g - 1)], end = ends_[size(g)];
      for (int row = 0; row < m_; row++) {
        for (int column = 0; column < s_.n; column++) {
          const int64_t at = g * m_ * ld_c_ + (s_.turned_c ? row + column * m_ : row * ld_c_ + column);
          if (s_.accumulate && is_empty(g)) {
            if (std::signbit(to_float(c_[size(at)]))) continue;
            return emu::format("c[%d, %d, %d] of an empty group was added to", g, row, column);
          }
          float sum = s_.accumulate ? kInitial : 0;
          for (int k = begin; k < end; k++) sum += value_a_[size(k * m_ + row)] * value_b_[size(k * s_.n + column)];
          if (g == s_.nan_group && begin < end) sum = NAN;
          const std::string wrong = differs("c", c_[size(at)], sum, g, row, column);
          if (!wrong.empty()) return wrong;
        }
      }
    }
    return "";
  }

  Setup s_;
  int groups_, m_, k_, columns_;
  int64_t ld_a_, ld_b_, plane_b_, ld_c_, ld_z_;
  emu::Buffer<T> a_, b_, bias_;
  emu::Buffer<float> float_bias_;
  emu::Buffer<int32_t> offs_;
  emu::Buffer<Out> c_, z_;
  std::vector<float> value_a_, value_b_, value_bias_;
  Ends ends_;
};

}  // namespace ak::test
