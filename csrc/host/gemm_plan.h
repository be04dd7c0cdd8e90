// plan_gemm, its candidates and its model for Python: the tests ask what would run on GPUs that are
// not there.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "activation/name.h"
#include "device/chip_name.h"
#include "gemm/plan.h"

namespace ak {

/// A problem and a GPU, from keyword arguments.
struct GemmQuestion {
  GemmRequest request;
  GemmChip chip;

  GemmQuestion(int m, int n, int k, const pybind11::kwargs& given) : given_(given) {
    request.m = m, request.n = n, request.k = k;
    take("batch", request.batch);
    take("m_major_a", request.m_major_a);
    take("n_major_b", request.n_major_b);
    take("tma_a", request.tma_a);
    take("tma_b", request.tma_b);
    take("tma_output", request.tma_output);
    take("row_output", request.row_output);
    take("odd_operands", request.odd_operands);
    take("out_bytes", request.out_bytes);
    take("side_bytes", request.side_bytes);
    take("backward", request.backward);
    take("keeps_z", request.keeps_z);
    take("column_sums", request.column_sums);
    take("plain", request.plain);
    take("in_registers", request.in_registers);
    take("tma_epilogue", request.tma_epilogue);
    take("batch_invariant", request.batch_invariant);
    take("chained", request.chained);
    take("symmetric", request.symmetric);
    take("sm_count", chip.sm_count);
    take("capability", chip.capability);
    take("sm90", chip.sm90);
    take("sm80", chip.sm80);
    std::string gpu, activation = "none";
    take("gpu", gpu);
    chip.geforce = is_geforce(gpu);
    take("activation", activation);
    const auto named = find_activation(activation);
    if (!named) throw std::invalid_argument("activation is '" + activation + "'");
    request.activation = *named;
    const bool sums = *named == Activation::none && request.side_bytes == 0;
    request.plain = request.plain && sums;
    request.in_registers = request.in_registers && sums;
    request.tma_epilogue = request.tma_epilogue && request.tma_output;
    GemmProblem aligned{};  // at an address that is aligned
    aligned.m = m, aligned.n = n, aligned.k = k, aligned.batch = request.batch;
    aligned.m_major_a = request.m_major_a, aligned.n_major_b = request.n_major_b;
    take("ld_a", aligned.ld_a);
    take("ld_b", aligned.ld_b);
    const int length_a = request.m_major_a ? m : k, length_b = request.n_major_b ? n : k;
    set_rows(request, 2 * (aligned.ld_a > 0 ? aligned.ld_a : length_a),
             2 * (aligned.ld_b > 0 ? aligned.ld_b : length_b));
    if (aligned.ld_a > 0 && aligned.ld_b > 0 && request.plain && !request.tma_operands())
      request.phases = gemm_phases(aligned);
    each_rate([this](const char* name, double& rate) { take(name, rate); });
    if (taken_ != pybind11::len(given))
      throw std::invalid_argument("an unknown argument in " + pybind11::str(given).cast<std::string>());
  }

  /// Calls f(name, rate) with each rate of the chip.
  template <class F>
  void each_rate(const F& f) {
    GemmRates& r = chip.rates;
    f("clock", r.clock), f("power", r.power), f("dram", r.dram), f("reduce", r.reduce), f("crossing", r.crossing);
    f("l2", r.l2), f("start", r.start), f("turn", r.turn), f("hand_over", r.hand_over);
  }

 private:
  template <class T>
  void take(const char* name, T& value) {
    if (!given_.contains(name)) return;
    value = given_[name].cast<T>();
    taken_++;
  }

