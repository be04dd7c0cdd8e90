// The order of a sum over k, on tensor cores that align and truncate: an element has the same bits in every tile, order
// of operands and cluster, alone and in company; a sum that starts from C continues as if it had never stopped.
#include <memory>

#include "gemm/sm80/gemm.cu"
#include "gemm/sm90/chained.cuh"
#include "gemm_problem.h"

namespace ak::test {
namespace {

constexpr Major K = Major::kK, MN = Major::kMN;

/// Normal-like numbers of many exponents, so that truncation shows every other order.
template <class T>
emu::Buffer<T> random_operand(const char* name, size_t count, uint64_t seed) {
  emu::Random random{seed};
  std::vector<T> values(count);
  for (T& value : values) {
    const float x = static_cast<float>(random.below(2001)) / 1000 - 1;
    value = round_to<T>(x * static_cast<float>(1 << random.below(6)));
  }
  return emu::Buffer<T>(name, values);
}

/// Operands of a k that is cut into parts: rows of A and B, or of their transposes, follow each other.
template <class T, Major kMajor>
struct Operands {
  int m, n, k;
  emu::Buffer<T> a, b;
  int64_t ld_a, ld_b;

  Operands(int m, int n, int k)
      : m(m),
        n(n),
        k(k),
        a(random_operand<T>("a", static_cast<size_t>(ld(m) * lines(m)), 1)),
        b(random_operand<T>("b", static_cast<size_t>(ld(n) * lines(n)), 2)),
        ld_a(ld(m)),
        ld_b(ld(n)) {}

