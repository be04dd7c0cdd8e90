// rotary_forward and rotary_backward on the emulator, compared with double: widths, types, layouts, alignments, the
// norm's gradients.
#include <array>
#include <cmath>

#include "emulator/harness.h"
#include "gemm/column_sums.cu"
#include "rotary/rotary.cu"

namespace ak::test {
namespace {

struct Shape {
  int batch = 1, tokens = 5, heads[2] = {3, 1}, width = 32, rotary = 32;
  bool interleaved = false, normed = false, angles_per_batch = false;
  int gap = 0;         // elements between heads
  int offset = 0;      // elements in front of everything that is read, which so loses its alignment
  int misplaced = -1;  // in place of `offset`: q, k, x of q, cos, weight of q or out of q alone
  double scale = 1;
  int sms = 1;
};

template <class T>
constexpr double kRoundoff = std::is_same_v<T, float>  ? 4e-6
                             : std::is_same_v<T, bf16> ? 0x1p-8
                                                       : 0x1p-11;

template <class T>
std::string differs(const char* name, const emu::Buffer<T>& got, const std::vector<double>& want, double scale = 1) {
  for (size_t i = 0; i < want.size(); i++) {
    const double value = to_float(got[i]), bound = kRoundoff<T> * (std::fabs(want[i]) + scale) + 4e-6 * scale;
    if (!(std::fabs(value - want[i]) <= bound))
      return emu::format("%s[%zu] is %.9g, expected %.9g", name, i, value, want[i]);
  }
  return got.check_written();
}

/// Queries or keys, of which every head is followed by a gap that no kernel may read.
template <class T>
struct Heads {
  const Shape& s;
  int heads, gap;
  emu::Buffer<T> buffer;

  Heads(const Shape& shape, int side, const char* name, emu::Random& random, int offset, int gap_behind)
      : s(shape),
        heads(shape.heads[side]),
        gap(gap_behind),
        buffer(name, rows() * pitch(), static_cast<size_t>(offset)) {
    for (size_t r = 0; r < rows(); r++) {
      for (int c = 0; c < s.width; c++)
        buffer.set(r * pitch() + c, round_to<T>(static_cast<float>(s.scale * (1.0 * random.below(257) - 128) / 64)));
    }
  }
  size_t rows() const { return static_cast<size_t>(s.batch) * s.tokens * heads; }
  size_t pitch() const { return static_cast<size_t>(s.width + gap); }
  HeadRows view() {
    const int64_t head = s.width + gap, token = head * heads;
    return {buffer.data(), {s.batch > 1 ? token * s.tokens : 0, s.tokens > 1 ? token : 0, heads > 1 ? head : 0}};
  }
  double at(size_t row, int column) const { return to_float(buffer[row * pitch() + column]); }
};

template <class A>
struct Angles {
  const Shape& s;
  emu::Buffer<A> cos, sin;

  Angles(const Shape& shape, emu::Random& random, int offset)
      : s(shape), cos("cos", size(shape), offset), sin("sin", size(shape), offset) {
    for (size_t i = 0; i < size(s); i++) {
      cos.set(i, round_to<A>((1.0f * random.below(129) - 64) / 64));
      sin.set(i, round_to<A>((1.0f * random.below(129) - 64) / 64));
    }
  }
  static size_t size(const Shape& s) {
    return static_cast<size_t>(s.angles_per_batch ? s.batch : 1) * s.tokens * s.rotary;
  }
  /// Turns a head of the token with number `row`, batch by batch.
  std::vector<double> turned(const std::vector<double>& x, size_t row, bool transposed) const {
    const size_t at = (s.angles_per_batch ? row : row % s.tokens) * s.rotary;
    std::vector<double> y = x;
    for (int i = 0; i < s.rotary / 2; i++) {
      const int a = s.interleaved ? 2 * i : i, b = s.interleaved ? a + 1 : a + s.rotary / 2;
      const double ca = to_float(cos[at + a]), cb = to_float(cos[at + b]), sa = to_float(sin[at + a]),
                   sb = to_float(sin[at + b]);
      y[a] = transposed ? x[a] * ca + x[b] * sb : x[a] * ca - x[b] * sa;
      y[b] = transposed ? x[b] * cb - x[a] * sa : x[b] * cb + x[a] * sb;
    }
    return y;
  }
};

constexpr double kEps = 1e-3;

double rstd_of(const std::vector<double>& x) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  return 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEps);
}

