// The epilogue of gemm_sm90 in registers, and for operands of every kind and place.
#include "epilogue_problem.h"

namespace ak::test::epilogue {
namespace {

template <class T, class Out, class Side, Major kMajorA, Major kMajorB, class Tile>
void check(Cases& cases, const std::string& title, const Options& o) {
  cases.check(title, [&] { return run<T, Out, Side, kMajorA, kMajorB, Tile>(o); });
}

/// The epilogue of a sum in its register.
void in_registers(Cases& cases) {
  check<bf16, bf16, bf16, K, K, Two>(cases, "bias", {.m = 136, .n = 200, .k = 72, .bias = Bias::kColumn});
  check<fp16, fp16, fp16, K, MN, Tall>(cases, "bias, two slices, n-major B, split",
                                       {.m = 264, .n = 72, .k = 136, .bias = Bias::kColumn, .splits = 2});
  check<bf16, bf16, bf16, K, K, Full>(cases, "bias, 192 columns", {.m = 70, .n = 200, .k = 72, .bias = Bias::kColumn});
  check<fp16, fp16, float, K, K, Two>(cases, "bias in fp32", {.m = 130, .n = 136, .k = 72, .bias = Bias::kColumn});
  check<bf16, bf16, float, K, K, Three>(cases, "bias, three consumers",
                                        {.m = 200, .n = 72, .k = 72, .bias = Bias::kColumn});
  check<bf16, bf16, bf16, K, K, Ragged>(cases, "bias, rows of 144",
                                        {.m = 130, .n = 152, .k = 64, .bias = Bias::kColumn});
  check<fp16, fp16, float, K, K, Ragged>(cases, "bias in fp32, rows of 144",
                                         {.m = 136, .n = 296, .k = 64, .bias = Bias::kColumn});
  check<bf16, float, bf16, K, K, Two>(cases, "bias, C in fp32", {.m = 130, .n = 136, .k = 72, .bias = Bias::kColumn});
  check<fp16, float, float, K, K, Small>(cases, "bias in fp32, C in fp32, n of 4",
                                         {.m = 70, .n = 68, .k = 72, .bias = Bias::kColumn});
  check<fp16, float, fp16, K, K, Small>(cases, "bias, accumulate",
                                        {.m = 70, .n = 72, .k = 72, .bias = Bias::kColumn, .accumulate = true});
  check<bf16, bf16, bf16, K, MN, Turns>(cases, "alpha", {.m = 300, .n = 136, .k = 72, .alpha = 0.375f});
  check<bf16, bf16, bf16, K, K, Ragged>(cases, "alpha, rows of 144", {.m = 130, .n = 152, .k = 64, .alpha = 0.375f});
  check<bf16, bf16, bf16, K, K, Small>(cases, "bias after an odd element",
                                       {.m = 66, .n = 72, .k = 64, .bias = Bias::kColumn, .bias_first = 1});
  check<bf16, bf16, float, K, K, Two>(cases, "alpha and bias",
                                      {.m = 66, .n = 72, .k = 64, .bias = Bias::kColumn, .alpha = 0.5f});
}

void forward(Cases& cases) {
  check<bf16, bf16, bf16, K, K, Two>(
      cases, "bias, gelu", {.m = 136, .n = 136, .k = 72, .activation = Activation::gelu, .bias = Bias::kColumn});
  check<fp16, float, float, K, MN, Small>(
      cases, "bias in fp32, relu, z, fp32 output",
      {.m = 70, .n = 66, .k = 72, .activation = Activation::relu, .bias = Bias::kColumn, .z = true});
  check<fp16, fp16, float, MN, K, Tall>(cases, "alpha, bias per row, silu, residual, two slices",
                                        {.m = 264,
                                         .n = 72,
                                         .k = 64,
                                         .activation = Activation::silu,
                                         .bias = Bias::kRow,
                                         .alpha = 0.25f,
                                         .beta = -0.5f,
                                         .residual = true});
  check<bf16, bf16, bf16, K, K, Ragged>(cases, "alpha, gelu_tanh, residual of one row, rows of 144",
                                        {.m = 130,
                                         .n = 150,
                                         .k = 64,
                                         .activation = Activation::gelu_tanh,
                                         .alpha = 0.125f,
                                         .residual = true,
                                         .residual_lies = Lies::kOneRow});
  check<bf16, float, bf16, K, MN, Small>(
      cases, "transposed residual, n-major B",
      {.m = 65, .n = 40, .k = 72, .beta = 2, .residual = true, .residual_lies = Lies::kTransposed});
  check<bf16, bf16, bf16, K, K, Small>(cases, "residual with gaps between columns",
                                       {.m = 65, .n = 72, .k = 72, .residual = true, .residual_lies = Lies::kSpread});
  check<bf16, bf16, bf16, K, K, Small>(cases, "residual with odd rows, split",
                                       {.m = 70,
                                        .n = 51,
                                        .k = 200,
                                        .activation = Activation::gelu,
                                        .bias = Bias::kColumn,
                                        .residual = true,
                                        .z = true,
                                        .residual_lies = Lies::kOdd,
                                        .splits = 3});
}

/// Operands of all kinds, by tiles of all kinds.
void operands(Cases& cases) {
  check<bf16, bf16, float, K, K, Turns>(cases, "bias, gelu, residual, z, pingpong",
                                        {.m = 300,
                                         .n = 136,
                                         .k = 72,
                                         .activation = Activation::gelu,
                                         .bias = Bias::kColumn,
                                         .beta = 0.5f,
                                         .residual = true,
                                         .z = true,
                                         .residual_lies = Lies::kPadded});
  check<fp16, fp16, fp16, K, K, Three>(
      cases, "relu, three consumers",
      {.m = 200, .n = 72, .k = 72, .activation = Activation::relu, .residual = true, .residual_lies = Lies::kOneRow});
  check<bf16, bf16, bf16, K, K, Full>(
      cases, "silu, 192 columns",
      {.m = 70, .n = 264, .k = 72, .activation = Activation::silu, .bias = Bias::kColumn, .alpha = 2});
  check<bf16, bf16, bf16, K, K, Ragged>(cases, "residual, rows of 144",
                                        {.m = 130, .n = 296, .k = 136, .residual = true, .z = true});
  check<bf16, float, float, K, K, Small>(
      cases, "residual and C in fp32, batch",
      {.m = 70, .n = 76, .k = 64, .bias = Bias::kColumn, .residual = true, .batch = 2});
  check<fp16, fp16, fp16, K, MN, Narrow>(cases, "relu, 16 columns",
                                         {.m = 70, .n = 40, .k = 64, .activation = Activation::relu});
  check<bf16, bf16, float, K, K, Two>(cases, "fp32 residual beside 16-bit results",
                                      {.m = 70, .n = 72, .k = 64, .residual = true});
  check<bf16, bf16, bf16, K, K, Ragged>(
      cases, "backward of silu, rows of 144, sums",
      {.m = 140, .n = 152, .k = 64, .activation = Activation::silu, .backward = true, .sums = true});
  check<bf16, bf16, bf16, K, K, Turns>(
      cases, "backward of swiglu, pingpong, alpha, sums",
      {.m = 300, .n = 72, .k = 64, .activation = Activation::swiglu, .alpha = 0.5f, .backward = true, .sums = true});
  check<bf16, bf16, bf16, K, K, Small>(
      cases, "backward of relu, bias",
      {.m = 70, .n = 72, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .backward = true});
  check<bf16, bf16, float, K, K, Small>(
      cases, "backward of gelu, bias per row",
      {.m = 70, .n = 72, .k = 64, .activation = Activation::gelu, .bias = Bias::kRow, .backward = true, .sums = true});
}

void batches_and_swaps(Cases& cases) {
  check<bf16, bf16, float, K, MN, Small>(cases, "batch, bias per row, residual, z",
                                         {.m = 70,
                                          .n = 48,
                                          .k = 72,
                                          .activation = Activation::silu,
                                          .bias = Bias::kRow,
                                          .residual = true,
                                          .z = true,
                                          .batch = 2});
  check<bf16, bf16, bf16, K, MN, Small>(cases, "batch, backward of swiglu, sums, split",
                                        {.m = 40,
                                         .n = 48,
                                         .k = 136,
                                         .activation = Activation::swiglu,
                                         .backward = true,
                                         .sums = true,
                                         .splits = 2,
                                         .batch = 3});
  check<bf16, bf16, bf16, K, K, Narrow>(cases, "swapped, bias, residual, z",
                                        {.m = 13,
                                         .n = 72,
                                         .k = 136,
                                         .activation = Activation::gelu,
                                         .bias = Bias::kColumn,
                                         .alpha = 0.5f,
                                         .residual = true,
                                         .z = true,
                                         .swapped = true});
  check<fp16, fp16, fp16, K, K, Narrow>(
      cases, "swapped, backward",
      {.m = 13, .n = 72, .k = 64, .activation = Activation::relu, .backward = true, .swapped = true});
}

/// Rows of C that begin anywhere, stored word by word.
void odd_rows(Cases& cases) {
  check<bf16, bf16, bf16, K, K, Two>(cases, "an odd last column, bias",
                                     {.m = 133, .n = 205, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd});
  check<fp16, fp16, float, K, K, Ragged>(
      cases, "an odd last column, bias in fp32, rows of 144, batch",
      {.m = 75, .n = 171, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd, .batch = 2});
  check<bf16, bf16, bf16, K, MN, Tall>(cases, "even rows after an odd element, alpha, two slices",
                                       {.m = 264, .n = 136, .k = 64, .alpha = 0.375f, .c_first = 1});
  check<fp16, fp16, fp16, K, K, Small>(cases, "a single column", {.m = 67, .n = 1, .k = 64, .c_lies = Lies::kOdd});
  check<bf16, bf16, bf16, K, K, Narrow>(cases, "16 columns and one", {.m = 70, .n = 17, .k = 64, .c_lies = Lies::kOdd});
  check<bf16, bf16, bf16, K, K, Three>(cases, "three consumers, split",
                                       {.m = 200, .n = 129, .k = 136, .c_lies = Lies::kOdd, .splits = 2});
  check<bf16, float, bf16, K, K, Turns>(cases, "fp32, pingpong, bias",
                                        {.m = 203, .n = 135, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd});
  check<fp16, float, fp16, K, K, Wide>(cases, "added to fp32, in a cluster",
                                       {.m = 131, .n = 101, .k = 64, .accumulate = true, .c_lies = Lies::kOdd});
}

/// Every way out of a cluster of two where C ends with its first tile: the second has no columns, or no rows, of its
/// own.
template <class Tile>
void half_a_cluster(Cases& cases, const char* where, int m, int n) {
  const int odd = n - 7, k = 72, in_two = 136;
  const auto rounded = [&](const char* what, const Options& o) {
    check<bf16, bf16, bf16, K, K, Tile>(cases, emu::format("%s: %s", where, what), o);
  };
  const auto in_floats = [&](const char* what, const Options& o) {
    check<bf16, float, bf16, K, K, Tile>(cases, emu::format("%s: %s", where, what), o);
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
  check<bf16, bf16, bf16, K, K, Pair>(
      cases, "swapped, a tile beside C",
      {.m = 13, .n = 72, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .swapped = true});
  check<bf16, bf16, bf16, K, K, RaggedPair>(cases, "rows of 144 below C", {.m = 70, .n = 152, .k = 64, .alpha = 0.5f});
  check<bf16, bf16, bf16, K, K, RaggedPair>(cases, "odd rows of 144 below C",
                                            {.m = 70, .n = 151, .k = 64, .c_lies = Lies::kOdd});
  // Parts of a tile, as they are staged.
  for (const int n : {33, 65, 129, 257}) {
    check<bf16, bf16, bf16, K, K, Full>(
        cases, emu::format("%d columns in parts of 64", n),
        {.m = 70, .n = n, .k = 64, .bias = Bias::kColumn, .c_lies = Lies::kOdd, .batch = 2});
  }
  check<bf16, bf16, bf16, K, K, Broad>(cases, "77 columns in parts of 128",
                                       {.m = 70, .n = 77, .k = 64, .c_lies = Lies::kOdd});
  check<bf16, bf16, bf16, K, K, Broad>(cases, "128 columns after an odd element in parts of 128",
                                       {.m = 70, .n = 128, .k = 64, .c_first = 1});
  check<bf16, bf16, bf16, K, K, Broad>(cases, "40 columns in parts of 128, bias",
                                       {.m = 70, .n = 40, .k = 64, .bias = Bias::kColumn});
  check<bf16, float, bf16, K, K, Two>(cases, "33 columns of fp32 in parts of 64",
                                      {.m = 70, .n = 33, .k = 64, .accumulate = true, .c_lies = Lies::kOdd});
}

void unaligned(Cases& cases) {
  check<bf16, bf16, bf16, K, K, Two>(cases, "odd rows of C", {.m = 130, .n = 77, .k = 72, .c_lies = Lies::kOdd});
  check<bf16, bf16, bf16, K, K, Small>(cases, "rows of C that end within 16 bytes",
                                       {.m = 66, .n = 68, .k = 72, .c_lies = Lies::kPadded});
  check<fp16, fp16, fp16, K, K, Small>(cases, "C after an odd element, bias",
                                       {.m = 66, .n = 64, .k = 64, .bias = Bias::kColumn, .c_first = 1});
  check<bf16, bf16, bf16, K, K, Small>(
      cases, "alpha, bias, relu, z",
      {.m = 66, .n = 72, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .alpha = 0.5f, .z = true});
  check<bf16, bf16, bf16, K, K, Small>(cases, "C after four elements, relu",
                                       {.m = 66, .n = 64, .k = 64, .activation = Activation::relu, .c_first = 4});
  check<bf16, bf16, bf16, K, K, Small>(
      cases, "64 columns in odd rows, relu",
      {.m = 66, .n = 64, .k = 64, .activation = Activation::relu, .c_lies = Lies::kOdd});
  check<bf16, float, bf16, K, MN, Small>(cases, "transposed C in fp32",
                                         {.m = 66, .n = 72, .k = 64, .c_lies = Lies::kTransposed});
  check<bf16, fp16, bf16, K, K, Small>(cases, "C of the other 16-bit type", {.m = 66, .n = 72, .k = 64});
  check<bf16, float, bf16, MN, MN, Small>(
      cases, "accumulate into odd rows",
      {.m = 72, .n = 72, .k = 64, .alpha = 0.5f, .accumulate = true, .c_lies = Lies::kOdd});
}

void accumulation(Cases& cases) {
  check<fp16, float, fp16, MN, MN, Wide>(cases, "accumulate with alpha",
                                         {.m = 136, .n = 136, .k = 72, .alpha = 0.5f, .accumulate = true});
  check<bf16, float, bf16, MN, MN, Small>(cases, "accumulate, split",
                                          {.m = 72, .n = 72, .k = 136, .alpha = 0.5f, .accumulate = true, .splits = 2});
}

void swiglu_cases(Cases& cases) {
  check<bf16, bf16, float, K, K, Two>(
      cases, "swiglu, bias, z",
      {.m = 136, .n = 2 * 72, .k = 72, .activation = Activation::swiglu, .bias = Bias::kColumn, .z = true});
  check<fp16, float, fp16, K, MN, Two>(cases, "swiglu, n-major B, fp32",
                                       {.m = 130, .n = 2 * 136, .k = 72, .activation = Activation::swiglu});
  check<bf16, bf16, bf16, K, K, Wide>(
      cases, "swiglu in a cluster",
      {.m = 130, .n = 2 * 72, .k = 136, .activation = Activation::swiglu, .residual = true});
  check<bf16, bf16, bf16, MN, MN, Wide>(cases, "swiglu in a cluster, n-major B",
                                        {.m = 136, .n = 2 * 72, .k = 72, .activation = Activation::swiglu});
  check<fp16, fp16, fp16, K, K, Two>(cases, "swiglu, odd width, z, split",
                                     {.m = 70,
                                      .n = 2 * 27,
                                      .k = 136,
                                      .activation = Activation::swiglu,
                                      .bias = Bias::kColumn,
                                      .z = true,
                                      .c_lies = Lies::kOdd,
                                      .splits = 2});
}

void backward(Cases& cases) {
  check<bf16, bf16, bf16, K, MN, Two>(
      cases, "backward of gelu, sums",
      {.m = 150, .n = 136, .k = 72, .activation = Activation::gelu, .backward = true, .sums = true});
  check<fp16, fp16, fp16, K, MN, Tall>(
      cases, "backward of relu, two slices, sums",
      {.m = 260, .n = 72, .k = 64, .activation = Activation::relu, .backward = true, .sums = true});
  check<fp16, float, fp16, K, K, Small>(cases, "backward of silu in fp32",
                                        {.m = 66, .n = 70, .k = 64, .activation = Activation::silu, .backward = true});
  check<bf16, bf16, bf16, K, MN, Small>(
      cases, "backward of gelu_tanh, split, sums",
      {.m = 50, .n = 72, .k = 136, .activation = Activation::gelu_tanh, .backward = true, .sums = true, .splits = 2});
  check<bf16, bf16, bf16, K, MN, Small>(cases, "no activation, sums",
                                        {.m = 70, .n = 72, .k = 72, .backward = true, .sums = true});
  check<bf16, bf16, bf16, K, MN, Two>(
      cases, "backward of swiglu, sums",
      {.m = 136, .n = 136, .k = 72, .activation = Activation::swiglu, .backward = true, .sums = true});
  check<fp16, fp16, fp16, K, K, Small>(cases, "backward of swiglu, odd width, split",
                                       {.m = 66,
                                        .n = 35,
                                        .k = 136,
                                        .activation = Activation::swiglu,
                                        .backward = true,
                                        .sums = true,
                                        .c_lies = Lies::kOdd,
                                        .splits = 2});
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
