// The epilogue of the GEMM kernels on the emulator, bit for bit: the sums of A B are small integers, so the expected
// values come from csrc/math alone. What lies beyond an edge is uninitialised, and reading it is an error.
#include <cmath>

#include "harness.h"
#include "kernels/gemm_column_sums.cu"
#include "kernels/gemm_sm90.cuh"

namespace ak::test {
namespace {

constexpr Major K = Major::kK, MN = Major::kMN;

template <class T>
constexpr DType kType = std::is_same_v<T, float>  ? DType::kFloat32
                        : std::is_same_v<T, bf16> ? DType::kBFloat16
                                                  : DType::kFloat16;

/// Where the elements of a matrix lie.
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
  /// "" if the kernel has asked for all elements to be in L2, or, where they are no neighbours, for none of them.
  std::string check_prefetched(bool by_tile) {
    const bool wanted = by_tile && matrix_.lies != Lies::kSpread && matrix_.lies != Lies::kTransposed;
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

struct Options {
  int m, n, k;
  Activation activation = Activation::none;
  Bias bias = Bias::kNone;
  float alpha = 1, beta = 1;
  bool residual = false, z = false, backward = false, sums = false, accumulate = false;
  Lies residual_lies = Lies::kRows, c_lies = Lies::kRows;
  int splits = 1;
  int c_first = 0, bias_first = 0;  // elements in front of C or the bias, which so lose their alignment
  int batch = 1;                    // matrices, whose rows follow each other
  bool swapped = false;
};

/// T: A and B; Out: C and z; Side: bias, residual.
template <class T, class Out, class Side, Major kMajorA, Major kMajorB, class Tile>
std::string run(const Options& o) {
  emu::Random random{static_cast<uint64_t>(o.m * 7 + o.n * 3 + o.k)};
  const auto small = [&](int, int) { return static_cast<float>(random.below(5)) - 2; };
  const auto eighths = [&](int, int) { return (static_cast<float>(random.below(33)) - 16) / 8; };
  const bool gated = o.activation == Activation::swiglu;
  const int columns = !gated ? o.n : o.backward ? 2 * o.n : o.n / 2;
  const int rows = o.batch * o.m;
  Stored<T> a("a", kMajorA == K ? Matrix{rows, o.k} : Matrix{o.batch * o.k, o.m});
  Stored<T> b("b", kMajorB == K ? Matrix{o.batch * o.n, o.k} : Matrix{o.batch * o.k, o.n});
  Stored<Out> c("c", {rows, columns, o.c_lies}, o.c_first), z("z", {rows, o.n, Lies::kPadded});
  Stored<Side> bias("bias", o.bias == Bias::kRow ? Matrix{o.m, 1, Lies::kOneColumn} : Matrix{1, o.n, Lies::kOneRow},
                    o.bias_first);
  Stored<Side> residual("residual", {o.residual_lies == Lies::kOneRow ? 1 : rows, columns, o.residual_lies});
  Stored<T> preact("preact", {rows, columns});
  std::vector<float> c_before(static_cast<size_t>(rows) * columns);
  a.fill(small), b.fill(small), bias.fill(eighths), residual.fill(eighths), preact.fill(eighths);
  if (o.accumulate) {
    c.fill([&](int i, int j) { return c_before[static_cast<size_t>(i) * columns + j] = eighths(0, 0); });
  }

  GemmProblem q{};
  q.a = a.values().data, q.b = b.values().data;
  q.m = o.m, q.n = o.n, q.k = o.k;
  q.ld_a = a.values().row_stride, q.ld_b = b.values().row_stride;
  q.m_major_a = kMajorA == MN, q.n_major_b = kMajorB == MN;
  q.batch = o.batch;
  q.batch_stride_a = (kMajorA == K ? o.m : o.k) * q.ld_a, q.batch_stride_b = (kMajorB == K ? o.n : o.k) * q.ld_b;
  const auto values = [&](auto& stored) {
    GemmValues v = stored.values();
    v.batch_stride = o.m * v.row_stride;
    return v;
  };
  q.c = values(c);
  q.epilogue.alpha = o.alpha, q.epilogue.beta = o.beta, q.epilogue.activation = o.activation;
  if (o.bias != Bias::kNone) q.epilogue.bias = bias.values();
  if (o.residual) q.epilogue.residual = values(residual);
  if (o.z) q.epilogue.z = values(z);
  if (o.backward) q.epilogue.preact = values(preact);
  emu::Buffer<float> partial_sums("partial sums", static_cast<size_t>(column_sums_size(q)));
  if (o.sums) q.epilogue.column_sums = partial_sums.data();
  const GemmOutput output = o.accumulate                 ? GemmOutput::kAccumulate
                            : std::is_same_v<Out, float> ? GemmOutput::kFloat32
                                                         : GemmOutput::kInputType;
  constexpr bool kFloat = std::is_same_v<Out, float>;
  const GemmProblem worked_on = o.swapped ? swapped(q) : q;
  const size_t parts =
      o.splits == 1 ? 1 : static_cast<size_t>(gemm_sm90_clusters(worked_on, Tile::kShape) * Tile::kCluster * o.batch);
  emu::Buffer<float> partials("partials", parts * o.splits * Tile::kBlockM * Tile::kBlockN);
  emu::Buffer<uint32_t> counters("counters", parts * Tile::kGroups);
  counters.fill(0);
  emu::forget_prefetched();
  std::string error = message_of(gemm::launch_gemm<T, kMajorA, kMajorB, kFloat, Tile>(
      worked_on, output, gemm_sm90_splits(o.k, o.splits), {partials.data(), counters.data()}, nullptr));
  if (!error.empty()) return error;

  const auto sum = [&](int i, int j) {
    float s = 0;
    for (int k = 0; k < o.k; k++) {
      const int batch = i / o.m;
      s += (kMajorA == K ? a.get(i, k) : a.get(batch * o.k + k, i % o.m)) *
           (kMajorB == K ? b.get(batch * o.n + j, k) : b.get(batch * o.k + k, j));
    }
    return s;
  };
  const auto preactivation = [&](int i, int j) {
    if (o.bias == Bias::kNone) return o.alpha * sum(i, j);
    return o.alpha * sum(i, j) + (o.bias == Bias::kRow ? bias.get(i % o.m, 0) : bias.get(0, j));
  };
  const auto forward = [&](int i, int j) {
    const float x = gated ? swiglu(preactivation(i, j), preactivation(i, o.n / 2 + j))
                          : activate(o.activation, preactivation(i, j));
    if (o.accumulate) return x + c_before[static_cast<size_t>(i) * columns + j];
    return o.residual ? fma(o.beta, residual.get(o.residual_lies == Lies::kOneRow ? 0 : i, j), x) : x;
  };
  const auto backward = [&](int i, int j) {
    if (!gated) return activate_backward(o.activation, preactivation(i, j), preact.get(i, j));
    const int column = j % o.n;
    const GatedGradient g =
        swiglu_backward(preactivation(i, column), preact.get(i, column), preact.get(i, o.n + column));
    return j < o.n ? g.gate : g.up;
  };
  std::string wrong = c.compare("c", [&](int i, int j) { return o.backward ? backward(i, j) : forward(i, j); });
  if (wrong.empty() && o.z) wrong = z.compare("z", preactivation);
  if (wrong.empty() && !o.swapped) {
    if (o.residual) wrong = residual.check_prefetched(Tile::kPrefetches);
    if (o.backward) wrong = preact.check_prefetched(Tile::kPrefetches);
  }
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
using Ragged = Tile<128, 144, 2, 1, 2>;  // rows instead of boxes
using Three = Tile<192, 64, 2, 1, 3>;
using Turns = gemm::Tile<128, 64, 3, 1, 2, true>;  // pingpong, two slices
using Full = Tile<64, 192, 2, 1, 1>;               // staged in parts of 32 columns
using Broad = Tile<64, 256, 2, 1, 1>;              // staged in parts of 128
using RaggedPair = Tile<128, 144, 2, 2, 2>;
using Pair = gemm::Tile<64, 128, 2, 2, 2, true, true>;  // side by side, pingpong

/// What is done to a sum in its register.
void in_registers(Cases& cases) {
  cases.check("bias",
              [] { return run<bf16, bf16, bf16, K, K, Two>({.m = 136, .n = 200, .k = 72, .bias = Bias::kColumn}); });
  cases.check("bias, two slices, n-major B, split", [] {
    return run<fp16, fp16, fp16, K, MN, Tall>({.m = 264, .n = 72, .k = 136, .bias = Bias::kColumn, .splits = 2});
  });
  cases.check("bias, 192 columns",
              [] { return run<bf16, bf16, bf16, K, K, Full>({.m = 70, .n = 200, .k = 72, .bias = Bias::kColumn}); });
  cases.check("bias in fp32",
              [] { return run<fp16, fp16, float, K, K, Two>({.m = 130, .n = 136, .k = 72, .bias = Bias::kColumn}); });
  cases.check("bias, three consumers",
              [] { return run<bf16, bf16, float, K, K, Three>({.m = 200, .n = 72, .k = 72, .bias = Bias::kColumn}); });
  cases.check("bias, rows of 144",
              [] { return run<bf16, bf16, bf16, K, K, Ragged>({.m = 130, .n = 152, .k = 64, .bias = Bias::kColumn}); });
  cases.check("bias in fp32, rows of 144", [] {
    return run<fp16, fp16, float, K, K, Ragged>({.m = 136, .n = 296, .k = 64, .bias = Bias::kColumn});
  });
  cases.check("bias, C in fp32",
              [] { return run<bf16, float, bf16, K, K, Two>({.m = 130, .n = 136, .k = 72, .bias = Bias::kColumn}); });
  cases.check("bias in fp32, C in fp32, n of 4",
              [] { return run<fp16, float, float, K, K, Small>({.m = 70, .n = 68, .k = 72, .bias = Bias::kColumn}); });
  cases.check("bias, accumulate", [] {
    return run<fp16, float, fp16, K, K, Small>({.m = 70, .n = 72, .k = 72, .bias = Bias::kColumn, .accumulate = true});
  });
  cases.check("alpha",
              [] { return run<bf16, bf16, bf16, K, MN, Turns>({.m = 300, .n = 136, .k = 72, .alpha = 0.375f}); });
  cases.check("alpha, rows of 144",
              [] { return run<bf16, bf16, bf16, K, K, Ragged>({.m = 130, .n = 152, .k = 64, .alpha = 0.375f}); });
  cases.check("bias behind an odd element", [] {
    return run<bf16, bf16, bf16, K, K, Small>({.m = 66, .n = 72, .k = 64, .bias = Bias::kColumn, .bias_first = 1});
  });
  cases.check("alpha and bias", [] {
    return run<bf16, bf16, float, K, K, Two>({.m = 66, .n = 72, .k = 64, .bias = Bias::kColumn, .alpha = 0.5f});
  });
}

void forward(Cases& cases) {
  cases.check("bias, gelu", [] {
    return run<bf16, bf16, bf16, K, K, Two>(
        {.m = 136, .n = 136, .k = 72, .activation = Activation::gelu, .bias = Bias::kColumn});
  });
  cases.check("bias in fp32, relu, z, fp32 output", [] {
    return run<fp16, float, float, K, MN, Small>(
        {.m = 70, .n = 66, .k = 72, .activation = Activation::relu, .bias = Bias::kColumn, .z = true});
  });
  cases.check("alpha, bias per row, silu, residual, two slices", [] {
    return run<fp16, fp16, float, MN, K, Tall>({.m = 264,
                                                .n = 72,
                                                .k = 64,
                                                .activation = Activation::silu,
                                                .bias = Bias::kRow,
                                                .alpha = 0.25f,
                                                .beta = -0.5f,
                                                .residual = true});
  });
  cases.check("alpha, gelu_tanh, residual of one row, rows of 144", [] {
    return run<bf16, bf16, bf16, K, K, Ragged>({.m = 130,
                                                .n = 150,
                                                .k = 64,
                                                .activation = Activation::gelu_tanh,
                                                .alpha = 0.125f,
                                                .residual = true,
                                                .residual_lies = Lies::kOneRow});
  });
  cases.check("transposed residual, n-major B", [] {
    return run<bf16, float, bf16, K, MN, Small>(
        {.m = 65, .n = 40, .k = 72, .beta = 2, .residual = true, .residual_lies = Lies::kTransposed});
  });
  cases.check("residual with gaps between columns", [] {
    return run<bf16, bf16, bf16, K, K, Small>(
        {.m = 65, .n = 72, .k = 72, .residual = true, .residual_lies = Lies::kSpread});
  });
  cases.check("residual with odd rows, split", [] {
    return run<bf16, bf16, bf16, K, K, Small>({.m = 70,
                                               .n = 51,
                                               .k = 200,
                                               .activation = Activation::gelu,
                                               .bias = Bias::kColumn,
                                               .residual = true,
                                               .z = true,
                                               .residual_lies = Lies::kOdd,
                                               .splits = 3});
  });
}

/// 16 bytes of C at a time, by tiles of all kinds.
void in_vectors(Cases& cases) {
  cases.check("bias, gelu, residual, z, pingpong", [] {
    return run<bf16, bf16, float, K, K, Turns>({.m = 300,
                                                .n = 136,
                                                .k = 72,
                                                .activation = Activation::gelu,
                                                .bias = Bias::kColumn,
                                                .beta = 0.5f,
                                                .residual = true,
                                                .z = true,
                                                .residual_lies = Lies::kPadded});
  });
  cases.check("relu, three consumers", [] {
    return run<fp16, fp16, fp16, K, K, Three>(
        {.m = 200, .n = 72, .k = 72, .activation = Activation::relu, .residual = true, .residual_lies = Lies::kOneRow});
  });
  cases.check("silu, 192 columns", [] {
    return run<bf16, bf16, bf16, K, K, Full>(
        {.m = 70, .n = 264, .k = 72, .activation = Activation::silu, .bias = Bias::kColumn, .alpha = 2});
  });
  cases.check("residual, rows of 144", [] {
    return run<bf16, bf16, bf16, K, K, Ragged>({.m = 130, .n = 296, .k = 136, .residual = true, .z = true});
  });
  cases.check("residual and C in fp32, batch", [] {
    return run<bf16, float, float, K, K, Small>(
        {.m = 70, .n = 76, .k = 64, .bias = Bias::kColumn, .residual = true, .batch = 2});
  });
  cases.check("relu, 16 columns", [] {
    return run<fp16, fp16, fp16, K, K, Narrow>({.m = 70, .n = 40, .k = 64, .activation = Activation::relu});
  });
  cases.check("fp32 residual beside 16-bit results",
              [] { return run<bf16, bf16, float, K, K, Two>({.m = 70, .n = 72, .k = 64, .residual = true}); });
  cases.check("backward of silu, rows of 144, sums", [] {
    return run<bf16, bf16, bf16, K, K, Ragged>(
        {.m = 140, .n = 152, .k = 64, .activation = Activation::silu, .backward = true, .sums = true});
  });
  cases.check("backward of swiglu, pingpong, alpha, sums", [] {
    return run<bf16, bf16, bf16, K, K, Turns>(
        {.m = 300, .n = 72, .k = 64, .activation = Activation::swiglu, .alpha = 0.5f, .backward = true, .sums = true});
  });
  cases.check("backward of relu, bias", [] {
    return run<bf16, bf16, bf16, K, K, Small>(
        {.m = 70, .n = 72, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .backward = true});
  });
  cases.check("backward of gelu, bias per row", [] {
    return run<bf16, bf16, float, K, K, Small>({.m = 70,
                                                .n = 72,
                                                .k = 64,
                                                .activation = Activation::gelu,
                                                .bias = Bias::kRow,
                                                .backward = true,
                                                .sums = true});
  });
}

void batches_and_swaps(Cases& cases) {
  cases.check("batch, bias per row, residual, z", [] {
    return run<bf16, bf16, float, K, MN, Small>({.m = 70,
                                                 .n = 48,
                                                 .k = 72,
                                                 .activation = Activation::silu,
                                                 .bias = Bias::kRow,
                                                 .residual = true,
                                                 .z = true,
                                                 .batch = 2});
  });
  cases.check("batch, backward of swiglu, sums, split", [] {
    return run<bf16, bf16, bf16, K, MN, Small>({.m = 40,
                                                .n = 48,
                                                .k = 136,
                                                .activation = Activation::swiglu,
                                                .backward = true,
                                                .sums = true,
                                                .splits = 2,
                                                .batch = 3});
  });
  cases.check("swapped, bias, residual, z", [] {
    return run<bf16, bf16, bf16, K, K, Narrow>({.m = 13,
                                                .n = 72,
                                                .k = 136,
                                                .activation = Activation::gelu,
                                                .bias = Bias::kColumn,
                                                .alpha = 0.5f,
                                                .residual = true,
                                                .z = true,
                                                .swapped = true});
  });
  cases.check("swapped, backward", [] {
    return run<fp16, fp16, fp16, K, K, Narrow>(
        {.m = 13, .n = 72, .k = 64, .activation = Activation::relu, .backward = true, .swapped = true});
  });
}

/// Rows of C that begin anywhere, stored word by word.
void odd_rows(Cases& cases) {
  cases.check("an odd last column, bias", [] {
    return run<bf16, bf16, bf16, K, K, Two>({.m = 133, .n = 205, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd});
  });
  cases.check("an odd last column, bias in fp32, rows of 144, batch", [] {
    return run<fp16, fp16, float, K, K, Ragged>(
        {.m = 75, .n = 171, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd, .batch = 2});
  });
  cases.check("even rows behind an odd element, alpha, two slices", [] {
    return run<bf16, bf16, bf16, K, MN, Tall>({.m = 264, .n = 136, .k = 64, .alpha = 0.375f, .c_first = 1});
  });
  cases.check("a single column",
              [] { return run<fp16, fp16, fp16, K, K, Small>({.m = 67, .n = 1, .k = 64, .c_lies = Lies::kOdd}); });
  cases.check("16 columns and one",
              [] { return run<bf16, bf16, bf16, K, K, Narrow>({.m = 70, .n = 17, .k = 64, .c_lies = Lies::kOdd}); });
  cases.check("three consumers, split", [] {
    return run<bf16, bf16, bf16, K, K, Three>({.m = 200, .n = 129, .k = 136, .c_lies = Lies::kOdd, .splits = 2});
  });
  cases.check("fp32, pingpong, bias", [] {
    return run<bf16, float, bf16, K, K, Turns>(
        {.m = 203, .n = 135, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd});
  });
  cases.check("added to fp32, in a cluster", [] {
    return run<fp16, float, fp16, K, K, Wide>({.m = 131, .n = 101, .k = 64, .accumulate = true, .c_lies = Lies::kOdd});
  });
}

/// Every way out of a cluster of two where C ends with its first tile: the second has no columns, or no rows, of its
/// own.
template <class Tile>
void half_a_cluster(Cases& cases, const char* where, int m, int n) {
  const int odd = n - 7, k = 72, in_two = 136;
  const auto rounded = [&](const char* what, const Options& o) {
    cases.check(emu::format("%s: %s", where, what), [&] { return run<bf16, bf16, bf16, K, K, Tile>(o); });
  };
  const auto in_floats = [&](const char* what, const Options& o) {
    cases.check(emu::format("%s: %s", where, what), [&] { return run<bf16, float, bf16, K, K, Tile>(o); });
  };
  rounded("alpha", {.m = m, .n = n, .k = k, .alpha = 0.5f});
  rounded("bias", {.m = m, .n = n, .k = k, .bias = Bias::kColumn, .batch = 2});
  rounded("odd", {.m = m, .n = odd, .k = k, .c_lies = Lies::kOdd});
  rounded("odd, bias, split, batch",
          {.m = m, .n = odd, .k = in_two, .bias = Bias::kColumn, .c_lies = Lies::kOdd, .splits = 2, .batch = 2});
  rounded("gelu, z, residual, batch", {.m = m,
                                       .n = n,
                                       .k = k,
                                       .activation = Activation::gelu,
                                       .bias = Bias::kColumn,
                                       .residual = true,
                                       .z = true,
                                       .batch = 2});
  rounded(
      "odd, gelu, z, split",
      {.m = m, .n = odd, .k = in_two, .activation = Activation::gelu, .z = true, .c_lies = Lies::kOdd, .splits = 2});
  rounded("swiglu, z",
          {.m = m, .n = n, .k = k, .activation = Activation::swiglu, .bias = Bias::kColumn, .z = true, .batch = 2});
  rounded(
      "odd, swiglu, split",
      {.m = m, .n = 2 * (n / 2 - 1), .k = in_two, .activation = Activation::swiglu, .c_lies = Lies::kOdd, .splits = 2});
  for (const Activation activation : {Activation::relu, Activation::swiglu}) {
    const Options backward{.m = m, .n = n, .k = in_two, .activation = activation, .backward = true, .sums = true};
    rounded("backward", backward);
    Options o = backward;
    o.splits = 2, o.batch = 2;
    rounded("backward, split, batch", o);
    o = backward;
    o.n = odd, o.c_lies = Lies::kOdd;
    rounded("odd, backward", o);
  }
  in_floats("fp32", {.m = m, .n = n, .k = k, .bias = Bias::kColumn});
  in_floats("odd, fp32", {.m = m, .n = odd, .k = k, .c_lies = Lies::kOdd});
  in_floats("odd, fp32, relu", {.m = m, .n = odd, .k = k, .activation = Activation::relu, .c_lies = Lies::kOdd});
  in_floats("added to fp32", {.m = m, .n = n, .k = k, .accumulate = true, .batch = 2});
  in_floats("odd, added to fp32, split",
            {.m = m, .n = odd, .k = in_two, .accumulate = true, .c_lies = Lies::kOdd, .splits = 2});
}

void beside_c(Cases& cases) {
  half_a_cluster<Pair>(cases, "a tile beside C", 70, 40);
  half_a_cluster<Pair>(cases, "the fourth tile beside C", 40, 296);
  half_a_cluster<Wide>(cases, "a tile below C", 40, 136);
  cases.check("swapped, a tile beside C", [] {
    return run<bf16, bf16, bf16, K, K, Pair>(
        {.m = 13, .n = 72, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .swapped = true});
  });
  cases.check("rows of 144 below C",
              [] { return run<bf16, bf16, bf16, K, K, RaggedPair>({.m = 70, .n = 152, .k = 64, .alpha = 0.5f}); });
  cases.check("odd rows of 144 below C", [] {
    return run<bf16, bf16, bf16, K, K, RaggedPair>({.m = 70, .n = 151, .k = 64, .c_lies = Lies::kOdd});
  });
  // Parts of a tile, as they are staged.
  for (const int n : {33, 65, 129, 257}) {
    cases.check(emu::format("%d columns in parts of 64", n), [&] {
      return run<bf16, bf16, bf16, K, K, Full>(
          {.m = 70, .n = n, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd, .batch = 2});
    });
  }
  cases.check("77 columns in parts of 128",
              [] { return run<bf16, bf16, bf16, K, K, Broad>({.m = 70, .n = 77, .k = 64, .c_lies = Lies::kOdd}); });
  cases.check("128 columns behind an odd element in parts of 128",
              [] { return run<bf16, bf16, bf16, K, K, Broad>({.m = 70, .n = 128, .k = 64, .c_first = 1}); });
  cases.check("40 columns in parts of 128, bias",
              [] { return run<bf16, bf16, bf16, K, K, Broad>({.m = 70, .n = 40, .k = 64, .bias = Bias::kColumn}); });
  cases.check("33 columns of fp32 in parts of 64", [] {
    return run<bf16, float, bf16, K, K, Two>({.m = 70, .n = 33, .k = 64, .accumulate = true, .c_lies = Lies::kOdd});
  });
}

void unaligned(Cases& cases) {
  cases.check("odd rows of C",
              [] { return run<bf16, bf16, bf16, K, K, Two>({.m = 130, .n = 77, .k = 72, .c_lies = Lies::kOdd}); });
  cases.check("rows of C that end within 16 bytes",
              [] { return run<bf16, bf16, bf16, K, K, Small>({.m = 66, .n = 68, .k = 72, .c_lies = Lies::kPadded}); });
  cases.check("C behind an odd element, bias", [] {
    return run<fp16, fp16, fp16, K, K, Small>({.m = 66, .n = 64, .k = 64, .bias = Bias::kColumn, .c_first = 1});
  });
  cases.check("transposed C in fp32", [] {
    return run<bf16, float, bf16, K, MN, Small>({.m = 66, .n = 72, .k = 64, .c_lies = Lies::kTransposed});
  });
  cases.check("C of the other 16-bit type",
              [] { return run<bf16, fp16, bf16, K, K, Small>({.m = 66, .n = 72, .k = 64}); });
  cases.check("accumulate into odd rows", [] {
    return run<bf16, float, bf16, MN, MN, Small>(
        {.m = 72, .n = 72, .k = 64, .alpha = 0.5f, .accumulate = true, .c_lies = Lies::kOdd});
  });
}

void accumulation(Cases& cases) {
  cases.check("accumulate with alpha", [] {
    return run<fp16, float, fp16, MN, MN, Wide>({.m = 136, .n = 136, .k = 72, .alpha = 0.5f, .accumulate = true});
  });
  cases.check("accumulate, split", [] {
    return run<bf16, float, bf16, MN, MN, Small>(
        {.m = 72, .n = 72, .k = 136, .alpha = 0.5f, .accumulate = true, .splits = 2});
  });
}

void swiglu_cases(Cases& cases) {
  cases.check("swiglu, bias, z", [] {
    return run<bf16, bf16, float, K, K, Two>(
        {.m = 136, .n = 2 * 72, .k = 72, .activation = Activation::swiglu, .bias = Bias::kColumn, .z = true});
  });
  cases.check("swiglu, n-major B, fp32", [] {
    return run<fp16, float, fp16, K, MN, Two>({.m = 130, .n = 2 * 136, .k = 72, .activation = Activation::swiglu});
  });
  cases.check("swiglu in a cluster", [] {
    return run<bf16, bf16, bf16, K, K, Wide>(
        {.m = 130, .n = 2 * 72, .k = 136, .activation = Activation::swiglu, .residual = true});
  });
  cases.check("swiglu in a cluster, n-major B", [] {
    return run<bf16, bf16, bf16, MN, MN, Wide>({.m = 136, .n = 2 * 72, .k = 72, .activation = Activation::swiglu});
  });
  cases.check("swiglu, odd width, z, split", [] {
    return run<fp16, fp16, fp16, K, K, Two>({.m = 70,
                                             .n = 2 * 27,
                                             .k = 136,
                                             .activation = Activation::swiglu,
                                             .bias = Bias::kColumn,
                                             .z = true,
                                             .c_lies = Lies::kOdd,
                                             .splits = 2});
  });
}

void backward(Cases& cases) {
  cases.check("backward of gelu, sums", [] {
    return run<bf16, bf16, bf16, K, MN, Two>(
        {.m = 150, .n = 136, .k = 72, .activation = Activation::gelu, .backward = true, .sums = true});
  });
  cases.check("backward of relu, two slices, sums", [] {
    return run<fp16, fp16, fp16, K, MN, Tall>(
        {.m = 260, .n = 72, .k = 64, .activation = Activation::relu, .backward = true, .sums = true});
  });
  cases.check("backward of silu in fp32", [] {
    return run<fp16, float, fp16, K, K, Small>(
        {.m = 66, .n = 70, .k = 64, .activation = Activation::silu, .backward = true});
  });
  cases.check("backward of gelu_tanh, split, sums", [] {
    return run<bf16, bf16, bf16, K, MN, Small>(
        {.m = 50, .n = 72, .k = 136, .activation = Activation::gelu_tanh, .backward = true, .sums = true, .splits = 2});
  });
  cases.check("no activation, sums", [] {
    return run<bf16, bf16, bf16, K, MN, Small>({.m = 70, .n = 72, .k = 72, .backward = true, .sums = true});
  });
  cases.check("backward of swiglu, sums", [] {
    return run<bf16, bf16, bf16, K, MN, Two>(
        {.m = 136, .n = 136, .k = 72, .activation = Activation::swiglu, .backward = true, .sums = true});
  });
  cases.check("backward of swiglu, odd width, split", [] {
    return run<fp16, fp16, fp16, K, K, Small>({.m = 66,
                                               .n = 35,
                                               .k = 136,
                                               .activation = Activation::swiglu,
                                               .backward = true,
                                               .sums = true,
                                               .c_lies = Lies::kOdd,
                                               .splits = 2});
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("gemm_epilogue", ak::test::Seeds(argc, argv, 3));
  ak::test::in_registers(cases);
  ak::test::forward(cases);
  ak::test::in_vectors(cases);
  ak::test::batches_and_swaps(cases);
  ak::test::odd_rows(cases);
  ak::test::beside_c(cases);
  ak::test::unaligned(cases);
  ak::test::accumulation(cases);
  ak::test::swiglu_cases(cases);
  ak::test::backward(cases);
  return cases.finish();
}
