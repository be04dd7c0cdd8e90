// The epilogue of gemm_sm90 in registers, and for operands of every kind and place.
#include "epilogue_problem.h"

namespace ak::test::epilogue {
namespace {

using enum Activation;
using enum Bias;
using enum Lies;

template <class Tile, class T, class Out = T, class Side = T, Major kMajorA = K, Major kMajorB = K>
void check(Cases& cases, const std::string& title, const Options& o) {
  cases.check(title, [&] { return run<T, Out, Side, kMajorA, kMajorB, Tile>(o); });
}

/// The epilogue of a sum in its register.
void in_registers(Cases& cases) {
  check<Two, bf16>(cases, "bias", {.mnk = {136, 200, 72}, .bias = kColumn});
  check<Tall, fp16, fp16, fp16, K, MN>(cases, "bias, two slices, n-major B, split",
                                       {.mnk = {264, 72, 136}, .bias = kColumn, .splits = 2});
  check<Full, bf16>(cases, "bias, 192 columns", {.mnk = {70, 200, 72}, .bias = kColumn});
  check<Two, fp16, fp16, float>(cases, "bias in fp32", {.mnk = {130, 136, 72}, .bias = kColumn});
  check<Three, bf16, bf16, float>(cases, "bias, three consumers", {.mnk = {200, 72, 72}, .bias = kColumn});
  check<Ragged, bf16>(cases, "bias, rows of 144", {.mnk = {130, 152, 64}, .bias = kColumn});
  check<Ragged, fp16, fp16, float>(cases, "bias in fp32, rows of 144", {.mnk = {136, 296, 64}, .bias = kColumn});
  check<Two, bf16, float>(cases, "bias, C in fp32", {.mnk = {130, 136, 72}, .bias = kColumn});
  check<Small, fp16, float, float>(cases, "bias in fp32, C in fp32, n of 4", {.mnk = {70, 68, 72}, .bias = kColumn});
  check<Small, fp16, float>(cases, "bias, accumulate", {.mnk = {70, 72, 72}, .bias = kColumn, .accumulate = true});
  check<Turns, bf16, bf16, bf16, K, MN>(cases, "alpha", {.mnk = {300, 136, 72}, .alpha = 0.375f});
  check<Ragged, bf16>(cases, "alpha, rows of 144", {.mnk = {130, 152, 64}, .alpha = 0.375f});
  check<Small, bf16>(cases, "bias after an odd element", {.mnk = {66, 72, 64}, .bias = kColumn, .bias_first = 1});
  check<Two, bf16, bf16, float>(cases, "alpha and bias", {.mnk = {66, 72, 64}, .bias = kColumn, .alpha = 0.5f});
}

void forward(Cases& cases) {
  check<Two, bf16>(cases, "bias, gelu", {.mnk = {136, 136, 72}, .activation = gelu, .bias = kColumn});
  check<Small, fp16, float, float, K, MN>(cases, "bias in fp32, relu, z, fp32 output",
                                          {.mnk = {70, 66, 72}, .activation = relu, .bias = kColumn, .z = true});
  check<Tall, fp16, fp16, float, MN>(
      cases, "alpha, bias per row, silu, residual, two slices",
      {.mnk = {264, 72, 64}, .activation = silu, .bias = kRow, .alpha = 0.25f, .beta = -0.5f, .residual = true});
  check<Ragged, bf16>(
      cases, "alpha, gelu_tanh, residual of one row, rows of 144",
      {.mnk = {130, 150, 64}, .activation = gelu_tanh, .alpha = 0.125f, .residual = true, .residual_lies = kOneRow});
  check<Small, bf16, float, bf16, K, MN>(
      cases, "transposed residual, n-major B",
      {.mnk = {65, 40, 72}, .beta = 2, .residual = true, .residual_lies = kTransposed});
  check<Small, bf16>(cases, "residual with gaps between columns",
                     {.mnk = {65, 72, 72}, .residual = true, .residual_lies = kSpread});
  check<Small, bf16>(cases, "residual with odd rows, split",
                     {.mnk = {70, 51, 200},
                      .activation = gelu,
                      .bias = kColumn,
                      .residual = true,
                      .z = true,
                      .residual_lies = kOdd,
                      .splits = 3});
}

/// Operands of all kinds, by tiles of all kinds.
void operands(Cases& cases) {
  check<Turns, bf16, bf16, float>(cases, "bias, gelu, residual, z, pingpong",
                                  {.mnk = {300, 136, 72},
                                   .activation = gelu,
                                   .bias = kColumn,
                                   .beta = 0.5f,
                                   .residual = true,
                                   .z = true,
                                   .residual_lies = kPadded});
  check<Three, fp16>(cases, "relu, three consumers",
                     {.mnk = {200, 72, 72}, .activation = relu, .residual = true, .residual_lies = kOneRow});
  check<Full, bf16>(cases, "silu, 192 columns",
                    {.mnk = {70, 264, 72}, .activation = silu, .bias = kColumn, .alpha = 2});
  check<Ragged, bf16>(cases, "residual, rows of 144", {.mnk = {130, 296, 136}, .residual = true, .z = true});
  check<Small, bf16, float, float>(cases, "residual and C in fp32, batch",
                                   {.mnk = {70, 76, 64}, .bias = kColumn, .residual = true, .batch = 2});
  check<Narrow, fp16, fp16, fp16, K, MN>(cases, "relu, 16 columns", {.mnk = {70, 40, 64}, .activation = relu});
  check<Two, bf16, bf16, float>(cases, "fp32 residual beside 16-bit results", {.mnk = {70, 72, 64}, .residual = true});
  check<Ragged, bf16>(cases, "backward of silu, rows of 144, sums",
                      {.mnk = {140, 152, 64}, .activation = silu, .backward = true, .sums = true});
  check<Turns, bf16>(cases, "backward of swiglu, pingpong, alpha, sums",
                     {.mnk = {300, 72, 64}, .activation = swiglu, .alpha = 0.5f, .backward = true, .sums = true});
  check<Small, bf16>(cases, "backward of relu, bias",
                     {.mnk = {70, 72, 64}, .activation = relu, .bias = kColumn, .backward = true});
  check<Small, bf16, bf16, float>(
      cases, "backward of gelu, bias per row",
      {.mnk = {70, 72, 64}, .activation = gelu, .bias = kRow, .backward = true, .sums = true});
}

void batches_and_swaps(Cases& cases) {
  check<Small, bf16, bf16, float, K, MN>(
      cases, "batch, bias per row, residual, z",
      {.mnk = {70, 48, 72}, .activation = silu, .bias = kRow, .residual = true, .z = true, .batch = 2});
  check<Small, bf16, bf16, bf16, K, MN>(
      cases, "batch, backward of swiglu, sums, split",
      {.mnk = {40, 48, 136}, .activation = swiglu, .backward = true, .sums = true, .splits = 2, .batch = 3});
  check<Narrow, bf16>(cases, "swapped, bias, residual, z",
                      {.mnk = {13, 72, 136},
                       .activation = gelu,
                       .bias = kColumn,
                       .alpha = 0.5f,
                       .residual = true,
                       .z = true,
                       .swapped = true});
  check<Narrow, fp16>(cases, "swapped, backward",
                      {.mnk = {13, 72, 64}, .activation = relu, .backward = true, .swapped = true});
}

/// Rows of C that begin anywhere, stored word by word.
void odd_rows(Cases& cases) {
  check<Two, bf16>(cases, "an odd last column, bias", {.mnk = {133, 205, 64}, .bias = kColumn, .c_lies = kOdd});
  check<Ragged, fp16, fp16, float>(cases, "an odd last column, bias in fp32, rows of 144, batch",
                                   {.mnk = {75, 171, 64}, .bias = kColumn, .c_lies = kOdd, .batch = 2});
  check<Tall, bf16, bf16, bf16, K, MN>(cases, "even rows after an odd element, alpha, two slices",
                                       {.mnk = {264, 136, 64}, .alpha = 0.375f, .c_first = 1});
  check<Small, fp16>(cases, "a single column", {.mnk = {67, 1, 64}, .c_lies = kOdd});
  check<Narrow, bf16>(cases, "16 columns and one", {.mnk = {70, 17, 64}, .c_lies = kOdd});
  check<Three, bf16>(cases, "three consumers, split", {.mnk = {200, 129, 136}, .c_lies = kOdd, .splits = 2});
  check<Turns, bf16, float>(cases, "fp32, pingpong, bias", {.mnk = {203, 135, 64}, .bias = kColumn, .c_lies = kOdd});
  check<Wide, fp16, float>(cases, "added to fp32, in a cluster",
                           {.mnk = {131, 101, 64}, .accumulate = true, .c_lies = kOdd});
}

/// Every way out of a cluster of two where C ends with its first tile: the second has no columns, or no rows, of its
/// own.
template <class Tile>
void half_a_cluster(Cases& cases, const char* where, int m, int n) {
  const int odd = n - 7, k = 72, in_two = 136;
  const auto rounded = [&](const char* what, const Options& o) {
    check<Tile, bf16>(cases, emu::format("%s: %s", where, what), o);
  };
  const auto in_floats = [&](const char* what, const Options& o) {
    check<Tile, bf16, float>(cases, emu::format("%s: %s", where, what), o);
  };
  rounded("alpha", {.mnk = {m, n, k}, .alpha = 0.5f});
  rounded("bias", {.mnk = {m, n, k}, .bias = kColumn, .batch = 2});
  rounded("odd", {.mnk = {m, odd, k}, .c_lies = kOdd});
  rounded("odd, bias, split, batch",
          {.mnk = {m, odd, in_two}, .bias = kColumn, .c_lies = kOdd, .splits = 2, .batch = 2});
  rounded("gelu, z, residual, batch",
          {.mnk = {m, n, k}, .activation = gelu, .bias = kColumn, .residual = true, .z = true, .batch = 2});
  rounded("odd, gelu, z, split", {.mnk = {m, odd, in_two}, .activation = gelu, .z = true, .c_lies = kOdd, .splits = 2});
  rounded("swiglu, z", {.mnk = {m, n, k}, .activation = swiglu, .bias = kColumn, .z = true, .batch = 2});
  rounded("odd, swiglu, split",
          {.mnk = {m, 2 * (n / 2 - 1), in_two}, .activation = swiglu, .c_lies = kOdd, .splits = 2});
  for (const Activation activation : {relu, swiglu}) {
    const Options backward{.mnk = {m, n, in_two}, .activation = activation, .backward = true, .sums = true};
    rounded("backward", backward);
    Options o = backward;
    o.splits = 2, o.batch = 2;
    rounded("backward, split, batch", o);
    o = backward;
    o.mnk.n = odd, o.c_lies = kOdd;
    rounded("odd, backward", o);
  }
  in_floats("fp32", {.mnk = {m, n, k}, .bias = kColumn});
  in_floats("odd, fp32", {.mnk = {m, odd, k}, .c_lies = kOdd});
  in_floats("odd, fp32, relu", {.mnk = {m, odd, k}, .activation = relu, .c_lies = kOdd});
  in_floats("added to fp32", {.mnk = {m, n, k}, .accumulate = true, .batch = 2});
  in_floats("odd, added to fp32, split", {.mnk = {m, odd, in_two}, .accumulate = true, .c_lies = kOdd, .splits = 2});
}

void beside_c(Cases& cases) {
  half_a_cluster<Pair>(cases, "a tile beside C", 70, 40);
  half_a_cluster<Pair>(cases, "the fourth tile beside C", 40, 296);
  half_a_cluster<Wide>(cases, "a tile below C", 40, 136);
  check<Pair, bf16>(cases, "swapped, a tile beside C",
                    {.mnk = {13, 72, 64}, .activation = relu, .bias = kColumn, .swapped = true});
  check<RaggedPair, bf16>(cases, "rows of 144 below C", {.mnk = {70, 152, 64}, .alpha = 0.5f});
  check<RaggedPair, bf16>(cases, "odd rows of 144 below C", {.mnk = {70, 151, 64}, .c_lies = kOdd});
  // Parts of a tile, as they are staged.
  for (const int n : {33, 65, 129, 257}) {
    check<Full, bf16>(cases, emu::format("%d columns in parts of 64", n),
                      {.mnk = {70, n, 64}, .bias = kColumn, .c_lies = kOdd, .batch = 2});
  }
  check<Broad, bf16>(cases, "77 columns in parts of 128", {.mnk = {70, 77, 64}, .c_lies = kOdd});
  check<Broad, bf16>(cases, "128 columns after an odd element in parts of 128", {.mnk = {70, 128, 64}, .c_first = 1});
  check<Broad, bf16>(cases, "40 columns in parts of 128, bias", {.mnk = {70, 40, 64}, .bias = kColumn});
  check<Two, bf16, float>(cases, "33 columns of fp32 in parts of 64",
                          {.mnk = {70, 33, 64}, .accumulate = true, .c_lies = kOdd});
}

void unaligned(Cases& cases) {
  check<Two, bf16>(cases, "odd rows of C", {.mnk = {130, 77, 72}, .c_lies = kOdd});
  check<Small, bf16>(cases, "rows of C that end within 16 bytes", {.mnk = {66, 68, 72}, .c_lies = kPadded});
  check<Small, fp16>(cases, "C after an odd element, bias", {.mnk = {66, 64, 64}, .bias = kColumn, .c_first = 1});
  check<Small, bf16>(cases, "alpha, bias, relu, z",
                     {.mnk = {66, 72, 64}, .activation = relu, .bias = kColumn, .alpha = 0.5f, .z = true});
  check<Small, bf16>(cases, "C after four elements, relu", {.mnk = {66, 64, 64}, .activation = relu, .c_first = 4});
  check<Small, bf16>(cases, "64 columns in odd rows, relu", {.mnk = {66, 64, 64}, .activation = relu, .c_lies = kOdd});
  check<Small, bf16, float, bf16, K, MN>(cases, "transposed C in fp32", {.mnk = {66, 72, 64}, .c_lies = kTransposed});
  check<Small, bf16, fp16>(cases, "C of the other 16-bit type", {.mnk = {66, 72, 64}});
  check<Small, bf16, float, bf16, MN, MN>(cases, "accumulate into odd rows",
                                          {.mnk = {72, 72, 64}, .alpha = 0.5f, .accumulate = true, .c_lies = kOdd});
}

void accumulation(Cases& cases) {
  check<Wide, fp16, float, fp16, MN, MN>(cases, "accumulate with alpha",
                                         {.mnk = {136, 136, 72}, .alpha = 0.5f, .accumulate = true});
  check<Small, bf16, float, bf16, MN, MN>(cases, "accumulate, split",
                                          {.mnk = {72, 72, 136}, .alpha = 0.5f, .accumulate = true, .splits = 2});
}

void swiglu_cases(Cases& cases) {
  check<Two, bf16, bf16, float>(cases, "swiglu, bias, z",
                                {.mnk = {136, 2 * 72, 72}, .activation = swiglu, .bias = kColumn, .z = true});
  check<Two, fp16, float, fp16, K, MN>(cases, "swiglu, n-major B, fp32",
                                       {.mnk = {130, 2 * 136, 72}, .activation = swiglu});
  check<Wide, bf16>(cases, "swiglu in a cluster", {.mnk = {130, 2 * 72, 136}, .activation = swiglu, .residual = true});
  check<Wide, bf16, bf16, bf16, MN, MN>(cases, "swiglu in a cluster, n-major B",
                                        {.mnk = {136, 2 * 72, 72}, .activation = swiglu});
  check<Two, fp16>(
      cases, "swiglu, odd width, z, split",
      {.mnk = {70, 2 * 27, 136}, .activation = swiglu, .bias = kColumn, .z = true, .c_lies = kOdd, .splits = 2});
}

void backward(Cases& cases) {
  check<Two, bf16, bf16, bf16, K, MN>(cases, "backward of gelu, sums",
                                      {.mnk = {150, 136, 72}, .activation = gelu, .backward = true, .sums = true});
  check<Tall, fp16, fp16, fp16, K, MN>(cases, "backward of relu, two slices, sums",
                                       {.mnk = {260, 72, 64}, .activation = relu, .backward = true, .sums = true});
  check<Small, fp16, float>(cases, "backward of silu in fp32",
                            {.mnk = {66, 70, 64}, .activation = silu, .backward = true});
  check<Small, bf16, bf16, bf16, K, MN>(
      cases, "backward of gelu_tanh, split, sums",
      {.mnk = {50, 72, 136}, .activation = gelu_tanh, .backward = true, .sums = true, .splits = 2});
  check<Small, bf16, bf16, bf16, K, MN>(cases, "no activation, sums",
                                        {.mnk = {70, 72, 72}, .backward = true, .sums = true});
  check<Two, bf16, bf16, bf16, K, MN>(cases, "backward of swiglu, sums",
                                      {.mnk = {136, 136, 72}, .activation = swiglu, .backward = true, .sums = true});
  check<Small, fp16>(
      cases, "backward of swiglu, odd width, split",
      {.mnk = {66, 35, 136}, .activation = swiglu, .backward = true, .sums = true, .c_lies = kOdd, .splits = 2});
}

}  // namespace
}  // namespace ak::test::epilogue

int main(int argc, char** argv) {
  using namespace ak::test;
  using namespace epilogue;
  return check_parts("gemm_epilogue", Seeds(argc, argv, 3),
                     {in_registers, forward, operands, batches_and_swaps, odd_rows, beside_c, unaligned, accumulation,
                      swiglu_cases, backward});
}
