// softmax_rows and its backward on the emulator, against float64: over types, lengths, addresses and masks, and the
// places where the kernels change their ways: rows that a team holds, that stay in shared memory, or come in pieces.
#include <cmath>
#include <limits>

#include "emulator/harness.h"
#include "softmax/rows.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double roundoff(DType t) { return t == DType::kFloat32 ? 0x1p-24 : t == DType::kBFloat16 ? 0x1p-8 : 0x1p-11; }

struct Options {
  int rows = 3, columns = 40;
  DType x = DType::kBFloat16, y = DType::kBFloat16;
  bool log = false, safe = false, masked = false;
  int64_t mask_sizes[2] = {1, 3};  // of the last two of three dimensions
  size_t offset = 0, mask_offset = 0;
  size_t out_offset = 0;  // of the results, beside offset
  int kept = 0;           // columns that the mask keeps, if not 0; -1: none
  double all = 0;         // instead of what is drawn, if not 0
  double last = 0;
  int sms = 1;
  int shared = 232448;  // bytes a block may have: room for so many teams, or for none
};

/// The mask of the elements; a matrix of its own for every dimension it is not expanded along.
struct Mask {
  emu::Buffer<uint8_t> bytes;
  RowMask rows;

  Mask(const Options& o, Rng& rng, int64_t own_rows, bool expanded)
      : bytes("mask", static_cast<size_t>(own_rows * o.columns), o.mask_offset), rows{} {
    for (int64_t i = 0; i < own_rows * o.columns; i++)
      bytes.set(static_cast<size_t>(i), o.kept ? i % o.columns < o.kept : i % o.columns ? rng() % 4 > 0 : 1);
    rows = {bytes.data(),
            {o.mask_sizes[0], o.mask_sizes[1]},
            {expanded ? o.columns : o.mask_sizes[0] * o.mask_sizes[1] * o.columns,
             expanded ? 0 : o.mask_sizes[1] * o.columns, expanded ? 0 : o.columns},
            o.columns % 8 == 0 && o.mask_offset % 8 == 0};
  }
};

bool differs(double got, double want, double bound) {
  return std::isnan(want) ? !std::isnan(got) : std::isinf(want) ? got != want : !(std::fabs(got - want) <= bound);
}

