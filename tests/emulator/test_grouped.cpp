// Grouped products on the emulator, gemm_sm90_grouped and gemm_sm80_grouped: the walk over groups, maps that clip at
// the end of a group, tiles without terms, the epilogues and the rows in no group. A case may launch a second time with
// other ends, in place, as a replayed graph does.
#include "grouped_problem.h"

namespace ak::test {
namespace {

template <class T, class Out>
std::string run(const Setup& s, Kernel kernel) {
  emu::options().sm_count = s.sms;
  Product<T, Out> product(s);
  std::string wrong = product.run(kernel, s.ends);
  if (wrong.empty() && !s.next_ends.empty()) wrong = product.run(kernel, s.next_ends);
  return wrong;
}

template <class T>
void check(Cases& cases, const Setup& s, std::initializer_list<Kernel> kernels = {Kernel::kSm90, Kernel::kSm80}) {
  for (const Kernel kernel : kernels) {
    cases.check((kernel == Kernel::kSm90 ? "sm90: " : "sm80: ") + s.title(),
                [&] { return s.fp32 ? run<T, float>(s, kernel) : run<T, T>(s, kernel); });
  }
}

/// Every way to divide few rows or terms among three groups, empty ones and a rest included.
void partitions(Cases& cases) {
  constexpr int kTotal = 4;
  for (int x = 0; x <= kTotal; x++) {
    for (int y = x; y <= kTotal; y++) {
      for (int z = y; z <= kTotal; z++) {
        check<bf16>(cases, {.total = kTotal, .other = 8, .n = 16, .ends = {x, y, z}, .bias = 2});
        check<fp16>(cases, {.total = kTotal, .other = 8, .n = 16, .ends = {x, y, z}, .sums = true});
        check<fp16>(
            cases,
            {.total = kTotal, .other = 8, .n = 16, .ends = {x, y, z}, .sums = true, .fp32 = true, .accumulate = true});
      }
    }
  }
}

/// Groups around the size of a tile and of a k step, on fewer and more SMs than tiles.
void sizes(Cases& cases) {
  for (const int size : {1, 63, 64, 65, 127, 128, 129}) {
    const Ends ends = {size, size, 2 * size, 2 * size + 3};
    check<bf16>(cases, {.total = 2 * size + 7, .other = 72, .n = 136, .ends = ends, .sms = size % 4 + 1});
    check<fp16>(cases, {.total = 2 * size + 3, .other = 136, .n = 72, .ends = ends, .sums = true, .sms = 3});
  }
  check<bf16>(cases, {.total = 600, .other = 40, .n = 264, .ends = {10, 300, 590}, .n_major_b = true, .sms = 5});
  check<fp16>(cases, {.total = 1300, .other = 8, .n = 200, .ends = {1290, 1300}, .bias = 1, .sms = 3});  // two rasters
  check<bf16>(cases, {.total = 200, .other = 264, .n = 264, .ends = {130, 131, 200}, .sums = true, .sms = 3});
  check<bf16>(cases, {.total = 20, .other = 1032, .n = 136, .ends = {9, 20}, .sums = true, .sms = 4}, {Kernel::kSm90});
  // Every stage of the ring after a tile that used none: one, since two wrong arrivals restore a barrier's parity.
  check<fp16>(cases, {.total = 600, .other = 16, .n = 16, .ends = {0, 600}, .sums = true, .sms = 1}, {Kernel::kSm90});
}

/// Every number of rows of a group that ends within its first or second slice of 64, or a little later: before a group
/// of NaN, and before rows that nobody may read.
void every_size(Cases& cases) {
  for (int size = 0; size <= 200; size++) {
    Setup s{.total = size + 9, .other = 72, .n = 16, .ends = {3, 3 + size, size + 5}, .sms = size % 3 + 1};
    s.nan_group = 2;
    check<bf16>(cases, s, {Kernel::kSm90});
    s.ends = {3, 3 + size, 3 + size};
    s.other = 8, s.n = 136;
    s.n_major_b = true, s.fp32 = size % 3 == 0;
    s.gap = size % 5 == 0;                                            // stored by the threads
    if (size % 2) s.activation = Activation::relu, s.keeps_z = true;  // moved by the scheduler warp
    check<fp16>(cases, s, {Kernel::kSm90});
  }
}

/// Many groups, most of them empty: more than a warp looks at in one step.
void many_groups(Cases& cases) {
  Ends ends(70, 0);
  for (int g = 0; g < 70; g++) ends[static_cast<size_t>(g)] = g < 5 ? 0 : g < 34 ? 2 : g == 34 ? 9 : g < 69 ? 140 : 141;
  check<fp16>(cases, {.total = 150, .other = 8, .n = 16, .ends = ends, .bias = 2, .sms = 3, .offs_stride = 2});
  check<bf16>(cases, {.total = 150, .other = 8, .n = 16, .ends = ends, .sums = true, .sms = 3, .offs_stride = 3});
  check<bf16>(
      cases,
      {.total = 141, .other = 8, .n = 16, .ends = ends, .sums = true, .fp32 = true, .accumulate = true, .sms = 4});
  check<fp16>(cases, {.total = 30, .other = 8, .n = 16, .ends = Ends(33, 30), .sms = 1});  // one group has all
}

/// NaN in one group stays there.
void containment(Cases& cases) {
  for (const int group : {0, 1, 2}) {
    const Ends ends = {70, 90, 200};
    check<bf16>(cases, {.total = 210, .other = 72, .n = 72, .ends = ends, .nan_group = group});
    check<bf16>(cases, {.total = 210, .other = 72, .n = 72, .ends = ends, .sums = true, .nan_group = group});
  }
}

/// Ends that are out of order, negative or beyond the last row.
void hostile(Cases& cases) {
  for (const Ends& ends :
       {Ends{30, 10, 20}, {-5, -1, 12}, {500, 3, 7}, {10, INT32_MAX, 20}, {INT32_MIN, 40, INT32_MAX}, {40, 40, 41}}) {
    check<bf16>(cases, {.total = 40, .other = 8, .n = 16, .ends = ends, .bias = 2});
    check<fp16>(cases, {.total = 40, .other = 8, .n = 16, .ends = ends, .sums = true});
  }
}

/// The same arguments with other ends.
void replayed(Cases& cases) {
  check<bf16>(cases, {.total = 140, .other = 72, .n = 72, .ends = {3, 130, 140}, .sms = 3, .next_ends = {0, 0, 9}});
  check<bf16>(cases, {.total = 140, .other = 72, .n = 72, .ends = {0, 0, 0}, .sms = 3, .next_ends = {70, 70, 140}});
  check<fp16>(
      cases,
      {.total = 140, .other = 72, .n = 72, .ends = {140, 140, 140}, .sums = true, .sms = 3, .next_ends = {0, 69, 69}});
}

void epilogues(Cases& cases) {
  const Ends ends = {50, 50, 180};
  const Setup base{.total = 190, .other = 40, .n = 144, .ends = ends, .sms = 3};
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu, Activation::silu, Activation::swiglu}) {
    for (const bool keeps_z : {false, true}) {
      for (const int bias : {0, 1, 2}) {
        Setup s = base;
        s.activation = activation, s.keeps_z = keeps_z, s.bias = bias;
        s.float_bias = bias == 2 && keeps_z;
        s.n_major_b = bias == 1;
        s.fp32 = activation == Activation::gelu;
        check<bf16>(cases, s);
      }
    }
  }
  Setup s = base;
  for (const int gap : {1, 2, 4, 8}) {  // unaligned rows of C, and z beside them
    s = base, s.gap = gap, s.bias = 2;
    check<fp16>(cases, s);
    s.activation = Activation::silu, s.keeps_z = true;
    check<fp16>(cases, s);
    s = base, s.gap = gap, s.fp32 = true, s.bias = 2, s.float_bias = true;
    check<bf16>(cases, s);
  }
  s = base, s.n = 141, s.bias = 2;  // columns that fill no 16 bytes
  check<bf16>(cases, s);
}

