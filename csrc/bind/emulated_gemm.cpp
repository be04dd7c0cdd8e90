// The GEMM kernels and activation_backward on CPU memory: what csrc/tuning chooses for a GPU of a given capability runs
// on the emulator.
#include "bind/emulated_gemm.h"

#include <pybind11/stl.h>

#include <array>

#include "bind/emulated_memory.h"
#include "bind/gemm_plan.h"
#include "kernels/activation_backward.cu"
#include "kernels/gemm_bf16_sm90.cu"
#include "kernels/gemm_column_sums.cu"
#include "kernels/gemm_fp16_sm90.cu"
#include "kernels/gemm_sm80.cu"
#include "ops/gemm_operand.h"
#include "tuning/gemm.h"

namespace py = pybind11;

namespace ak {
namespace {

using Strides = std::array<int64_t, 3>;            // batch, row, column
using Values = std::tuple<Address, int, Strides>;  // address, DType, strides
using MaybeValues = std::optional<Values>;

GemmValues values_of(const MaybeValues& v) {
  if (!v) return {};
  const auto& [address, dtype, strides] = *v;
  return {at<void>(address), static_cast<DType>(dtype), strides[1], strides[2], strides[0]};
}

/// What the op's glue does on CUDA: the operands as they lie, the plan, the launch, the column sums.
template <class T>
py::dict run_gemm_of(GemmProblem q, GemmOutput output, DType half, bool batch_invariant, int capability, Address sums) {
  emu::Buffer<float> partial_sums("column sums of 16 rows", sums ? static_cast<size_t>(column_sums_size(q)) : 0);
  if (sums) q.epilogue.column_sums = partial_sums.data();  // the plan depends on it
  const GemmPlan plan = plan_gemm(request_of(q, output, half, batch_invariant), {132, capability, true, true});
  if (plan.kernel == GemmKernel::kSm90) {
    const GemmSm90Config config{plan.tile, plan.splits, plan.swapped};
    const GemmScratchSize size = gemm_sm90_scratch(q, config);
    emu::Buffer<float> partials("partials", size.partials);
    emu::Buffer<uint32_t> counters("counters", size.counters);
    counters.fill(0);
    check(gemm_sm90<T>(q, config, output, {partials.data(), counters.data()}, nullptr));
  } else if (plan.kernel == GemmKernel::kSm80) {
    const GemmSm80Config config{kGemmSm80Tiles[plan.tile], plan.splits, output == GemmOutput::kAccumulate};
    emu::Buffer<uint64_t> scratch("scratch", (gemm_sm80_scratch_bytes(q, config) + 7) / 8);
    for (size_t i = 0; i < gemm_sm80_zeroed_bytes(q, config) / 8; i++) scratch.set(i, 0);
    check(gemm_sm80<T>(q, config, scratch.data(), nullptr));
  } else {
    throw std::runtime_error("no GEMM kernel serves this capability");
  }
  if (sums) check(gemm_column_sums(q, at<float>(sums), nullptr));
  return as_dict(plan);
}

py::dict run_gemm(const std::vector<Piece>& memory, const std::array<int, 4>& size, const Values& a, const Values& b,
                  const Values& c, bool accumulate, float alpha, float beta, const std::string& activation,
                  const MaybeValues& bias, const MaybeValues& residual, const MaybeValues& z, const MaybeValues& preact,
                  Address sums, bool batch_invariant, int capability) {
  const Visible visible(memory);
  GemmProblem q{};
  q.m = size[0], q.n = size[1], q.k = size[2], q.batch = size[3];
  const GemmValues of_a = values_of(a), of_b = values_of(b);
  const auto lies_a = gemm_operand(q.k, of_a.column_stride, q.m, of_a.row_stride);
  const auto lies_b = gemm_operand(q.k, of_b.row_stride, q.n, of_b.column_stride);
  if (!lies_a || !lies_b) throw std::invalid_argument("neither dimension of an operand is contiguous");
  q.a = of_a.data, q.ld_a = lies_a->ld, q.m_major_a = !lies_a->k_contiguous, q.batch_stride_a = of_a.batch_stride;
  q.b = of_b.data, q.ld_b = lies_b->ld, q.n_major_b = !lies_b->k_contiguous, q.batch_stride_b = of_b.batch_stride;
  q.c = values_of(c);
  q.epilogue.alpha = alpha, q.epilogue.beta = beta;
  q.epilogue.activation = find_activation(activation).value();
  q.epilogue.bias = values_of(bias);
  q.epilogue.residual = values_of(residual);
  q.epilogue.z = values_of(z);
  q.epilogue.preact = values_of(preact);
  const GemmOutput output = accumulate                    ? GemmOutput::kAccumulate
                            : q.c.type == DType::kFloat32 ? GemmOutput::kFloat32
                                                          : GemmOutput::kInputType;
  return of_a.type == DType::kFloat16 ? run_gemm_of<fp16>(q, output, of_a.type, batch_invariant, capability, sums)
                                      : run_gemm_of<bf16>(q, output, of_a.type, batch_invariant, capability, sums);
}

void run_activation_backward(const std::vector<Piece>& memory, Address grad, int grad_dtype, Address z, Address out,
                             int dtype, int64_t rows, int64_t columns, const std::string& activation) {
  const Visible visible(memory);
  check(activation_backward({at<void>(grad), at<void>(z), at<void>(out), static_cast<DType>(grad_dtype),
                             static_cast<DType>(dtype), rows, columns, find_activation(activation).value()},
                            nullptr));
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def("gemm", &run_gemm, "Runs what plan_gemm chooses and returns that plan; size is (m, n, k, batch).");
  m.def("activation_backward", &run_activation_backward);
}

}  // namespace ak