/// Empty, or what is wrong. `results`: those of both ops, if they are asked for.
std::string run(const Options& o, bool expanded = false, std::vector<double>* results = nullptr) {
  emu::options().sm_count = o.sms;
  emu::options().shared_limit = o.shared;
  const auto n = static_cast<size_t>(o.rows * o.columns), columns = static_cast<size_t>(o.columns);
  Rng rng(n);
  AnyBuffer x("x", o.x, n, o.offset), y("y", o.y, n, o.offset + o.out_offset), grad("grad", o.y, n, o.offset);
  AnyBuffer out("out", o.x, n, o.offset + o.out_offset);
  emu::Buffer<float> statistics("statistics", 2 * static_cast<size_t>(o.rows));
  const int64_t inner = o.mask_sizes[0] * o.mask_sizes[1];
  Mask mask(o, rng, expanded ? o.rows / inner : o.rows, expanded);
  for (size_t i = 0; i < n; i++) {
    x.set(i, o.all != 0 ? o.all : (static_cast<double>(rng() % 257) - 128) / 16);
    if (o.last != 0 && i % columns == columns - 1) x.set(i, o.last);
    grad.set(i, (static_cast<double>(rng() % 33) - 16) / 8);
  }
  SoftmaxRows p{};
  p.x = x.data();
  p.y = y.data();
  p.statistics = o.log ? statistics.data() : nullptr;
  if (o.masked) p.mask = mask.rows;
  p.x_type = o.x;
  p.y_type = o.y;
  p.rows = o.rows;
  p.columns = o.columns;
  p.safe = o.safe;
  std::string error = message_of(softmax_rows(p, nullptr));
  if (!error.empty()) return error;
  SoftmaxRowsBackward q{};
  q.grad = grad.data();
  q.of = o.log ? x.data() : y.data();
  q.statistics = p.statistics;
  q.mask = p.mask;
  q.out = out.data();
  q.grad_type = o.y;
  q.of_type = o.log ? o.x : o.y;
  q.out_type = o.x;
  q.rows = o.rows;
  q.columns = o.columns;
  error = message_of(softmax_rows_backward(q, nullptr));
  if (!error.empty()) return error;

  for (size_t r = 0; r < static_cast<size_t>(o.rows); r++) {
    std::vector<double> v(columns), g(columns);
    const int64_t row = static_cast<int64_t>(r);
    double largest = -HUGE_VAL, sum = 0, dot = 0, total = 0, size = 0, nan = 0;
    const auto kept = [&](size_t c) {
      return !o.masked || mask.bytes[static_cast<size_t>(expanded ? row / inner : row) * columns + c] != 0;
    };
    for (size_t c = 0; c < columns; c++) {
      v[c] = kept(c) ? static_cast<double>(x.get(r * columns + c)) : -HUGE_VAL;
      g[c] = grad.get(r * columns + c);
      if (std::isnan(v[c])) nan = kNaN;
      largest = std::fmax(largest, v[c]);
    }
    const bool empty = largest == -HUGE_VAL && nan == 0;
    const double base = empty || largest == -HUGE_VAL ? 0 : largest;
    for (size_t c = 0; c < columns; c++) sum += std::exp(v[c] - base);
    for (size_t c = 0; c < columns; c++) {
      const double of = o.log ? 1 : q.of_type == DType::kFloat32 ? y.get(r * columns + c) : y.get(r * columns + c);
      dot += g[c] * of;
      total += g[c];
      size += std::fabs(g[c]) * std::fabs(of);
    }
    for (size_t c = 0; c < columns; c++) {
      const size_t i = r * columns + c;
      const double e = std::exp(v[c] - base), probability = empty ? (o.safe ? 0 : kNaN) : e / sum;
      const double moved = v[c] - base, log_sum = empty ? (o.safe ? 0 : kNaN) : std::log(sum);
      const double want = o.log ? moved - log_sum : probability;
      const double fp32 = 32 * 0x1p-22 * (o.log ? std::fabs(std::isinf(moved) ? 0 : moved) + 8 : want);
      const double tiny = o.y == DType::kFloat16 ? 0x1p-25 : 0x1p-126;
      if (differs(y.get(i), want, fp32 + 1.01 * roundoff(o.y) * std::fabs(want) + tiny))
        return emu::format("y[%zu, %zu] is %.9g, expected %.9g", r, c, static_cast<double>(y.get(i)), want);
      const double stored = y.get(i);
      double gradient = o.log ? g[c] - probability * total : stored * (g[c] - dot);
      double bound = o.log ? 64 * 0x1p-22 * probability * size : 16 * 0x1p-22 * std::fabs(stored) * (size + 2);
      if (!kept(c)) gradient = bound = 0;
      if (differs(out.get(i), gradient, bound + 1.01 * roundoff(o.x) * std::fabs(gradient) + 0x1p-24))
        return emu::format("out[%zu, %zu] is %.9g, expected %.9g", r, c, static_cast<double>(out.get(i)), gradient);
    }
  }
  for (const AnyBuffer* b : {&y, &out}) {
    for (size_t i = 0; results != nullptr && i < n; i++) results->push_back(b->get(i));
    if (!b->check_red_zones().empty()) return b->check_red_zones();
  }
  return statistics.check_red_zones();
}