void sums(Cases& cases) {
  const Ends ends = {0, 66, 66, 130};
  const Setup base{.total = 140, .other = 72, .n = 136, .ends = ends, .sums = true, .sms = 3};
  for (const bool fp32 : {false, true}) {
    for (const int gap : {0, 1, 8}) {
      Setup s = base;
      s.fp32 = fp32, s.gap = gap;
      check<bf16>(cases, s);
      if (!fp32) continue;
      s.accumulate = true;
      check<fp16>(cases, s);
    }
  }
  Setup s = base;
  s.fp32 = true, s.turned_c = true;
  check<fp16>(cases, s);
  s.accumulate = true;
  check<fp16>(cases, s);
}

void refused(Cases& cases) {
  const auto refuses = [&](const char* what, auto change) {
    cases.check(what, [&]() -> std::string {
      alignas(16) static uint16_t memory[8];
      GroupedProblem p{};
      p.groups = 1;
      GemmProblem& q = p.product;
      q.a = q.b = memory;
      q.m = q.n = 1, q.k = 8, q.ld_a = q.ld_b = 8;
      if (const char* why = gemm_sm90_refuses_groups(p)) return why;
      change(p, memory);
      return gemm_sm90_refuses_groups(p) ? "" : "taken";
    });
  };
  refuses("no groups", [](GroupedProblem& p, uint16_t*) { p.groups = 0; });
  refuses("an unaligned A", [](GroupedProblem& p, uint16_t* at) { p.product.a = at + 1; });
  refuses("matrices of B at odd places", [](GroupedProblem& p, uint16_t*) { p.product.batch_stride_b = 9; });
  refuses("an m-major A of rows", [](GroupedProblem& p, uint16_t*) { p.product.m_major_a = true; });
  refuses("a row-major A of sums", [](GroupedProblem& p, uint16_t*) { p.sums = p.product.n_major_b = true; });
  refuses("a residual", [](GroupedProblem& p, uint16_t* at) { p.product.epilogue.residual.data = at; });
  refuses("more rows than a ragged map has", [](GroupedProblem& p, uint16_t*) { p.product.m = (1 << 30) + 1; });
}

