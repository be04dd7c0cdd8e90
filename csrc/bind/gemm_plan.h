// plan_gemm and its candidates for Python: the tests ask it what would run on GPUs that are not there.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "tuning/gemm.h"

namespace ak {

inline pybind11::dict as_dict(const GemmPlan& plan) {
  using namespace pybind11::literals;
  constexpr const char* kNames[] = {"none", "sm80", "sm90"};
  return pybind11::dict("kernel"_a = kNames[static_cast<int>(plan.kernel)], "tile"_a = plan.tile,
                        "splits"_a = plan.splits, "swapped"_a = plan.swapped);
}

inline void bind_gemm_plan(pybind11::module_& m) {
  using namespace pybind11::literals;
  m.def(
      "gemm_candidates",
      [] {
        pybind11::list sm90, sm80;
        for (const GemmTile& t : kGemmTiles) {
          sm90.append(pybind11::dict("m"_a = t.m, "n"_a = t.n, "cluster_m"_a = t.cluster_m, "cluster_n"_a = t.cluster_n,
                                     "consumers"_a = t.consumers, "pingpong"_a = t.pingpong,
                                     "takes_epilogue"_a = gemm_sm90_takes_epilogue(t)));
        }
        for (GemmSm80Tile t : kGemmSm80Tiles) {
          const detail::Sm80TileCost& size = detail::kSm80Tiles[static_cast<int>(t)];
          sm80.append(pybind11::dict("m"_a = size.m, "n"_a = size.n));
        }
        return pybind11::dict("sm90"_a = sm90, "sm80"_a = sm80);
      },
      "The tiles of the two GEMM kernels, in the order that plan_gemm's `tile` counts.");
  m.def(
      "plan_gemm",
      [](int m, int n, int k, int batch, bool m_major_a, bool n_major_b, bool tma_operands, bool tma_output,
         bool odd_operands, int out_bytes, int side_bytes, const std::string& activation, bool backward,
         bool column_sums, bool plain, bool in_registers, bool batch_invariant, int sm_count, int capability, bool sm90,
         bool sm80) {
        const auto named = find_activation(activation);
        if (!named) throw std::invalid_argument("activation is '" + activation + "'");
        const GemmRequest request{m,
                                  n,
                                  k,
                                  batch,
                                  m_major_a,
                                  n_major_b,
                                  tma_operands,
                                  tma_output,
                                  odd_operands,
                                  out_bytes,
                                  side_bytes,
                                  *named,
                                  backward,
                                  column_sums,
                                  plain && *named == Activation::none && side_bytes == 0,
                                  in_registers && *named == Activation::none && side_bytes == 0,
                                  batch_invariant};
        return as_dict(plan_gemm(request, {sm_count, capability, sm90, sm80}));
      },
      "m"_a, "n"_a, "k"_a, "batch"_a = 1, "m_major_a"_a = false, "n_major_b"_a = false, "tma_operands"_a = true,
      "tma_output"_a = true, "odd_operands"_a = false, "out_bytes"_a = 2, "side_bytes"_a = 0, "activation"_a = "none",
      "backward"_a = false, "column_sums"_a = false, "plain"_a = true, "in_registers"_a = true,
      "batch_invariant"_a = false, "sm_count"_a = 132, "capability"_a = 90, "sm90"_a = true, "sm80"_a = true,
      "The kernel, tile and splits that serve a GEMM: csrc/tuning/gemm.h.");
}

}  // namespace ak
