#pragma once
// A product with an epilogue on the emulator, bit for bit: the sums of A B are small integers, so the expected values
// come from the formulas alone. Memory beyond an edge is uninitialised, and reading it is an error.
#include <cmath>

#include "emulator/harness.h"
#include "gemm/column_sums.cu"
#include "gemm/sm90/gemm.cuh"

namespace ak::test::epilogue {

constexpr Major K = Major::kK, MN = Major::kMN;

/// Layout of a matrix.
enum class Lies { kRows, kPadded, kOdd, kSpread, kTransposed, kOneRow, kOneColumn };

struct Matrix {
  int rows, columns;
  Lies lies = Lies::kRows;
  int64_t row_stride() const {
    switch (lies) {
      case Lies::kRows:
        return (columns + 7) / 8 * 8;
      case Lies::kPadded:
        return (columns + 7) / 8 * 8 + 8;
      case Lies::kOdd:
        return columns | 1;
      case Lies::kSpread:
        return (2 * columns + 7) / 8 * 8;
      case Lies::kOneColumn:
      case Lies::kTransposed:
        return 1;
      case Lies::kOneRow:
        return 0;
    }
    return 0;
  }
  int64_t column_stride() const {
    return lies == Lies::kTransposed ? rows + 3 : lies == Lies::kOneColumn ? 0 : lies == Lies::kSpread ? 2 : 1;
  }
  size_t at(int row, int column) const { return static_cast<size_t>(row * row_stride() + column * column_stride()); }
};

/// A matrix in memory that is written nowhere but in its elements; `first` elements in front of it.
template <class T>
class Stored {
 public:
  Stored(const char* name, Matrix matrix, int first = 0)
      : matrix_(matrix), first_(first), buffer_(name, first + matrix.at(matrix.rows - 1, matrix.columns - 1) + 1) {}
  void set(int row, int column, float x) { buffer_.set(first_ + matrix_.at(row, column), round_to<T>(x)); }
  float get(int row, int column) const { return to_float(buffer_[first_ + matrix_.at(row, column)]); }
  GemmValues values() { return {buffer_.data() + first_, kType<T>, matrix_.row_stride(), matrix_.column_stride()}; }
  template <class F>
  void fill(F f) {
    for (int i = 0; i < matrix_.rows; i++) {
      for (int j = 0; j < matrix_.columns; j++) set(i, j, f(i, j));
    }
  }
  /// "" if the kernel has asked for all elements to be in L2, or for none of them.
  std::string check_prefetched(bool wanted) {
    for (int i = 0; i < matrix_.rows; i++) {
      for (int j = 0; j < matrix_.columns; j++) {
        if (emu::prefetched(buffer_.data() + first_ + matrix_.at(i, j), sizeof(T)) != wanted)
          return emu::format("[%d, %d] is %sprefetched", i, j, wanted ? "not " : "");
      }
    }
    return "";
  }
  /// "" if the elements are what `f` says, rounded, and nothing else was written.
  template <class F>
  std::string compare(const char* what, F f) const {
    std::vector<bool> element(buffer_.size());
    for (int i = 0; i < matrix_.rows; i++) {
      for (int j = 0; j < matrix_.columns; j++) {
        element[first_ + matrix_.at(i, j)] = true;
        const float got = get(i, j), want = to_float(round_to<T>(f(i, j)));
        if (bits_of(got) != bits_of(want))
          return emu::format("%s[%d, %d] is %.9g, expected %.9g", what, i, j, got, want);
      }
    }
    for (size_t i = 0; i < element.size(); i++) {
      if (!element[i] && !is_nan(to_float(buffer_[i]))) return emu::format("%s: element %zu was written", what, i);
    }
    return buffer_.check_red_zones();
  }

