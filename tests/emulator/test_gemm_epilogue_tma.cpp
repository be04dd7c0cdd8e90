// The epilogue of gemm_sm90 whose operands and results TMA moves in boxes: by tiles of all kinds, over all edges.
#include "epilogue_problem.h"

namespace ak::test::epilogue {
namespace {

using enum Activation;
using enum Bias;
using enum Lies;

/// `o`, which must go through boxes.
template <class Tile, class T, class Out = T, class Side = T, Major kMajorB = K>
void check(Cases& cases, const char* name, Options o) {
  o.tma_epilogue = true;
  cases.check(name, [&] { return run<T, Out, Side, K, kMajorB, Tile>(o); });
}

void forward(Cases& cases) {
  const Options with_gelu{.mnk = {136, 136, 72}, .activation = gelu, .bias = kColumn};
  check<Two, bf16>(cases, "bias, gelu", with_gelu);
  check<Two, fp16, fp16, float>(cases, "fp32 bias, gelu", with_gelu);
  for (const int n : {8, 24, 40, 64, 72, 104, 200, 256, 264}) {
    const Options o{.mnk = {70, n, 72}, .activation = relu, .bias = kColumn, .residual = true};
    check<Broad, bf16>(cases, "bias, relu, residual, 256 columns a tile", o);
    check<Full, fp16, fp16, fp16, MN>(cases, "bias, relu, residual, 192 columns a tile", o);
  }
  for (const int m : {1, 63, 64, 65, 128, 129, 200, 256, 300}) {
    Options o{.mnk = {m, 136, 72}, .activation = silu, .bias = kColumn, .beta = -0.5f};
    o.residual = true, o.residual_lies = kPadded;
    check<Tall, bf16>(cases, "bias, silu, residual, two slices", o);
    check<Turns, bf16>(cases, "bias, silu, residual, pingpong", o);
    check<Three, fp16>(cases, "bias, silu, residual, three consumers", o);
  }
  check<Two, bf16>(cases, "alpha, bias, no activation", {.mnk = {66, 72, 64}, .bias = kColumn, .alpha = 0.5f});
  check<Wide, bf16>(cases, "residual alone, in a cluster", {.mnk = {130, 136, 64}, .residual = true});
  check<Pair, bf16>(cases, "residual, tiles beside each other, batch",
                    {.mnk = {140, 520, 64}, .residual = true, .batch = 2});
  check<Two, bf16>(cases, "bias, one residual for the batch",
                   {.mnk = {140, 136, 64}, .bias = kColumn, .residual = true, .batch = 3, .one_beside = true});
  check<Turns, fp16>(
      cases, "silu, one residual for the batch, split, in turns",
      {.mnk = {300, 136, 200}, .activation = silu, .residual = true, .splits = 2, .batch = 2, .one_beside = true});
  check<Small, bf16, bf16, bf16, MN>(
      cases, "gelu_tanh, residual, split, batch",
      {.mnk = {70, 72, 200}, .activation = gelu_tanh, .residual = true, .splits = 3, .batch = 2});
}

/// The tile of products with little k: two slices a consumer, blocks side by side, consumers in turns.
void in_turns(Cases& cases) {
  for (const int m : {40, 100, 300, 700}) {
    Options o{.mnk = {m, 520, 136}, .activation = gelu, .bias = kColumn, .residual = true};
    check<TallPair, bf16>(cases, "in turns: bias, gelu, residual", o);
    o = {.mnk = {m, 392, 72}, .activation = silu, .backward = true, .sums = true};
    check<TallPair, fp16, fp16, fp16, MN>(cases, "in turns: backward of silu, sums", o);
    o.activation = swiglu;
    check<TallPair, bf16>(cases, "in turns: backward of swiglu, sums", o);
  }
}

/// z leaves first, through the boxes that the residual then needs.
void with_z(Cases& cases) {
  Options o{.mnk = {140, 264, 72}, .activation = gelu, .bias = kColumn, .z = true};
  check<Two, bf16>(cases, "bias, gelu, z", o);
  check<Broad, bf16, bf16, float>(cases, "fp32 bias, gelu, z", o);
  check<Turns, fp16>(cases, "bias, gelu, z, pingpong", o);
  o.residual = true, o.beta = 2;
  check<Tall, bf16>(cases, "bias, gelu, z, residual", o);
  o.splits = 2, o.mnk.k = 200;
  check<Wide, bf16>(cases, "bias, gelu, z, residual, split", o);
  o.batch = 2, o.one_beside = true;
  check<Pair, bf16>(cases, "bias, gelu, z, one residual for the batch, split, in turns", o);
  check<Three, fp16>(cases, "alpha, relu, z", {.mnk = {200, 72, 64}, .activation = relu, .alpha = 0.25f, .z = true});
  check<Small, fp16>(cases, "relu, z, batch", {.mnk = {70, 72, 64}, .activation = relu, .z = true, .batch = 3});
}

void in_floats(Cases& cases) {
  for (const int n : {4, 28, 32, 36, 68, 132}) {
    Options o{.mnk = {70, n, 64}, .activation = relu, .bias = kColumn, .beta = 0.5f};
    o.residual = true;
    check<Two, bf16, float, float>(cases, "fp32: bias, relu, residual", o);
    o.z = true;
    check<Small, bf16, float, float>(cases, "fp32: bias, relu, residual, z", o);
  }
  check<Tall, fp16, float>(cases, "fp32: bias of 16 bits, gelu, two slices",
                           {.mnk = {264, 140, 64}, .activation = gelu, .bias = kColumn});
  check<Two, bf16, float>(cases, "gelu added to fp32",
                          {.mnk = {70, 72, 64}, .activation = gelu, .accumulate = true, .batch = 2});
  check<Two, bf16, float>(cases, "relu added to fp32, split",
                          {.mnk = {200, 72, 200}, .activation = relu, .accumulate = true, .splits = 3});
  check<Two, bf16, float>(cases, "swiglu, fp32",
                          {.mnk = {70, 2 * 76, 64}, .activation = swiglu, .bias = kColumn, .z = true});
}

void gated(Cases& cases) {
  for (const int columns : {8, 32, 40, 64, 72, 136}) {
    Options o{.mnk = {70, 2 * columns, 72}, .activation = swiglu, .bias = kColumn};
    check<Two, bf16>(cases, "bias, swiglu", o);
    o.z = true;
    check<Broad, bf16, bf16, float>(cases, "fp32 bias, swiglu, z", o);
    check<Pair, fp16, fp16, fp16, MN>(cases, "bias, swiglu, z, pingpong", o);
    Options backward{.mnk = {136, columns, 72}, .activation = swiglu, .alpha = 0.5f};
    backward.backward = backward.sums = true;
    check<Two, bf16, bf16, bf16, MN>(cases, "backward of swiglu, sums", backward);
    check<Turns, fp16>(cases, "backward of swiglu, sums, pingpong", backward);
  }
  check<Wide, bf16>(cases, "swiglu, residual, batch",
                    {.mnk = {130, 2 * 72, 136}, .activation = swiglu, .residual = true, .batch = 2});
  check<Three, bf16>(cases, "backward of swiglu, split, sums",
                     {.mnk = {300, 136, 200}, .activation = swiglu, .backward = true, .sums = true, .splits = 2});
}

void backward(Cases& cases) {
  for (const Activation activation : {none, relu, gelu, gelu_tanh, silu}) {
    Options o{.mnk = {150, 136, 72}, .activation = activation, .backward = true, .sums = true};
    check<Two, bf16, bf16, bf16, MN>(cases, "backward, sums", o);
    o.sums = false;
    check<Three, fp16>(cases, "backward, three consumers", o);
  }
  for (const int m : {1, 8, 9, 15, 17, 24, 63, 65, 190, 260}) {
    const Options o{.mnk = {m, 200, 64}, .activation = gelu, .backward = true, .sums = true, .batch = 2};
    check<Tall, bf16>(cases, "backward of gelu, sums, two slices", o);
    check<Full, fp16, fp16, fp16, MN>(cases, "backward of gelu, sums, 192 columns a tile", o);
  }
  Options shared{.mnk = {70, 72, 64}, .activation = silu, .backward = true, .sums = true};
  shared.batch = 2, shared.one_beside = true;
  check<Small, bf16>(cases, "backward of silu, one z for the batch", shared);
  check<Wide, bf16>(cases, "backward of relu, sums, split",
                    {.mnk = {70, 264, 200}, .activation = relu, .backward = true, .sums = true, .splits = 3});
}

/// Tiles into whose width boxes of 64 columns do not divide: a step is up to four of 16, and the last chunk of 32
/// columns may end in the middle.
void narrow(Cases& cases) {
  for (const int n : {8, 16, 24, 40, 136, 144, 152, 184, 296}) {
    Options o{.mnk = {70, n, 72}, .activation = relu, .bias = kColumn, .residual = true};
    check<Ragged, bf16>(cases, "bias, relu, residual, 144 columns a tile", o);
    o.mnk.m = 130, o.batch = 2;
    check<RaggedLine, fp16>(cases, "bias, relu, residual, batch, 176 columns a tile", o);
    o = {.mnk = {70, n, 72}, .activation = gelu, .backward = true, .sums = true};
    check<RaggedPair, bf16>(cases, "backward of gelu, sums, 144 columns a tile, in a cluster", o);
    check<Narrow, bf16, bf16, bf16, MN>(cases, "backward of gelu, sums, 16 columns a tile", o);
    o.activation = swiglu;
    check<RaggedLine, fp16>(cases, "backward of swiglu, sums, 176 columns a tile", o);
  }
  for (const int m : {1, 64, 100, 200, 300}) {
    Options o{.mnk = {m, 168, 72}, .activation = silu, .bias = kColumn, .z = true};
    check<Ragged, bf16, bf16, float>(cases, "fp32 bias, silu, z, 144 columns a tile", o);
    o.residual = true, o.residual_lies = kPadded, o.beta = -0.5f;
    check<RaggedPair, bf16>(cases, "bias, silu, z, residual, 144 columns a tile", o);
    o.splits = 2, o.mnk.k = 200, o.batch = 2;
    check<RaggedLine, fp16>(cases, "bias, silu, z, residual, split, batch, 176 columns a tile", o);
    o.mnk.n = 72;
    check<Slim, bf16>(cases, "bias, silu, z, residual, split, batch, 32 columns a tile", o);
  }
}

}  // namespace
}  // namespace ak::test::epilogue

int main(int argc, char** argv) {
  using namespace ak::test;
  using namespace epilogue;
  return check_parts("gemm_epilogue_tma", Seeds(argc, argv, 2, 2),
                     {forward, in_turns, with_z, in_floats, gated, backward, narrow});
}