template <class In, class X, class Out, class A>
struct Problem {
  Shape s;
  emu::Random random;
  Heads<In> q, k;
  Heads<X> x_q, x_k;
  Angles<A> angles;
  std::array<emu::Buffer<A>, 2> weights;
  std::array<emu::Buffer<Out>, 2> out;
  emu::Buffer<float> sums;

  explicit Problem(const Shape& shape)
      : s(shape),
        random{static_cast<uint64_t>(shape.width * 1000 + shape.rotary)},
        q(s, 0, "q", random, place(0), s.gap),
        k(s, 1, "k", random, place(1), s.gap),
        x_q(s, 0, "x of q", random, place(2), 2 * s.gap),
        x_k(s, 1, "x of k", random, place(2), 2 * s.gap),
        angles(s, random, place(3)),
        weights{emu::Buffer<A>("weight of q", s.width, place(4)), emu::Buffer<A>("weight of k", s.width, place(4))},
        out{emu::Buffer<Out>("out of q", q.rows() * s.width, place(5)),
            emu::Buffer<Out>("out of k", k.rows() * s.width)},
        sums("sums", 2 * s.width) {
    for (int i = 0; i < 2 * s.width; i++) weights[i % 2].set(i / 2, round_to<A>((1.0f * random.below(65) + 32) / 64));
    emu::options().sm_count = s.sms;
  }
  int place(int which) const { return s.misplaced == which ? 1 : s.offset; }

  Rotary call() {
    Rotary p{};
    p.sides[0] = {q.view(), x_q.view(), s.normed ? weights[0].data() : nullptr, out[0].data(), s.heads[0]};
    p.sides[1] = {k.view(), x_k.view(), s.normed ? weights[1].data() : nullptr, out[1].data(), s.heads[1]};
    p.cos = angles.cos.data(), p.sin = angles.sin.data();
    p.in_type = kType<In>, p.x_type = kType<X>, p.out_type = kType<Out>, p.weight_type = p.angle_type = kType<A>;
    p.batch = s.batch, p.tokens = s.tokens, p.angle_batch = s.angles_per_batch ? int64_t{s.tokens} * s.rotary : 0;
    p.width = s.width, p.rotary = s.rotary, p.eps = static_cast<float>(kEps), p.interleaved = s.interleaved;
    return p;
  }
  template <class T>
  static std::vector<double> head(const Heads<T>& of, size_t row) {
    std::vector<double> x(of.s.width);
    for (int c = 0; c < of.s.width; c++) x[c] = of.at(row, c);
    return x;
  }