 private:
  Matrix matrix_;
  size_t first_;
  emu::Buffer<T> buffer_;
};

enum class Bias { kNone, kColumn, kRow };

struct Sizes {
  int m, n, k;
};

struct Options {
  Sizes mnk;
  Activation activation = Activation::none;
  Bias bias = Bias::kNone;
  float alpha = 1, beta = 1;
  bool residual = false, z = false, backward = false, sums = false, accumulate = false;
  Lies residual_lies = Lies::kRows, c_lies = Lies::kRows;
  int splits = 1;
  int c_first = 0, bias_first = 0;  // elements in front of C or the bias, which so lose their alignment
  int batch = 1;                    // matrices, whose rows follow each other
  bool one_beside = false;          // residual or preact, which all matrices share
  bool swapped = false;
  bool tma_epilogue = false;  // must be what TMA moves
};

/// T: A and B; Out: C and z; Side: bias, residual.
template <class T, class Out, class Side, Major kMajorA, Major kMajorB, class Tile>
std::string run(const Options& o) {
  emu::Random random{static_cast<uint64_t>(o.mnk.m * 7 + o.mnk.n * 3 + o.mnk.k)};
  const auto small = [&](int, int) { return static_cast<float>(random.below(5)) - 2; };
  const auto eighths = [&](int, int) { return (static_cast<float>(random.below(33)) - 16) / 8; };
  const bool gated = o.activation == Activation::swiglu;
  const int columns = !gated ? o.mnk.n : o.backward ? 2 * o.mnk.n : o.mnk.n / 2;
  const int rows = o.batch * o.mnk.m;
  Stored<T> a("a", kMajorA == K ? Matrix{rows, o.mnk.k} : Matrix{o.batch * o.mnk.k, o.mnk.m});
  Stored<T> b("b", kMajorB == K ? Matrix{o.batch * o.mnk.n, o.mnk.k} : Matrix{o.batch * o.mnk.k, o.mnk.n});
  Stored<Out> c("c", {rows, columns, o.c_lies}, o.c_first), z("z", {rows, o.mnk.n, Lies::kPadded});
  Stored<Side> bias("bias",
                    o.bias == Bias::kRow ? Matrix{o.mnk.m, 1, Lies::kOneColumn} : Matrix{1, o.mnk.n, Lies::kOneRow},
                    o.bias_first);
  const int rows_beside = o.one_beside ? o.mnk.m : rows;
  Stored<Side> residual("residual", {o.residual_lies == Lies::kOneRow ? 1 : rows_beside, columns, o.residual_lies});
  Stored<T> preact("preact", {rows_beside, columns});
  std::vector<float> c_before(static_cast<size_t>(rows) * columns);
  a.fill(small), b.fill(small), bias.fill(eighths), residual.fill(eighths), preact.fill(eighths);
  if (o.accumulate) {
    c.fill([&](int i, int j) { return c_before[static_cast<size_t>(i) * columns + j] = eighths(0, 0); });
  }

  GemmProblem q{};
  q.a = a.values().data, q.b = b.values().data, q.type = kType<T>;
  q.accumulate = o.accumulate;
  q.m = o.mnk.m, q.n = o.mnk.n, q.k = o.mnk.k;
  q.ld_a = a.values().row_stride, q.ld_b = b.values().row_stride;
  q.m_major_a = kMajorA == MN, q.n_major_b = kMajorB == MN;
  q.batch = o.batch;
  q.batch_stride_a = (kMajorA == K ? o.mnk.m : o.mnk.k) * q.ld_a,
  q.batch_stride_b = (kMajorB == K ? o.mnk.n : o.mnk.k) * q.ld_b;
  const auto values = [&](auto& stored) {
    GemmValues v = stored.values();
    v.batch_stride = o.mnk.m * v.row_stride;
    return v;
  };
  q.c = values(c);
  q.epilogue.alpha = o.alpha, q.epilogue.beta = o.beta, q.epilogue.activation = o.activation;
  if (o.bias != Bias::kNone) q.epilogue.bias = bias.values();
  if (o.residual) q.epilogue.residual = o.one_beside ? residual.values() : values(residual);
  if (o.z) q.epilogue.z = values(z);
  if (o.backward) q.epilogue.preact = o.one_beside ? preact.values() : values(preact);
  emu::Buffer<float> partial_sums("partial sums", static_cast<size_t>(column_sums_size(q)));
  if (o.sums) q.epilogue.column_sums = partial_sums.data();
  constexpr bool kFloat = std::is_same_v<Out, float>;
  const GemmProblem worked_on = o.swapped ? swapped(q) : q;
  const size_t parts =
      o.splits == 1 ? 1 : static_cast<size_t>(gemm_sm90_clusters(worked_on, Tile::kShape) * Tile::kCluster * o.batch);
  emu::Buffer<float> partials("partials", parts * o.splits * Tile::kBlockM * Tile::kBlockN);
  emu::Buffer<uint32_t> counters("counters", parts * Tile::kGroups);
  counters.fill(0);
  std::string error = message_of(gemm::launch_gemm<T, kMajorA, kMajorB, kFloat, Tile>(
      worked_on, gemm_sm90_splits(o.mnk.k, o.splits), {partials.data(), counters.data()}, nullptr));
  if (!error.empty()) return error;

  const auto sum = [&](int i, int j) {
    float s = 0;
    for (int k = 0; k < o.mnk.k; k++) {
      const int batch = i / o.mnk.m;
      s += (kMajorA == K ? a.get(i, k) : a.get(batch * o.mnk.k + k, i % o.mnk.m)) *
           (kMajorB == K ? b.get(batch * o.mnk.n + j, k) : b.get(batch * o.mnk.k + k, j));
    }
    return s;
  };
  const auto preactivation = [&](int i, int j) {
    if (o.bias == Bias::kNone) return o.alpha * sum(i, j);
    return o.alpha * sum(i, j) + (o.bias == Bias::kRow ? bias.get(i % o.mnk.m, 0) : bias.get(0, j));
  };
  const auto forward = [&](int i, int j) {
    const float x = gated ? swiglu(preactivation(i, j), preactivation(i, o.mnk.n / 2 + j))
                          : activate(o.activation, preactivation(i, j));
    if (o.accumulate) return x + c_before[static_cast<size_t>(i) * columns + j];
    return o.residual ? fma(o.beta, residual.get(o.residual_lies == Lies::kOneRow ? 0 : i % rows_beside, j), x) : x;
  };
  const auto backward = [&](int i, int j) {
    if (!gated) return activate_backward(o.activation, preactivation(i, j), preact.get(i % rows_beside, j));
    const int column = j % o.mnk.n;
    const GatedGradient g =
        swiglu_backward(preactivation(i, column), preact.get(i, column), preact.get(i, o.mnk.n + column));
    return j < o.mnk.n ? g.gate : g.up;
  };
  std::string wrong = c.compare("c", [&](int i, int j) { return o.backward ? backward(i, j) : forward(i, j); });
  if (wrong.empty() && o.z) wrong = z.compare("z", preactivation);
  const bool tma_epilogue = gemm::arguments<kFloat, Tile>(worked_on, 1).path.fused == gemm::FusedEpilogue::kTma;
  if (wrong.empty() && o.tma_epilogue && !tma_epilogue) wrong = "the epilogue is not by TMA";
  if (wrong.empty() && o.residual) wrong = residual.check_prefetched(tma_epilogue);
  if (wrong.empty() && o.backward) wrong = preact.check_prefetched(tma_epilogue);
  if (!wrong.empty() || !o.sums) return wrong;

  emu::Buffer<float> column_sums("column sums", static_cast<size_t>(columns));
  error = message_of(gemm_column_sums(q, column_sums.data(), nullptr));
  if (!error.empty()) return error;
  for (int j = 0; j < columns; j++) {
    double want = 0, size = 0;
    for (int i = 0; i < rows; i++) want += backward(i, j), size += std::abs(backward(i, j));
    const float got = column_sums[static_cast<size_t>(j)];
    if (!(std::abs(got - want) <= 1e-6 * size))
      return emu::format("column sum %d is %.9g, expected %.9g", j, got, want);
  }
  return partial_sums.check_red_zones();
}

template <int kM, int kN, int kStages, int kCluster, int kConsumers>
using Tile = gemm::Tile<kM, kN, kStages, kCluster, kConsumers>;
using Small = Tile<64, 64, 3, 1, 1>;
using Two = Tile<128, 128, 2, 1, 2>;
using Wide = Tile<64, 128, 3, 2, 1>;   // a cluster
using Tall = Tile<256, 128, 2, 1, 2>;  // two slices a consumer
using Narrow = Tile<64, 16, 4, 1, 1>;
using Slim = Tile<64, 32, 3, 1, 1>;
using Ragged = Tile<128, 144, 2, 1, 2>;     // narrow boxes, and rows instead of boxes
using RaggedLine = Tile<64, 176, 2, 1, 1>;  // of the last step there is more than one
using Three = Tile<192, 64, 2, 1, 3>;
using Turns = gemm::Tile<128, 64, 3, 1, 2, true>;  // pingpong, two slices
using Full = Tile<64, 192, 2, 1, 1>;               // staged in parts of 64 columns
using Broad = Tile<64, 256, 2, 1, 1>;              // staged in parts of 128
using RaggedPair = Tile<128, 144, 2, 2, 2>;
using Pair = gemm::Tile<64, 128, 2, 2, 2, true, true>;       // side by side, pingpong
using TallPair = gemm::Tile<128, 128, 2, 2, 2, true, true>;  // the same, two slices

}  // namespace ak::test::epilogue
