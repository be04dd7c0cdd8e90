// An A of several matrices in gemm_sm90: in every tile, along k and across it, into every kind of C.
#include <memory>
#include <numeric>

#include "gemm/sm90/gemm.cuh"
#include "gemm_problem.h"
#include "gemm_scratch.h"

namespace ak::test {
namespace {

constexpr Major K = Major::kK, MN = Major::kMN;
using T = bf16;

/// Matrices of A in buffers of their own, whose lines have different lengths and distances.
struct Pieces {
  std::vector<std::unique_ptr<emu::Buffer<T>>> buffers;

  /// Moves A there.
  void take(GemmProblem& q, const std::vector<int>& sizes) {
    const auto* whole = static_cast<const T*>(q.a);
    const int64_t pitch = q.ld_a;
    const int lines = q.m_major_a ? q.k : q.m;
    int begin = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
      const int64_t ld = (sizes[i] + 7) / 8 * 8 + 8 * static_cast<int64_t>(i);
      auto& to = *buffers.emplace_back(std::make_unique<emu::Buffer<T>>("a", static_cast<size_t>(ld * lines)));
      for (int line = 0; line < lines; line++) {
        for (int x = 0; x < sizes[i]; x++) to.set(static_cast<size_t>(line * ld + x), whole[line * pitch + begin + x]);
      }
      if (i == 0) {
        q.a = to.data(), q.ld_a = ld;
      } else {
        q.more_a[i - 1] = {to.data(), begin, ld};
      }
      begin += sizes[i];
    }
  }
};

template <class Out, Major kMajorA>
void check(Cases& cases, int tile, const std::vector<int>& sizes, Shape s, float initial) {
  (kMajorA == K ? s.k : s.m) = std::accumulate(sizes.begin(), sizes.end(), 0);
  auto problem = std::make_shared<Problem<T, kMajorA, MN>>(s);
  const auto what = emu::format("tile %d, %zu matrices along %s", tile, sizes.size(), kMajorA == K ? "k" : "m");
  cases.check(title(what.c_str(), s), [=] {
    Pieces pieces;
    std::string broken;
    const std::string error = problem->template compare<Out>(initial, [&](GemmProblem q) {
      pieces.take(q, sizes);
      const GemmSm90Config config{tile, s.splits};
      Scratch scratch(gemm_sm90_scratch(q, config));
      const Status status = gemm::run<T, 0, kGemmTileCount>(q, config, scratch.get(), nullptr);
      if (status.ok()) broken = scratch.check();
      return status;
    });
    return error.empty() ? broken : error;
  });
}

void every_tile(Cases& cases) {
  for (int tile = 0; tile < kGemmTileCount; tile++) {
    const GemmTile& t = kGemmTiles[tile];
    if (!gemm_sm90_takes_layout(t, false, true)) continue;
    check<T, K>(cases, tile, {64, 128}, {t.m + 8, t.n + 8, 0}, NAN);
    check<float, K>(cases, tile, {128, 64, 40}, {t.m, t.n, 0, 0, 1, 1}, NAN);
    if (!gemm_sm90_takes_layout(t, true, true)) continue;
    check<T, MN>(cases, tile, {64, 192, 64}, {0, t.n + 8, 72, 0, 1, 4}, NAN);
    check<float, MN>(cases, tile, {192, 72}, {0, t.n, 136}, 3.0f);
  }
}

void parts(Cases& cases) {
  constexpr int kSmall = gemm_tile_index(64, 64), kTwo = gemm_tile_index(128, 64);
  check<float, K>(cases, kSmall, {192, 64, 128}, {72, 64, 0, 0, 3, 3}, NAN);
  check<T, K>(cases, kTwo, {64, 64, 264}, {136, 72, 0, 0, 2, 4}, NAN);
  check<float, MN>(cases, kSmall, {64, 64, 64}, {0, 72, 264, 0, 2, 3}, 3.0f);
  check<T, K>(cases, kSmall, {200}, {72, 64, 0}, NAN);
}

void refusals(Cases& cases) {
  alignas(16) static char memory[32];
  const auto refused = [&](const char* what, bool is_refused, auto change, bool swap = false) {
    cases.check(what, [&] {
      GemmProblem q{};
      q.a = q.b = memory, q.c = {memory, DType::kBFloat16, 64};
      q.m = q.n = 64, q.k = 256;
      q.ld_a = q.ld_b = 256;
      q.more_a[0] = {memory, 64, 256}, q.more_a[1] = {memory, 192, 256};
      change(q);
      const char* why = gemm_sm90_refuses(q, {gemm_tile_index(64, 64), 1, swap});
      const bool says = why && std::string(why).find("matrices of A") != std::string::npos;
      return says == is_refused ? std::string() : emu::format("it says %s", why ? why : "nothing");
    });
  };
  refused("nothing", false, [](GemmProblem&) {});
  refused("exchanged", true, [](GemmProblem&) {}, true);
  refused("begins within a box", true, [](GemmProblem& q) { q.more_a[1].begin = 200; });
  refused("begins before the other", true, [](GemmProblem& q) { q.more_a[1].begin = 64; });
  refused("begins past A", true, [](GemmProblem& q) { q.more_a[1].begin = 256; });
  refused("begins within rows", false, [](GemmProblem& q) { q.m_major_a = true, q.m = 256; });
  refused("begins past rows", true, [](GemmProblem& q) { q.m_major_a = true; });
  refused("shifted", true, [](GemmProblem& q) { q.more_a[0].data = memory + 2; });
  refused("rows apart by 65", true, [](GemmProblem& q) { q.more_a[1].ld = 65; });
  refused("a batch", true, [](GemmProblem& q) { q.batch = 2; });
  refused("a residual", true, [](GemmProblem& q) { q.epilogue.residual = q.c; });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_segments", Seeds(argc, argv, 3), {every_tile, parts, refusals});
}