  std::string forward() {
    const std::string error = message_of(rotary_forward(call(), nullptr));
    if (!error.empty()) return error;
    for (int side = 0; side < 2; side++) {
      const Heads<In>& of = side == 0 ? q : k;
      std::vector<double> want;
      for (size_t row = 0; row < of.rows(); row++) {
        std::vector<double> x = head(of, row);
        const double rstd = s.normed ? rstd_of(x) : 1.0;
        for (int c = 0; c < s.width; c++) x[c] *= rstd * (s.normed ? to_float(weights[side][c]) : 1.0f);
        for (const double v : angles.turned(x, row / of.heads, false)) want.push_back(v);
      }
      const std::string wrong = differs(side == 0 ? "q" : "k", out[side], want, s.normed ? 1 : s.scale);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::string backward() {
    Rotary p = call();
    emu::Buffer<float> slots("slots", static_cast<size_t>(s.normed ? rotary_backward_slots(p.rows(), p.width) : 0));
    p.slots = slots.data(), p.sums = sums.data();
    const std::string error = message_of(rotary_backward(p, nullptr));
    if (!error.empty()) return error;
    std::vector<double> of_weights;
    for (int side = 0; side < 2; side++) {
      const Heads<In>& of = side == 0 ? q : k;
      const Heads<X>& heads = side == 0 ? x_q : x_k;
      std::vector<double> want, of_weight(s.width);
      for (size_t row = 0; row < of.rows(); row++) {
        std::vector<double> g = angles.turned(head(of, row), row / of.heads, true), n = head(heads, row);
        if (s.normed) {
          const double rstd = rstd_of(n);
          double mean = 0;
          for (int c = 0; c < s.width; c++) {
            n[c] *= rstd;
            of_weight[c] += g[c] * n[c];
            g[c] *= to_float(weights[side][c]);
            mean += g[c] * n[c] / s.width;
          }
          for (int c = 0; c < s.width; c++) g[c] = rstd * (g[c] - n[c] * mean);
        }
        want.insert(want.end(), g.begin(), g.end());
      }
      const std::string wrong = differs(side == 0 ? "grad of q" : "grad of k", out[side], want, s.scale);
      if (!wrong.empty()) return wrong;
      of_weights.insert(of_weights.end(), of_weight.begin(), of_weight.end());
    }
    return s.normed ? differs("grad of weights", sums, of_weights, 4.0 * s.batch * s.tokens) : "";
  }
};

template <class In, class X, class Out, class A>
void both(Cases& cases, const std::string& title, const Shape& shape) {
  for (const bool normed : {false, true}) {
    for (const bool interleaved : {false, true}) {
      Shape s = shape;
      s.normed = normed, s.interleaved = interleaved;
      const std::string of = title + (normed ? ", normed" : "") + (interleaved ? ", interleaved" : "");
      cases.check(of, [&] { return Problem<In, X, Out, A>(s).forward(); });
      cases.check("gradient, " + of, [&] { return Problem<In, X, Out, A>(s).backward(); });
    }
  }
}

void check_widths(Cases& cases) {
  for (const auto& [width, rotary] :
       {std::pair{128, 128}, {64, 32}, {80, 32}, {64, 24}, {24, 8}, {10, 6}, {256, 256}, {2, 2}}) {
    Shape s;
    s.width = width, s.rotary = rotary;
    const std::string of = std::to_string(rotary) + " of " + std::to_string(width);
    both<bf16, bf16, bf16, float>(cases, of + ", bf16", s);
    both<float, float, float, float>(cases, of + ", fp32", s);
  }
}

void check_types_and_layouts(Cases& cases) {
  both<bf16, float, float, fp16>(cases, "mixed types", {});
  both<float, fp16, fp16, bf16>(cases, "other mixed types", {});
  Shape s;
  s.batch = 2, s.heads[0] = 9, s.heads[1] = 2, s.gap = 8;
  both<bf16, bf16, bf16, bf16>(cases, "two batches and gaps", s);
  s.angles_per_batch = true;
  both<bf16, bf16, bf16, bf16>(cases, "angles of each batch", s);
  s.gap = 3;
  both<bf16, bf16, bf16, bf16>(cases, "gaps of three", s);
  s.gap = 4;
  both<bf16, bf16, bf16, bf16>(cases, "gaps of four", s);
  Shape unaligned;
  unaligned.offset = 1;
  both<bf16, bf16, bf16, bf16>(cases, "unaligned", unaligned);
  unaligned.width = 256, unaligned.rotary = 128, unaligned.tokens = 2;
  both<fp16, fp16, fp16, fp16>(cases, "unaligned and wide", unaligned);
  for (int which = 0; which < 6; which++) {
    Shape one;
    one.misplaced = which;
    both<bf16, bf16, bf16, bf16>(cases, "one operand unaligned, " + std::to_string(which), one);
  }
  Shape many;
  many.tokens = 37, many.batch = 2, many.sms = 2, many.width = 16, many.rotary = 16;
  both<bf16, bf16, float, float>(cases, "more tokens than warps", many);
}

void check_values(Cases& cases) {
  cases.check("squares that overflow", [] {
    Shape s;
    s.scale = 0x1p100, s.normed = true;
    return Problem<float, float, float, float>(s).forward();
  });
  cases.check("columns that do not turn keep infinity", [] {
    Shape s;
    s.rotary = 16;
    Problem<bf16, bf16, bf16, float> problem(s);
    for (size_t r = 0; r < problem.q.rows(); r++) problem.q.buffer.set(r * s.width + 20, bf16{0x7f80});
    const std::string error = message_of(rotary_forward(problem.call(), nullptr));
    if (!error.empty()) return error;
    for (size_t r = 0; r < problem.q.rows(); r++) {
      if (problem.out[0][r * s.width + 20].bits != 0x7f80) return std::string("infinity was lost");
      for (int c = 21; c < s.width; c++) {
        if (is_nan(problem.out[0][r * s.width + c])) return std::string("it reached another column");
      }
    }
    return std::string();
  });
  cases.check("nothing", [] {
    Rotary p{};
    p.width = p.rotary = 8;
    const std::string error = message_of(rotary_forward(p, nullptr));
    return error.empty() ? message_of(rotary_backward(p, nullptr)) : error;
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("rotary", ak::test::Seeds(argc, argv, 1));
  ak::test::check_widths(cases);
  ak::test::check_types_and_layouts(cases);
  ak::test::check_values(cases);
  return cases.finish();
}
