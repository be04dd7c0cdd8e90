// The epilogue of gemm_sm90 in registers, and for operands of every kind and place.
#include "epilogue_problem.h"

namespace ak::test::epilogue {
namespace {

/// The epilogue of a sum in its register.
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

/// Operands of all kinds, by tiles of all kinds.
void operands(Cases& cases) {
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
  cases.check("alpha, bias, relu, z", [] {
    return run<bf16, bf16, bf16, K, K, Small>(
        {.m = 66, .n = 72, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .alpha = 0.5f, .z = true});
  });
  cases.check("C behind four elements, relu", [] {
    return run<bf16, bf16, bf16, K, K, Small>(
        {.m = 66, .n = 64, .k = 64, .activation = Activation::relu, .c_first = 4});
  });
  cases.check("64 columns in odd rows, relu", [] {
    return run<bf16, bf16, bf16, K, K, Small>(
        {.m = 66, .n = 64, .k = 64, .activation = Activation::relu, .c_lies = Lies::kOdd});
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
}  // namespace ak::test::epilogue

int main(int argc, char** argv) {
  ak::test::Cases cases("gemm_epilogue", ak::test::Seeds(argc, argv, 3));
  ak::test::epilogue::in_registers(cases);
  ak::test::epilogue::forward(cases);
  ak::test::epilogue::operands(cases);
  ak::test::epilogue::batches_and_swaps(cases);
  ak::test::epilogue::odd_rows(cases);
  ak::test::epilogue::beside_c(cases);
  ak::test::epilogue::unaligned(cases);
  ak::test::epilogue::accumulation(cases);
  ak::test::epilogue::swiglu_cases(cases);
  ak::test::epilogue::backward(cases);
  return cases.finish();
}