void shapes(Cases& cases) {
  for (const int columns : {1, 7, 40, 512, 513, 2056, 8192, 8193, 16400}) {
    for (const bool log : {false, true}) {
      const std::string title = std::to_string(columns) + (log ? " columns, log" : " columns");
      cases.check(title, [&] { return run({.rows = 2, .columns = columns, .log = log}); });
      cases.check(title + ", masked", [&] {
        return run({.rows = 2, .columns = columns, .log = log, .masked = true, .mask_sizes = {1, 2}});
      });
    }
  }
  for (const bool log : {false, true}) {
    for (int x = 0; x < 3; x++) {
      const Options o{.x = static_cast<DType>(x), .y = static_cast<DType>((x + 1) % 3), .log = log, .masked = true};
      cases.check("types " + std::to_string(x), [&] { return run(o); });
    }
    cases.check("between boundaries", [&] { return run({.log = log, .masked = true, .offset = 1}); });
    cases.check("a mask between boundaries", [&] { return run({.log = log, .masked = true, .mask_offset = 3}); });
    cases.check("an expanded mask",
                [&] { return run({.rows = 12, .log = log, .masked = true, .mask_sizes = {2, 3}}, true); });
    cases.check("a mask of three dimensions",
                [&] { return run({.rows = 12, .log = log, .masked = true, .mask_sizes = {2, 3}}); });
    // NaN, but not its gradient; of teams, and of rows by way of shared memory.
    for (const int columns : {40, 803}) {
      cases.check("nothing is kept", [&] { return run({.columns = columns, .log = log, .masked = true, .kept = -1}); });
    }
  }
}

void plain_and_masked(Cases& cases, const std::string& title, Options o, size_t mask_offset) {
  cases.check(title, [&] { return run(o); });
  o.masked = true;
  o.mask_sizes[0] = 1;
  o.mask_sizes[1] = o.rows;
  o.mask_offset = mask_offset;
  cases.check(title + ", masked", [&] { return run(o); });
}

void teams(Cases& cases) {
  for (const bool log : {false, true}) {
    const auto check = [&](const std::string& title, Options o) {
      o.log = log;
      plain_and_masked(cases, title, o, 0);
    };
    for (const int columns : {128, 256, 264, 520, 776, 1032, 2056, 3080, 4104})
      check("teams for " + std::to_string(columns), {.columns = columns, .sms = 2});
    check("the largest row of a team", {.rows = 1, .columns = 8192, .x = DType::kFloat32, .y = DType::kFloat32});
    // One team backward, two forward, so that each slot is filled several times.
    check("a ring of 9", {.rows = 21, .columns = 64, .shared = 2400});
    check("a ring of 4", {.rows = 10, .columns = 264, .shared = 4300});
    check("a ring of 3", {.rows = 14, .columns = 600, .shared = 7300});
    check("a ring of 4 warps", {.rows = 18, .columns = 1048, .shared = 17000});
    for (const int columns : {64, 768, 2056})
      check("no room for a team, " + std::to_string(columns), {.columns = columns, .shared = 700});
    cases.check("a mask of three dimensions, several rows a team", [&] {
      return run({.rows = 24, .columns = 64, .log = log, .masked = true, .mask_sizes = {2, 3}, .shared = 2400});
    });
  }
}

void pieces(Cases& cases) {
  for (const bool log : {false, true}) {
    const auto check = [&](const std::string& title, Options o) {
      o.log = log;
      plain_and_masked(cases, title, o, 5);
    };
    for (const auto type : {DType::kBFloat16, DType::kFloat32}) {
      const std::string name = type == DType::kFloat32 ? ", fp32" : "";
      check("rows in turn" + name, {.rows = 9, .columns = 129, .x = type, .y = type});
      check("pieces" + name, {.rows = 4, .columns = 803, .x = type, .y = type, .offset = 1, .shared = 3200});
      check("pieces of one word" + name, {.rows = 2, .columns = 53, .x = type, .y = type, .shared = 500});
    }
    check("the last piece is a word", {.rows = 3, .columns = 800, .offset = 3, .shared = 3200});
    check("three slots", {.rows = 7, .columns = 301, .sms = 2, .shared = 6400});
    check("results elsewhere", {.columns = 301, .offset = 1, .out_offset = 3});
    check("results elsewhere, x aligned", {.columns = 304, .out_offset = 3});
    check("results of another width", {.columns = 301, .x = DType::kFloat32});
    check("results of another width, wider", {.columns = 301, .y = DType::kFloat32});
    for (const int shared : {232448, 3200}) {
      for (const auto type : {DType::kFloat16, DType::kFloat32}) {
        cases.check("the address changes no bit", [&] {
          std::vector<double> first, other;
          Options o{.columns = 803, .x = type, .y = type, .log = log, .shared = shared};
          std::string error = run(o, false, &first);
          for (size_t offset = 1; error.empty() && offset < 8; offset++) {
            o.offset = offset;
            other.clear();
            error = run(o, false, &other);
            if (error.empty() && other != first) error = emu::format("offset %zu has other bits", offset);
          }
          return error;
        });
      }
    }
    // A thread that sees only masked columns, while the largest logit is far below 0.
    for (const int columns : {8201, 200}) {
      cases.check("shares of nothing", [&] {
        return run({.rows = 1,
                    .columns = columns,
                    .log = log,
                    .masked = true,
                    .mask_sizes = {1, 1},
                    .mask_offset = 1,
                    .kept = 5,
                    .all = -200});
      });
    }
  }
}