  /// The product of k from `begin` to `end`, of rows `row` to `row + rows` of A, into or onto an fp32 C.
  GemmProblem problem(emu::Buffer<float>& c, int begin, int end, int row = 0, int rows = 0) {
    GemmProblem q{};
    const auto at = [&](int line, int64_t ld_of) { return kMajor == K ? line * ld_of + begin : begin * ld_of + line; };
    q.a = a.data() + at(row, ld_a), q.b = b.data() + at(0, ld_b), q.type = kType<T>;
    q.m = rows ? rows : m, q.n = n, q.k = end - begin;
    q.ld_a = ld_a, q.ld_b = ld_b;
    q.m_major_a = q.n_major_b = kMajor == MN;
    q.batch_invariant = true;
    q.c = {c.data(), DType::kFloat32, (n + 3) / 4 * 4, 1, 0};
    return q;
  }
  int64_t ld(int line) const { return ((kMajor == K ? k : line) + 7) / 8 * 8; }
  int64_t lines(int line) const { return kMajor == K ? line : k; }
  size_t size_of_c() const { return static_cast<size_t>(m * ((n + 3) / 4 * 4)); }
};

std::string difference(const emu::Buffer<float>& got, const emu::Buffer<float>& expected, size_t skip = 0) {
  for (size_t i = 0; i < got.size(); i++) {
    if (bits_of(got[i]) != bits_of(expected[skip + i]))
      return emu::format("element %zu is %.9g, expected %.9g", i, got[i], expected[skip + i]);
  }
  return "";
}

emu::Buffer<float> filled(size_t count, float value) {
  return emu::Buffer<float>("c", std::vector<float>(count, value));
}

// ---- rows

/// The product in tile `tile`, its operands exchanged or not.
template <class T>
Status in_tile(const GemmProblem& problem, int tile, bool swap) {
  const GemmProblem q = swap ? swapped(problem) : problem;
  return gemm::with_tile<T, K, K, 0, kGemmTileCount>(q, {tile, 1, swap}, {}, nullptr);
}

template <class T>
void tiles_of_one_product(Cases& cases, int m, int n, int k) {
  const auto in = std::make_shared<Operands<T, K>>(m, n, k);
  const auto expected = std::make_shared<emu::Buffer<float>>("c", std::vector<float>(in->size_of_c(), 0.0f));
  emu::options().truncate_mma = true;
  message_of(in_tile<T>(in->problem(*expected, 0, k), gemm_tile_index(64, 64), false));
  for (int tile = 0; tile < kGemmTileCount; tile++) {
    for (const bool swap : {false, true}) {
      if (swap && kGemmTiles[tile].n % 64 == 0 && !gemm_sm90_takes_epilogue(kGemmTiles[tile])) continue;
      const GemmTile& t = kGemmTiles[tile];
      if (swap && !gemm_sm90_takes_epilogue(t)) continue;  // C lies by columns
      cases.check(emu::format("tile %d of %d x %d x %d, swapped %d", tile, m, n, k, swap), [=] {
        emu::options().truncate_mma = true;
        emu::options().sm_count = 4;
        auto c = filled(in->size_of_c(), 0);
        const std::string error = message_of(in_tile<T>(in->problem(c, 0, k), tile, swap));
        return error.empty() ? difference(c, *expected) : error;
      });
    }
  }
  for (const int rows : {1, 5}) {
    cases.check(emu::format("%d rows of %d x %d x %d", rows, m, n, k), [=] {
      emu::options().truncate_mma = true;
      const size_t width = static_cast<size_t>((n + 3) / 4 * 4);
      auto c = filled(static_cast<size_t>(rows) * width, 0);
      const std::string error =
          message_of(in_tile<T>(in->problem(c, 0, k, 3, rows), gemm_tile_index(64, 16), rows == 1));
      return error.empty() ? difference(c, *expected, 3 * width) : error;
    });
  }
}

// ---- sums that start from C

template <class T>
using Run = Status (*)(const GemmProblem&, int tile);

template <class T>
Status on_sm90(const GemmProblem& q, int tile) {
  return gemm_sm90_chained<T>(q, {tile}, nullptr);
}
template <class T>
Status on_sm80(const GemmProblem& q, int tile) {
  return gemm_sm80<T>(q, {kGemmSm80Tiles[tile]}, {}, nullptr);
}

/// C after the parts of k that end at `ends`.
template <class T>
std::string in_parts(Operands<T, MN>& in, Run<T> run, int tile, std::vector<int> ends, emu::Buffer<float>& c) {
  emu::options().truncate_mma = true;
  emu::options().sm_count = 3;
  int begin = 0;
  for (const int end : ends) {
    GemmProblem q = in.problem(c, begin, end);
    q.accumulate = true;
    const std::string error = message_of(run(q, tile));
    if (!error.empty()) return error;
    begin = end;
  }
  return c.check_red_zones();
}

template <class T>
void chains(Cases& cases, const char* name, Run<T> run, std::vector<int> tiles, int m, int n, int k) {
  const auto in = std::make_shared<Operands<T, MN>>(m, n, k);
  const auto whole = std::make_shared<emu::Buffer<float>>("c", std::vector<float>(in->size_of_c(), 0.3f));
  const std::string first = in_parts<T>(*in, run, tiles[0], {k}, *whole);
  for (const int tile : tiles) {
    for (const std::vector<int>& ends : {std::vector<int>{k}, {64, k}, {128, k}, {64, 128, 192, k}}) {
      if (ends.size() > 1 && ends[ends.size() - 2] >= k) continue;
      cases.check(emu::format("%s, tile %d: %d x %d x %d in %zu parts", name, tile, m, n, k, ends.size()), [=] {
        auto c = filled(in->size_of_c(), 0.3f);
        const std::string error = in_parts<T>(*in, run, tile, ends, c);
        return !first.empty() ? first : error.empty() ? difference(c, *whole) : error;
      });
    }
  }
  cases.check(emu::format("%s: %d x %d x %d, the order shows", name, m, n, k), [=] {
    auto c = filled(in->size_of_c(), 0.0f);
    const std::string error = in_parts<T>(*in, run, tiles[0], {k}, c);
    if (!error.empty()) return error;
    for (size_t i = 0; i < c.size(); i++) {
      if (bits_of(c[i] + 0.3f) != bits_of((*whole)[i])) return std::string();
    }
    return std::string("a sum from C is C plus the sum: this test would see no difference");
  });
}

/// Small integers, whose sums are exact: every element is right, and no other is touched.
template <class T>
void edges(Cases& cases, int tile, const Shape& s, Lies lies = Lies::kByRows) {
  const auto problem = std::make_shared<Problem<T, MN, MN>>(s);
  cases.check(title(emu::format("from C, tile %d", tile).c_str(), s), [=] {
    return problem->template compare<float>(
        3.0f,
        [&](GemmProblem q) {
          q.batch_invariant = true;
          return on_sm90<T>(q, tile);
        },
        lies);
  });
}

/// Columns are loaded in pairs; past the last one of an odd number there may be no memory.
void end_of_c(Cases& cases) {
  cases.check("the last element of C is the last of its memory", [] {
    Operands<bf16, MN> in(70, 3, 64);
    auto c = filled(in.size_of_c() - 1, 0);
    GemmProblem q = in.problem(c, 0, 64);
    q.accumulate = true;
    return message_of(on_sm90<bf16>(q, gemm_tile_index(64, 128)));
  });
}

std::vector<int> chained_tiles() {
  std::vector<int> tiles;
  for (int i = 0; i < kGemmTileCount; i++) {
    if (gemm_sm90_chains(kGemmTiles[i])) tiles.push_back(i);
  }
  return tiles;
}

void refused(Cases& cases) {
  cases.check("sums that start from C refuse other problems", [] {
    Operands<bf16, MN> in(64, 64, 64);
    auto c = filled(in.size_of_c(), 0);
    GemmProblem q = in.problem(c, 0, 64);
    if (gemm_sm90_chained<bf16>(q, {0}, nullptr).ok()) return "a product that adds nothing was taken";
    q.accumulate = true;
    if (gemm_sm90_chained<bf16>(q, {gemm_tile_index(64, 64)}, nullptr).ok())
      return "a tile without an instance was taken";
    if (gemm_sm90_chained<bf16>(q, {0, 2}, nullptr).ok()) return "splits were taken";
    q.m_major_a = false;
    if (gemm_sm90_chained<bf16>(q, {0}, nullptr).ok()) return "a k-major A was taken";
    q.m_major_a = true;
    if (gemm_sm80<bf16>(q, {GemmSm80Tile::k128x256}, {}, nullptr).ok())
      return "gemm_sm80 took a tile without an instance";
    return "";
  });
}

void run(Cases& cases) {
  tiles_of_one_product<bf16>(cases, 70, 196, 200);
  tiles_of_one_product<bf16>(cases, 9, 40, 1100);
  const std::vector<int> tiles = chained_tiles();
  chains<bf16>(cases, "sm90", on_sm90<bf16>, tiles, 136, 200, 213);
  chains<bf16>(cases, "sm90", on_sm90<bf16>, tiles, 200, 72, 75);
  chains<bf16>(cases, "sm80", on_sm80<bf16>, {1, 2}, 136, 72, 213);
  chains<bf16>(cases, "sm80", on_sm80<bf16>, {1, 2}, 72, 136, 75);
  for (const int tile : tiles) {
    edges<bf16>(cases, tile, {300, 264, 136, 0, 1, 3});
    edges<bf16>(cases, tile, {72, 40, 9, 0, 1, 4});
  }
  const int pingpong = gemm_tile_index(128, 128, true), small = gemm_tile_index(64, 128);
  for (const int tile : {pingpong, small}) {
    edges<bf16>(cases, tile, {130, 133, 72, 0, 1, 2});    // rows of C that TMA cannot write
    edges<bf16>(cases, tile, {72, 136, 72, 8, 1, 2, 3});  // a batch
    edges<bf16>(cases, tile, {72, 130, 72, 0, 1, 2}, Lies::kByColumns);
    edges<bf16>(cases, tile, {1, 1, 1});
  }
  end_of_c(cases);
  refused(cases);
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_chains", Seeds(argc, argv, 1), {run});
}
