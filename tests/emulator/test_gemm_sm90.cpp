// The main loop of gemm_sm90 on the emulator: every layout, kind of tile and cluster over tails of m, n and k, batches,
// splits and exchanged operands, bit for bit. Epilogues are tested in test_gemm_epilogue.cpp.
#include "gemm/sm90/gemm.cuh"
#include "gemm_problem.h"
#include "gemm_scratch.h"

namespace ak::test {
namespace {

constexpr Major K = Major::kK, MN = Major::kMN;
/// C in the type of A and B, in fp32, or fp32 and added to.
enum class Output { kSame, kFloat, kAdd };
using enum Output;

template <class T, class Problem, class Run>
std::string compare(Problem& problem, Output output, Run run, Lies lies = Lies::kByRows) {
  if (output == kSame) return problem.template compare<T>(NAN, run, lies);
  return problem.template compare<float>(output == kAdd ? 3.0f : NAN, run, lies);
}

std::string message;  // lives as long as the Status that points to it
Status check_scratch(const Status& status, const Scratch& scratch) {
  if (!status.ok()) return status;
  message = scratch.check();
  return {message.empty() ? 0 : 1, message.c_str()};
}

/// Any tile with any number of stages: the arguments of gemm::Tile.
template <class T, Major kMajorA, Major kMajorB, Output kOutput, auto... kTile>
void check(Cases& cases, const char* what, const Shape& s) {
  using Tile = gemm::Tile<kTile...>;
  Problem<T, kMajorA, kMajorB> problem(s);
  cases.check(title(what, s), [&] {
    return compare<T>(problem, kOutput, [&](const GemmProblem& q) {
      const GemmTile t{Tile::kBlockM,   Tile::kBlockN,    Tile::kClusterM,
                       Tile::kClusterN, Tile::kConsumers, Tile::kPingpong};
      const int splits = gemm_sm90_splits(q.k, s.splits);
      const size_t tiles = splits == 1 ? 0 : static_cast<size_t>(gemm_sm90_clusters(q, t) * Tile::kCluster * q.batch);
      Scratch scratch({tiles * static_cast<size_t>(splits * t.m * t.n), tiles * Tile::kGroups});
      return check_scratch(gemm::launch_gemm < T, kMajorA, kMajorB, kOutput != kSame && Tile::kFullBoxes,
                           Tile > (q, splits, scratch.get(), nullptr), scratch);
    });
  });
}

/// One of the tiles that are compiled, through the front door.
template <class T, int kM, int kN, bool kPingpong = false>
Status run(const GemmProblem& q, int splits, bool swap) {
  constexpr int kIndex = gemm_tile_index(kM, kN, kPingpong);
  const GemmSm90Config config{kIndex, splits, swap};
  Scratch scratch(gemm_sm90_scratch(q, config));
  return check_scratch(gemm::run<T, kIndex, kIndex + 1>(q, config, scratch.get(), nullptr), scratch);
}

void layouts(Cases& cases) {
  check<bf16, K, K, kSame, 128, 128, 3, 1, 2>(cases, "NT", {256, 136, 328});
  check<fp16, K, MN, kSame, 128, 64, 4, 1, 2>(cases, "NN", {136, 72, 264});
  check<bf16, MN, K, kSame, 128, 64, 4, 1, 2>(cases, "TT", {136, 72, 264, 8});
  check<fp16, MN, MN, kSame, 128, 128, 3, 1, 2>(cases, "TN", {200, 136, 328, 0, 1, 1});
}

void tails(Cases& cases) {
  constexpr int kEdges[] = {1, 7, 8, 9, 63, 64, 65, 127, 128, 129};
  for (const int edge : kEdges) {
    check<bf16, K, K, kSame, 64, 64, 3, 1, 1>(cases, "m at an edge", {edge, 8, 72});
    check<bf16, MN, MN, kSame, 64, 64, 3, 1, 1>(cases, "n at an edge", {16, edge, 72});
    check<fp16, MN, K, kSame, 64, 64, 3, 1, 1>(cases, "k at an edge", {16, 8, edge});
  }
  check<fp16, K, MN, kFloat, 64, 64, 3, 1, 1>(cases, "one element", {1, 1, 1});
}

void tiles(Cases& cases) {
  check<bf16, K, K, kSame, 256, 128, 2, 1, 2>(cases, "256x128", {256, 128, 192, 0, 1, 1});
  check<fp16, K, K, kSame, 128, 144, 3, 2, 2>(cases, "128x144 cluster 2", {300, 296, 200});
  check<bf16, MN, K, kSame, 128, 176, 3, 1, 2>(cases, "128x176", {136, 179, 200, 8});
  check<bf16, K, MN, kSame, 64, 128, 3, 1, 1>(cases, "64x128", {136, 136, 200});
  check<fp16, K, K, kSame, 64, 16, 4, 1, 1>(cases, "64x16", {70, 40, 328});
  // An n-major B in boxes as wide as the tile, which have swizzles of their own.
  check<bf16, K, MN, kSame, 64, 16, 4, 1, 1>(cases, "64x16", {70, 40, 328});
  check<fp16, MN, MN, kSame, 64, 16, 3, 1, 1>(cases, "64x16, batch, split", {72, 8, 264, 8, 2, 3, 2});
  check<bf16, MN, MN, kSame, 64, 32, 3, 1, 1>(cases, "64x32", {136, 72, 200});
  check<fp16, K, MN, kSame, 64, 32, 2, 1, 1>(cases, "64x32, one row too many", {65, 24, 129, 0, 1, 1});
  check<fp16, K, MN, kAdd, 64, 16, 4, 1, 1>(cases, "64x16, accumulate", {70, 24, 200, 8});
  check<bf16, MN, MN, kAdd, 64, 32, 3, 1, 1>(cases, "64x32, accumulate, split", {72, 40, 264, 8, 2});
  check<bf16, K, K, kSame, 64, 64, 2, 1, 1>(cases, "two stages", {64, 64, 200, 0, 1, 1});
  check<bf16, K, K, kSame, 192, 64, 3, 1, 3>(cases, "three consumers", {200, 72, 264});
  check<fp16, MN, MN, kAdd, 192, 64, 2, 1, 3>(cases, "three consumers, accumulate", {200, 64, 136, 0, 1, 1});
  // Seven tiles in rows and columns: groups of lines that are not full.
  check<bf16, K, K, kSame, 64, 64, 3, 1, 1>(cases, "groups of rows", {448, 136, 72, 0, 1, 4});
  check<bf16, K, K, kSame, 64, 64, 3, 1, 1>(cases, "groups of columns", {136, 448, 72, 0, 1, 3});
}

void clusters(Cases& cases) {
  check<bf16, K, K, kSame, 128, 128, 3, 2, 2>(cases, "cluster 2", {512, 128, 328});
  check<fp16, K, MN, kSame, 128, 128, 3, 2, 2>(cases, "cluster 2, n-major B", {300, 136, 328, 0, 1, 4});
  check<bf16, MN, MN, kAdd, 64, 128, 2, 2, 1>(cases, "cluster 2, 64 rows", {130, 100, 136});
  check<bf16, K, K, kSame, 128, 64, 3, 2, 2, false, true>(cases, "cluster 2 that shares A", {136, 200, 328, 0, 1, 4});
  check<fp16, MN, MN, kSame, 128, 64, 3, 2, 2, false, true>(cases, "cluster 2, m-major A", {136, 250, 264});
  check<bf16, K, MN, kFloat, 256, 64, 2, 2, 2, false, true>(cases, "cluster 2, 256 rows", {256, 136, 136});
  // 96 rows of A from each block.
  check<bf16, K, K, kSame, 192, 128, 2, 2, 3, false, true>(cases, "192x128 that shares A", {200, 264, 200, 0, 1, 2});
  check<fp16, K, MN, kAdd, 192, 128, 2, 2, 3, false, true>(cases, "192x128 that shares A", {192, 256, 136});
  // The last tile of a cluster has no columns, or no rows, of C.
  check<bf16, K, K, kSame, 128, 64, 3, 2, 2, false, true>(cases, "a tile beside C", {72, 40, 136, 0, 1, 4, 2});
  check<fp16, MN, MN, kSame, 128, 64, 3, 2, 2, false, true>(cases, "a tile beside C, split", {72, 136, 264, 0, 2});
  check<bf16, K, MN, kFloat, 256, 64, 2, 2, 2, false, true>(cases, "a tile beside C, 256 rows", {72, 40, 136});
  check<fp16, K, K, kSame, 128, 64, 3, 2, 2>(cases, "a tile below C, split", {72, 72, 264, 0, 2, 4});
}

void pingpong(Cases& cases) {
  check<bf16, K, K, kSame, 64, 64, 3, 1, 2, true>(cases, "pingpong", {200, 136, 264, 0, 1, 1});
  check<bf16, K, K, kSame, 64, 64, 4, 1, 2, true>(cases, "pingpong, one step", {320, 64, 40, 0, 1, 1});
  check<fp16, MN, MN, kFloat, 128, 64, 2, 1, 2, true>(cases, "pingpong, two slices", {300, 100, 200, 0, 1, 1});
  check<fp16, K, MN, kSame, 64, 128, 3, 2, 2, true>(cases, "pingpong, cluster 2", {520, 128, 200, 0, 1, 2});
  check<bf16, MN, K, kAdd, 64, 64, 5, 1, 2, true>(cases, "pingpong, one tile", {64, 64, 328, 0, 1, 4});
  check<bf16, K, K, kSame, 64, 64, 3, 1, 2, true>(cases, "pingpong, split", {136, 136, 584, 0, 3, 2});
  check<bf16, K, K, kSame, 128, 64, 8, 1, 2, true>(cases, "pingpong, 128x64, one step", {520, 64, 64, 0, 1, 1});
  check<fp16, K, MN, kSame, 128, 64, 8, 1, 2, true>(cases, "pingpong, 128x64", {300, 64, 72, 0, 1, 1});
  check<bf16, MN, K, kAdd, 128, 64, 3, 1, 2, true>(cases, "pingpong, 128x64", {264, 72, 264, 0, 1, 2});
}

void batches(Cases& cases) {
  check<bf16, K, K, kSame, 64, 64, 3, 1, 1>(cases, "batch", {72, 40, 136, 8, 1, 3, 3});
  check<fp16, MN, MN, kAdd, 64, 64, 3, 1, 1>(cases, "batch, accumulate", {72, 136, 72, 0, 1, 2, 2});
  check<bf16, K, MN, kFloat, 64, 64, 3, 1, 1>(cases, "batch, one A", {72, 40, 136, 0, 1, 2, 3, true, false});
  check<bf16, MN, K, kSame, 64, 64, 3, 1, 1>(cases, "batch, one B", {72, 40, 136, 0, 1, 2, 3, false, true});
  check<fp16, K, K, kSame, 128, 64, 3, 2, 2>(cases, "batch, cluster 2", {130, 72, 136, 0, 1, 4, 2});
  check<bf16, K, K, kSame, 64, 64, 3, 1, 1>(cases, "batch, split", {72, 40, 264, 0, 2, 3, 2});
}

void splits(Cases& cases) {
  check<bf16, K, K, kSame, 64, 64, 3, 1, 1>(cases, "split, 16 bit", {70, 66, 520, 0, 3});
  check<fp16, MN, MN, kAdd, 64, 64, 3, 1, 1>(cases, "split, accumulate", {64, 72, 320, 8, 5, 4});
  check<bf16, K, MN, kFloat, 128, 64, 3, 1, 2>(cases, "split, rounded up", {136, 64, 330, 0, 4});  // 6 steps: 3 of 2
  check<fp16, K, K, kSame, 128, 64, 3, 2, 2>(cases, "split, cluster 2", {256, 72, 264, 0, 2, 4});
  check<bf16, MN, K, kFloat, 192, 64, 2, 1, 3>(cases, "split, three consumers", {192, 64, 264, 0, 4, 3});

  // The parts are 2^24, 1, 1, -2^24: in this order they add up to 0, in others to 1 or 2.
  cases.check("splits are added in order", [] {
    constexpr int kParts = 4, kK = 64 * kParts, kM = 64;
    constexpr float kPart[kParts] = {16777216.0f, 1.0f, 1.0f, -16777216.0f};
    emu::options().sm_count = kParts;
    emu::Buffer<bf16> a("a", std::vector<bf16>(kM * kK, bf16{0})),
        b("b", std::vector<bf16>(8 * kK, round_to<bf16>(1.0f)));
    emu::Buffer<float> c("c", kM * 8);
    for (size_t m = 0; m < kM; m++) {
      for (size_t part = 0; part < kParts; part++) a.set(m * kK + part * 64 + m, round_to<bf16>(kPart[part]));
    }
    GemmProblem q{};
    q.a = a.data(), q.b = b.data(), q.c = {c.data(), DType::kFloat32, 8};
    q.m = kM, q.n = 8, q.k = kK, q.ld_a = kK, q.ld_b = kK;
    const std::string error = message_of(run<bf16, 64, 64>(q, kParts, false));
    if (!error.empty()) return error;
    for (size_t i = 0; i < c.size(); i++) {
      if (c[i] != 0.0f) return emu::format("c[%zu] is %g, expected 0", i, c[i]);
    }
    return std::string();
  });
}

/// C^T = B^T A^T, into a C of either kind.
void exchanged(Cases& cases) {
  const auto check = [&](auto tile, const char* what, auto problem_of, Output output, const Shape& s, Lies lies) {
    auto problem = problem_of(s);
    cases.check(title(what, s), [&] {
      return compare<bf16>(problem, output, [&](const GemmProblem& q) { return tile(q, s.splits, true); }, lies);
    });
  };
  const auto nt = [](const Shape& s) { return Problem<bf16, K, K>(s); };
  const auto tn = [](const Shape& s) { return Problem<bf16, MN, MN>(s); };
  check(run<bf16, 64, 16>, "swapped, 64x16", nt, kSame, {5, 136, 136}, Lies::kByRows);
  check(run<bf16, 64, 16>, "swapped, 64x16, fp32, split", nt, kFloat, {24, 72, 520, 0, 2, 3}, Lies::kByRows);
  check(run<bf16, 64, 16>, "swapped, 64x16, m-major A", tn, kSame, {8, 136, 136}, Lies::kByRows);
  check(run<bf16, 64, 32>, "swapped, 64x32, m-major A, fp32, split", tn, kFloat, {24, 72, 520, 0, 2, 3}, Lies::kByRows);
  check(run<bf16, 64, 16>, "swapped, 64x16, m-major A, accumulate", tn, kAdd, {24, 72, 200, 8}, Lies::kByRows);
  check(run<bf16, 64, 64>, "swapped, m-major A, accumulate", tn, kAdd, {40, 72, 136, 8}, Lies::kByRows);
  check(run<bf16, 128, 64>, "swapped, two consumers, split", nt, kSame, {40, 136, 264, 0, 2, 3}, Lies::kByColumns);
  check(run<bf16, 64, 64>, "swapped, C by columns, batch", tn, kSame, {40, 72, 136, 0, 1, 2, 2}, Lies::kByColumns);
}

void refusals(Cases& cases) {
  alignas(16) static char memory[32];
  GemmProblem good{};
  good.a = good.b = memory;
  good.m = good.n = good.k = 64;
  good.ld_a = good.ld_b = 64;
  good.batch = 2, good.batch_stride_a = good.batch_stride_b = 4096;
  const auto refused = [&](const char* what, const char* why, GemmSm90Config config, auto change) {
    cases.check(what, [&] {
      GemmProblem q = good;
      change(q);
      const char* told = gemm_sm90_refuses(q, config);
      return std::string(told ? told : "").find(why) != std::string::npos && (told || !*why)
                 ? ""
                 : emu::format("it says %s", told ? told : "nothing");
    });
  };
  constexpr int kSquare = gemm_tile_index(64, 64), kNarrow = gemm_tile_index(64, 16), kWide = gemm_tile_index(128, 144);
  constexpr int kSharesA = gemm_tile_index(192, 128) + 1;
  static_assert(kGemmTiles[kSharesA].m == 192 && kGemmTiles[kSharesA].cluster_n == 2);
  static_assert(gemm_tile_index(64, 17) == -1);
  const auto swiglu = [](GemmProblem& q) { q.epilogue.activation = Activation::swiglu; };
  const auto n_major = [](GemmProblem& q) { q.n_major_b = true; };
  const auto m_major = [](GemmProblem& q) { q.m_major_a = true; };
  refused("nothing", "", {kSquare}, [](GemmProblem&) {});
  refused("no such tile", "no such tile", {kGemmTileCount}, [](GemmProblem&) {});
  refused("no splits", "splits", {kSquare, 0}, [](GemmProblem&) {});
  refused("an empty product", "at least 1", {kSquare}, [](GemmProblem& q) { q.k = 0; });
  refused("a shifted A", "multiples of 16 bytes", {kSquare}, [](GemmProblem& q) { q.a = memory + 2; });
  refused("rows of B apart by 65", "multiples of 16 bytes", {kSquare}, [](GemmProblem& q) { q.ld_b = 65; });
  refused("matrices apart by 4100", "multiples of 16 bytes", {kSquare},
          [](GemmProblem& q) { q.batch_stride_a = 4100; });
  refused("n-major B", "n-major", {kWide}, n_major);
  refused("n-major B, swapped", "", {kNarrow, 1, true}, n_major);
  refused("m-major A, swapped", "", {kNarrow, 1, true}, m_major);
  refused("m-major A, swapped, for a tile of 144", "n-major", {kWide, 1, true}, m_major);
  refused("m-major A, 96 rows a block", "m-major", {kSharesA}, m_major);
  refused("n-major B, 96 rows of A a block", "", {kSharesA}, n_major);
  refused("n-major B, swapped, 96 rows a block", "m-major", {kSharesA, 1, true}, n_major);
  refused("swiglu in 64 columns", "swiglu", {kSquare}, swiglu);
  refused("swiglu, swapped", "exchanged", {kSquare, 1, true}, swiglu);
  refused("column sums, swapped", "exchanged", {kSquare, 1, true},
          [](GemmProblem& q) { q.epilogue.column_sums = reinterpret_cast<float*>(memory); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_sm90", Seeds(argc, argv, 6),
                     {layouts, tails, tiles, clusters, pingpong, batches, splits, exchanged, refusals});
}