// Bytes of the next rows on their way to an SM of an H200 while its teams are at work: reads at half of 4.25 TB/s that
// take 800 ns need 13 KB.
void bytes_in_flight(Cases& cases) {
  emu::options().sm_count = 132;
  emu::options().shared_limit = 232448;
  for (const int columns : {128, 256, 512, 768, 1024, 2048, 3072, 4096, 8192}) {
    cases.check("bytes in flight, " + std::to_string(columns), [=] {
      int64_t bytes = 0;
      (void)with_row_team<RowTeam<8, 32>>(columns, [&]<class Team>(Team) -> Status {
        const RingMatrix x[] = {{&bytes, DType::kBFloat16, columns}};
        bytes = int64_t{ring_teams<Team>(x, 1 << 20, columns, kRingWarps / Team::kWarps)} * (Team::kStages - 1) *
                columns * 2;
        return {};
      });
      return bytes >= 32 * 1024 ? "" : emu::format("%d bytes", static_cast<int>(bytes));
    });
  }
  const auto of_pieces = [&]<int kThreads>(const char* title, const auto& bytes, int columns) {
    cases.check(std::string(title) + std::to_string(columns), [=] {
      const PieceShape shape = piece_shape<kThreads>(bytes, columns);
      int64_t ahead = 0;
      for (const int b : bytes) ahead += int64_t{b} * shape.columns * (shape.slots - 1) * shape.blocks;
      return shape.bytes <= 232448 && ahead >= 40 * 1024 ? "" : emu::format("%d bytes", static_cast<int>(ahead));
    });
  };
  const int forward[] = {2, 0}, backward[] = {2, 2, 0};
  of_pieces.operator()<64>("bytes in flight, unaligned ", forward, 513);
  of_pieces.operator()<64>("bytes in flight, unaligned ", forward, 1792);
  of_pieces.operator()<256>("bytes in flight, unaligned ", forward, 1793);
  of_pieces.operator()<256>("bytes in flight, unaligned ", forward, 4095);
  for (const int columns : {8200, 16383}) of_pieces.operator()<512>("bytes in flight, long ", forward, columns);
  for (const int columns : {32768, 50257, 57000, 65536, 131072}) {
    of_pieces.operator()<1024>("bytes in flight, long ", forward, columns);
    of_pieces.operator()<1024>("bytes in flight, backward ", backward, columns);
  }
}

void special_values(Cases& cases) {
  for (const int columns : {40, 41, 8200}) {
    for (const bool log : {false, true}) {
      for (const bool safe : {false, true}) {
        const auto with = [&](double all, double last) {
          return run({.rows = 1, .columns = columns, .log = log, .safe = safe, .all = all, .last = last});
        };
        cases.check("nothing but -inf", [&] { return with(-INFINITY, 0); });
        cases.check("one of all", [&] { return with(-INFINITY, 2); });
        cases.check("NaN among -inf", [&] { return with(-INFINITY, NAN); });
        cases.check("NaN", [&] { return with(0, NAN); });
        cases.check("large", [&] { return with(30000, 30128); });
        cases.check("all equal", [&] { return with(-30000, 0); });
        cases.check("all equal and large, in fp32", [&] {
          return run({.rows = 1, .columns = columns, .y = DType::kFloat32, .log = log, .safe = safe, .all = 3e6});
        });
      }
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("softmax_rows", ak::test::Seeds(argc, argv, 1));
  ak::test::shapes(cases);
  ak::test::teams(cases);
  ak::test::pieces(cases);
  ak::test::bytes_in_flight(cases);
  ak::test::special_values(cases);
  return cases.finish();
}
