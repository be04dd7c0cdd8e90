// Prints the offset of the first consumer's mailbox in shared memory, and for each epilogue below the last argument of
// gemm_sm90's kernel as hexadecimal bytes. The tracer of test_epilogue_instructions.py runs a thread with them. TILE
// and FLOAT choose the instance.
#include <cstdio>

#include "activation/name.h"
#include "gemm/sm90/gemm.cuh"

namespace ak::gemm {
namespace {

using Tile = StagedTile<TILE, stages<TILE, FLOAT>()>;
constexpr int kM = 2 * kGemmTiles[TILE].m, kN = kGemmTiles[TILE].n;

GemmValues at(int64_t place, DType type, int64_t row_stride) {
  return {reinterpret_cast<void*>(0x7e0000000000 + (place << 32)), type, row_stride, 1, 0};
}

void print(const char* name, const GemmProblem& q) {
  Args args = arguments<FLOAT, Tile>(q, 1);
  args.schedule = make_schedule<Tile>(q, args, 1, {}, 1);
  args.schedule.work_count = 1;
  std::printf("%s ", name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&args);
  for (size_t i = 0; i < sizeof args; i++) std::printf("%02x", bytes[i]);
  std::printf("\n");
}

void print_all() {
  std::printf("%d\n", bytes_before_mailboxes<FLOAT, Tile>());
  constexpr DType kOut = FLOAT ? DType::kFloat32 : DType::kBFloat16;
  GemmProblem plain{};
  plain.a = at(0, kOut, 0).data, plain.b = at(1, kOut, 0).data, plain.c = at(2, kOut, kN);
  plain.m = kM, plain.n = kN, plain.k = 64, plain.ld_a = plain.ld_b = 64;
  print("plain", plain);
  GemmProblem scaled = plain;
  scaled.epilogue.alpha = 0.5f;
  print("alpha", scaled);
  GemmProblem bias = plain;
  bias.epilogue.bias = at(3, DType::kBFloat16, 0);
  print("bias", bias);
  GemmProblem float_bias = plain;
  float_bias.epilogue.bias = at(3, DType::kFloat32, 0);
  print("float_bias", float_bias);
  GemmProblem odd = plain;
  odd.c.row_stride = kN + 1;
  print("odd_rows", odd);
  GemmProblem apart = plain;
  apart.c.column_stride = 2;
  print("elements", apart);
  GemmProblem residual = bias;
  residual.epilogue.residual = at(4, kOut, kN);
  print("bias_residual", residual);
  for (const auto activation : {Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    const std::string name = name_of(activation);
    GemmProblem forward = bias;
    forward.epilogue.activation = activation;
    print(("bias_" + name).c_str(), forward);
    forward.epilogue.z = at(5, kOut, kN);
    print(("bias_" + name + "_z").c_str(), forward);
    GemmProblem backward = plain;
    backward.epilogue.activation = activation;
    backward.epilogue.preact = at(5, DType::kBFloat16, kN);
    print(("d" + name).c_str(), backward);
    backward.epilogue.column_sums = static_cast<float*>(at(6, kOut, 0).data);
    print(("d" + name + "_sums").c_str(), backward);
  }
  GemmProblem swiglu = plain;
  swiglu.epilogue.activation = Activation::swiglu;
  if (kN % 128 == 0) print("swiglu", swiglu);
  swiglu.epilogue.preact = at(5, DType::kBFloat16, 2 * kN);
  swiglu.c.row_stride = 2 * kN;
  print("dswiglu", swiglu);
}

}  // namespace
}  // namespace ak::gemm

int main() { ak::gemm::print_all(); }