  const pybind11::kwargs& given_;
  size_t taken_ = 0;
};

/// A tile, compiled or not, from a dict as in gemm_candidates.
inline GemmTile tile_of(const pybind11::dict& t) {
  return {t["m"].cast<int>(),         t["n"].cast<int>(),         t["cluster_m"].cast<int>(),
          t["cluster_n"].cast<int>(), t["consumers"].cast<int>(), t["pingpong"].cast<bool>()};
}

inline pybind11::dict dict_of(const GemmPlan& plan) {
  using namespace pybind11::literals;
  constexpr const char* kNames[] = {"none", "sm80", "sm90"};
  return pybind11::dict("kernel"_a = kNames[static_cast<int>(plan.kernel)], "tile"_a = plan.tile,
                        "splits"_a = plan.splits, "swapped"_a = plan.swapped, "repacked"_a = plan.repacked,
                        "in_phases"_a = plan.phases.count > 0, "microseconds"_a = plan.microseconds);
}

inline pybind11::dict dict_of(const GemmTile& t) {
  using namespace pybind11::literals;
  return pybind11::dict("m"_a = t.m, "n"_a = t.n, "cluster_m"_a = t.cluster_m, "cluster_n"_a = t.cluster_n,
                        "consumers"_a = t.consumers, "pingpong"_a = t.pingpong);
}

inline void bind_gemm_plan(pybind11::module_& m) {
  using namespace pybind11::literals;
  m.def("gemm_repack_pitch", &gemm_repack_pitch, pybind11::arg("length"), "Elements between the lines of a copy.");
  m.def(
      "gemm_candidates",
      [] {
        pybind11::list sm90, triangles, sm80;
        for (const GemmTile& t : kGemmTiles) {
          sm90.append(dict_of(t));
          sm90[sm90.size() - 1]["takes_epilogue"] = gemm_sm90_takes_epilogue(t);
        }
        for (const GemmTile& t : kGemmTriangles) triangles.append(dict_of(t));
        for (GemmSm80Tile t : kGemmSm80Tiles) {
          const detail::Sm80TileCost& size = detail::kSm80Tiles[static_cast<int>(t)];
          sm80.append(pybind11::dict("m"_a = size.m, "n"_a = size.n));
        }
        return pybind11::dict("sm90"_a = sm90, "triangles"_a = triangles, "sm80"_a = sm80);
      },
      "The tiles of the two GEMM kernels, in the order that plan_gemm's `tile` counts: `triangles` are those of sm90 "
      "for "
      "symmetric products.");
  m.def(
      "gemm_rates",
      [] {
        pybind11::dict rates;
        GemmQuestion(1, 1, 1, {}).each_rate([&](const char* name, double& rate) { rates[name] = rate; });
        return rates;
      },
      "What the model multiplies by (GemmRates): plan_gemm takes others by these names.");
  m.def(
      "plan_gemm",
      [](int m, int n, int k, const pybind11::kwargs& given) {
        const GemmQuestion question(m, n, k, given);
        return dict_of(plan_gemm(question.request, question.chip));
      },
      "m"_a, "n"_a, "k"_a,
      "The kernel, tile and splits that serve a GEMM, and the predicted time: csrc/gemm/plan.h. Keywords are the "
      "fields of "
      "GemmRequest, but for phases, which ld_a and ld_b tell, of GemmChip and of GemmRates.");
  m.def(
      "gemm_plans",
      [](int m, int n, int k, const pybind11::kwargs& given) {
        const GemmQuestion question(m, n, k, given);
        pybind11::list plans;
        plan_gemm(question.request, question.chip, [&](const GemmPlan& plan) { plans.append(dict_of(plan)); });
        return plans;
      },
      "m"_a, "n"_a, "k"_a, "Every plan that would serve; arguments and plans as plan_gemm's.");
  m.def(
      "gemm_sm90_microseconds",
      [](const pybind11::dict& tile, int splits, bool swapped, int m, int n, int k, const pybind11::kwargs& given) {
        const GemmQuestion question(m, n, k, given);
        return detail::sm90_time(question.request, question.chip, tile_of(tile), splits, swapped);
      },
      "tile"_a, "splits"_a, "swapped"_a, "m"_a, "n"_a, "k"_a,
      "The predicted time with a tile of the Hopper kernel, one of gemm_candidates or another.");
  m.def(
      "gemm_sm90_grouped_microseconds",
      [](const std::vector<int>& sizes, int n, int k, const pybind11::kwargs& given) {
        const GemmQuestion question(1, n, k, given);
        return detail::grouped_sm90_time(question.request, question.chip, sizes);
      },
      "sizes"_a, "n"_a, "k"_a,
      "The predicted time of the Hopper kernel for groups of rows of these sizes, each with its matrix.");
  m.def(
      "gemm_epilogue",
      [](const pybind11::dict& tile, int m, int n, int k, const pybind11::kwargs& given) {
        const GemmQuestion question(m, n, k, given);
        const GemmTile t = tile_of(tile);
        const auto warp = detail::sm90_epilogue(question.request, detail::sm90_finish(question.request, t, false), t);
        const int sums = gemm_sm90_accumulators(t);
        return pybind11::dict("instructions"_a = warp.instructions.of(sums), "cycles"_a = warp.lone_cycles(sums));
      },
      "tile"_a, "m"_a, "n"_a, "k"_a,
      "The instructions that the model counts in a thread's epilogue of a whole tile, and a lone warp's cycles.");
}

}  // namespace ak