/// Random products of both kinds. The seed of the schedule selects another one in each run.
void random_products(Cases& cases) {
  emu::Random random{7};
  for (int i = 0; i < 30; i++) {
    const auto below = [&](int x) { return static_cast<int>(random.below(static_cast<uint64_t>(x))); };
    constexpr int kSizes[] = {0, 1, 63, 64, 65, 127, 128, 129};
    Setup s{};
    s.sums = below(2) == 0;
    const int groups = 1 + below(6);
    int total = 0;
    for (int g = 0; g < groups; g++) s.ends.push_back(total += below(2) ? kSizes[below(8)] : below(40));
    s.total = std::max(1, total + (below(3) == 0 ? below(140) : 0));
    s.other = 1 + below(140), s.n = 1 + below(140);
    s.sms = 1 + below(6);
    s.n_major_b = !s.sums && below(2) == 0;
    s.fp32 = below(3) == 0;
    s.accumulate = s.sums && s.fp32 && below(2) == 0;
    s.bias = s.sums ? 0 : below(3);
    s.nan_group = below(4) == 0 ? below(groups) : -1;
    s.gap = below(4) == 0 ? below(9) : 0;
    s.keeps_z = !s.sums && below(3) == 0;
    if (below(2)) {
      check<bf16>(cases, s);
    } else {
      check<fp16>(cases, s);
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("grouped", Seeds(argc, argv, 1, 2),
                     {partitions, hostile, sums, containment, many_groups, replayed, sizes, every_size, epilogues,
                      refused, random_products});
}
