// The epilogue of gemm_sm90 whose operands and results TMA moves in boxes: by tiles of all kinds, over all edges.
#include "epilogue_problem.h"

namespace ak::test::epilogue {
namespace {

/// `o`, which must go through boxes.
template <class T, class Out, class Side, Major kMajorB, class Tile>
void check(Cases& cases, const char* name, Options o) {
  o.tma_epilogue = true;
  cases.check(name, [&] { return run<T, Out, Side, K, kMajorB, Tile>(o); });
}

void forward(Cases& cases) {
  const Options gelu{.m = 136, .n = 136, .k = 72, .activation = Activation::gelu, .bias = Bias::kColumn};
  check<bf16, bf16, bf16, K, Two>(cases, "bias, gelu", gelu);
  check<fp16, fp16, float, K, Two>(cases, "fp32 bias, gelu", gelu);
  for (const int n : {8, 24, 40, 64, 72, 104, 200, 256, 264}) {
    const Options o{.m = 70, .n = n, .k = 72, .activation = Activation::relu, .bias = Bias::kColumn, .residual = true};
    check<bf16, bf16, bf16, K, Broad>(cases, "bias, relu, residual, 256 columns a tile", o);
    check<fp16, fp16, fp16, MN, Full>(cases, "bias, relu, residual, 192 columns a tile", o);
  }
  for (const int m : {1, 63, 64, 65, 128, 129, 200, 256, 300}) {
    Options o{.m = m, .n = 136, .k = 72, .activation = Activation::silu, .bias = Bias::kColumn, .beta = -0.5f};
    o.residual = true, o.residual_lies = Lies::kPadded;
    check<bf16, bf16, bf16, K, Tall>(cases, "bias, silu, residual, two slices", o);
    check<bf16, bf16, bf16, K, Turns>(cases, "bias, silu, residual, pingpong", o);
    check<fp16, fp16, fp16, K, Three>(cases, "bias, silu, residual, three consumers", o);
  }
  check<bf16, bf16, bf16, K, Two>(cases, "alpha, bias, no activation",
                                  {.m = 66, .n = 72, .k = 64, .bias = Bias::kColumn, .alpha = 0.5f});
  check<bf16, bf16, bf16, K, Wide>(cases, "residual alone, in a cluster",
                                   {.m = 130, .n = 136, .k = 64, .residual = true});
  check<bf16, bf16, bf16, K, Pair>(cases, "residual, tiles beside each other, batch",
                                   {.m = 140, .n = 520, .k = 64, .residual = true, .batch = 2});
  check<bf16, bf16, bf16, K, Two>(
      cases, "bias, one residual for the batch",
      {.m = 140, .n = 136, .k = 64, .bias = Bias::kColumn, .residual = true, .batch = 3, .one_beside = true});
  check<fp16, fp16, fp16, K, Turns>(cases, "silu, one residual for the batch, split, in turns",
                                    {.m = 300,
                                     .n = 136,
                                     .k = 200,
                                     .activation = Activation::silu,
                                     .residual = true,
                                     .splits = 2,
                                     .batch = 2,
                                     .one_beside = true});
  check<bf16, bf16, bf16, MN, Small>(
      cases, "gelu_tanh, residual, split, batch",
      {.m = 70, .n = 72, .k = 200, .activation = Activation::gelu_tanh, .residual = true, .splits = 3, .batch = 2});
}

/// The tile of products with little k: two slices a consumer, blocks side by side, consumers in turns.
void in_turns(Cases& cases) {
  for (const int m : {40, 100, 300, 700}) {
    Options o{.m = m, .n = 520, .k = 136, .activation = Activation::gelu, .bias = Bias::kColumn, .residual = true};
    check<bf16, bf16, bf16, K, TallPair>(cases, "in turns: bias, gelu, residual", o);
    o = {.m = m, .n = 392, .k = 72, .activation = Activation::silu, .backward = true, .sums = true};
    check<fp16, fp16, fp16, MN, TallPair>(cases, "in turns: backward of silu, sums", o);
    o.activation = Activation::swiglu;
    check<bf16, bf16, bf16, K, TallPair>(cases, "in turns: backward of swiglu, sums", o);
  }
}

/// z leaves first, through the boxes that the residual then needs.
void with_z(Cases& cases) {
  Options o{.m = 140, .n = 264, .k = 72, .activation = Activation::gelu, .bias = Bias::kColumn, .z = true};
  check<bf16, bf16, bf16, K, Two>(cases, "bias, gelu, z", o);
  check<bf16, bf16, float, K, Broad>(cases, "fp32 bias, gelu, z", o);
  check<fp16, fp16, fp16, K, Turns>(cases, "bias, gelu, z, pingpong", o);
  o.residual = true, o.beta = 2;
  check<bf16, bf16, bf16, K, Tall>(cases, "bias, gelu, z, residual", o);
  o.splits = 2, o.k = 200;
  check<bf16, bf16, bf16, K, Wide>(cases, "bias, gelu, z, residual, split", o);
  o.batch = 2, o.one_beside = true;
  check<bf16, bf16, bf16, K, Pair>(cases, "bias, gelu, z, one residual for the batch, split, in turns", o);
  check<fp16, fp16, fp16, K, Three>(
      cases, "alpha, relu, z", {.m = 200, .n = 72, .k = 64, .activation = Activation::relu, .alpha = 0.25f, .z = true});
  check<fp16, fp16, fp16, K, Small>(cases, "relu, z, batch",
                                    {.m = 70, .n = 72, .k = 64, .activation = Activation::relu, .z = true, .batch = 3});
}

void in_floats(Cases& cases) {
  for (const int n : {4, 28, 32, 36, 68, 132}) {
    Options o{.m = 70, .n = n, .k = 64, .activation = Activation::relu, .bias = Bias::kColumn, .beta = 0.5f};
    o.residual = true;
    check<bf16, float, float, K, Two>(cases, "fp32: bias, relu, residual", o);
    o.z = true;
    check<bf16, float, float, K, Small>(cases, "fp32: bias, relu, residual, z", o);
  }
  check<fp16, float, fp16, K, Tall>(
      cases, "fp32: bias of 16 bits, gelu, two slices",
      {.m = 264, .n = 140, .k = 64, .activation = Activation::gelu, .bias = Bias::kColumn});
  check<bf16, float, bf16, K, Two>(
      cases, "gelu added to fp32",
      {.m = 70, .n = 72, .k = 64, .activation = Activation::gelu, .accumulate = true, .batch = 2});
  check<bf16, float, bf16, K, Two>(
      cases, "relu added to fp32, split",
      {.m = 200, .n = 72, .k = 200, .activation = Activation::relu, .accumulate = true, .splits = 3});
  check<bf16, float, bf16, K, Two>(
      cases, "swiglu, fp32",
      {.m = 70, .n = 2 * 76, .k = 64, .activation = Activation::swiglu, .bias = Bias::kColumn, .z = true});
}

void gated(Cases& cases) {
  for (const int columns : {8, 32, 40, 64, 72, 136}) {
    Options o{.m = 70, .n = 2 * columns, .k = 72, .activation = Activation::swiglu, .bias = Bias::kColumn};
    check<bf16, bf16, bf16, K, Two>(cases, "bias, swiglu", o);
    o.z = true;
    check<bf16, bf16, float, K, Broad>(cases, "fp32 bias, swiglu, z", o);
    check<fp16, fp16, fp16, MN, Pair>(cases, "bias, swiglu, z, pingpong", o);
    Options backward{.m = 136, .n = columns, .k = 72, .activation = Activation::swiglu, .alpha = 0.5f};
    backward.backward = backward.sums = true;
    check<bf16, bf16, bf16, MN, Two>(cases, "backward of swiglu, sums", backward);
    check<fp16, fp16, fp16, K, Turns>(cases, "backward of swiglu, sums, pingpong", backward);
  }
  check<bf16, bf16, bf16, K, Wide>(
      cases, "swiglu, residual, batch",
      {.m = 130, .n = 2 * 72, .k = 136, .activation = Activation::swiglu, .residual = true, .batch = 2});
  check<bf16, bf16, bf16, K, Three>(
      cases, "backward of swiglu, split, sums",
      {.m = 300, .n = 136, .k = 200, .activation = Activation::swiglu, .backward = true, .sums = true, .splits = 2});
}

void backward(Cases& cases) {
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    Options o{.m = 150, .n = 136, .k = 72, .activation = activation, .backward = true, .sums = true};
    check<bf16, bf16, bf16, MN, Two>(cases, "backward, sums", o);
    o.sums = false;
    check<fp16, fp16, fp16, K, Three>(cases, "backward, three consumers", o);
  }
  for (const int m : {1, 8, 9, 15, 17, 24, 63, 65, 190, 260}) {
    const Options o{
        .m = m, .n = 200, .k = 64, .activation = Activation::gelu, .backward = true, .sums = true, .batch = 2};
    check<bf16, bf16, bf16, K, Tall>(cases, "backward of gelu, sums, two slices", o);
    check<fp16, fp16, fp16, MN, Full>(cases, "backward of gelu, sums, 192 columns a tile", o);
  }
  Options shared{.m = 70, .n = 72, .k = 64, .activation = Activation::silu, .backward = true, .sums = true};
  shared.batch = 2, shared.one_beside = true;
  check<bf16, bf16, bf16, K, Small>(cases, "backward of silu, one z for the batch", shared);
  check<bf16, bf16, bf16, K, Wide>(
      cases, "backward of relu, sums, split",
      {.m = 70, .n = 264, .k = 200, .activation = Activation::relu, .backward = true, .sums = true, .splits = 3});
}

/// Tiles into whose width boxes of 64 columns do not divide: a step is up to four of 16, and the last chunk of 32
/// columns may end in the middle.
void narrow(Cases& cases) {
  for (const int n : {8, 16, 24, 40, 136, 144, 152, 184, 296}) {
    Options o{.m = 70, .n = n, .k = 72, .activation = Activation::relu, .bias = Bias::kColumn, .residual = true};
    check<bf16, bf16, bf16, K, Ragged>(cases, "bias, relu, residual, 144 columns a tile", o);
    o.m = 130, o.batch = 2;
    check<fp16, fp16, fp16, K, RaggedLine>(cases, "bias, relu, residual, batch, 176 columns a tile", o);
    o = {.m = 70, .n = n, .k = 72, .activation = Activation::gelu, .backward = true, .sums = true};
    check<bf16, bf16, bf16, K, RaggedPair>(cases, "backward of gelu, sums, 144 columns a tile, in a cluster", o);
    check<bf16, bf16, bf16, MN, Narrow>(cases, "backward of gelu, sums, 16 columns a tile", o);
    o.activation = Activation::swiglu;
    check<fp16, fp16, fp16, K, RaggedLine>(cases, "backward of swiglu, sums, 176 columns a tile", o);
  }
  for (const int m : {1, 64, 100, 200, 300}) {
    Options o{.m = m, .n = 168, .k = 72, .activation = Activation::silu, .bias = Bias::kColumn, .z = true};
    check<bf16, bf16, float, K, Ragged>(cases, "fp32 bias, silu, z, 144 columns a tile", o);
    o.residual = true, o.residual_lies = Lies::kPadded, o.beta = -0.5f;
    check<bf16, bf16, bf16, K, RaggedPair>(cases, "bias, silu, z, residual, 144 columns a tile", o);
    o.splits = 2, o.k = 200, o.batch = 2;
    check<fp16, fp16, fp16, K, RaggedLine>(cases, "bias, silu, z, residual, split, batch, 176 columns a tile", o);
    o.n = 72;
    check<bf16, bf16, bf16, K, Slim>(cases, "bias, silu, z, residual, split, batch, 32 columns a tile", o);
  }
}

}  // namespace
}  // namespace ak::test::epilogue

int main(int argc, char** argv) {
  ak::test::Cases cases("gemm_epilogue_tma", ak::test::Seeds(argc, argv, 2, 2));
  ak::test::epilogue::forward(cases);
  ak::test::epilogue::in_turns(cases);
  ak::test::epilogue::with_z(cases);
  ak::test::epilogue::in_floats(cases);
  ak::test::epilogue::gated(cases);
  ak::test::epilogue::backward(cases);
  ak::test::epilogue::narrow(cases);
  return cases.finish();
}
