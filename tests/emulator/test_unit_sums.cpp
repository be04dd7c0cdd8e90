// unit_sums on the emulator, bit for bit: numbers whose sum depends on the order, over ragged units, columns and
// dtypes, in one call and in two, with and without a norm.
#include <cmath>

#include "emulator/harness.h"
#include "tensor_lists.h"
#include "unit_sums/unit_sums.cu"

namespace ak::test {
namespace {

struct Problem {
  int64_t rows;
  int columns = 40;
  int64_t cut = 0;  // rows of the first of two calls
  bool norm = false, centred = false, fresh = false;
  DType grad = DType::kBFloat16, x = DType::kFloat32;
};

std::string run(const Problem& q) {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  Rng rng(size(q.rows * 31 + q.columns));
  const auto number = [&] { return std::ldexp(static_cast<double>(rng() % 255) - 127, int(rng() % 8) - 4); };
  AnyBuffer grad("grad", q.grad, size(q.rows * q.columns)), x("x", q.x, size(q.rows * q.columns));
  for (size_t i = 0; i < grad.size(); i++) grad.set(i, number()), x.set(i, number() / 64);
  std::vector<float> means(size(q.rows)), rstds(size(q.rows)), sums(size(q.columns), q.fresh ? NAN : 0.3f);
  for (size_t r = 0; r < means.size(); r++)
    means[r] = static_cast<float>(number()), rstds[r] = static_cast<float>(0.1 + std::fabs(number()));
  emu::Buffer<float> mean("mean", means), rstd("rstd", rstds), out("sums", sums);

  std::vector<float> want(size(q.columns), q.fresh ? 0.0f : 0.3f);
  for (size_t c = 0; c < want.size(); c++) {
    for (int64_t first = 0; first < q.rows; first += 64) {
      float unit = 0;
      for (int64_t r = first; r < std::min(q.rows, first + 64); r++) {
        const size_t at = size(r * q.columns) + c;
        const float g = static_cast<float>(grad.get(at)), v = static_cast<float>(x.get(at));
        unit += q.norm ? g * ((q.centred ? v - means[size(r)] : v) * rstds[size(r)]) : g;
      }
      want[c] += unit;
    }
  }
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, q.cut}, {q.cut, q.rows}}) {
    if (begin == end && q.cut == 0 && q.rows > 0) continue;
    UnitSums p{};
    const auto at = [&](AnyBuffer& t, DType type) {
      return static_cast<char*>(t.data()) + begin * q.columns * bytes_of(type);
    };
    p.sums = out.data();
    p.grad = at(grad, q.grad), p.grad_type = q.grad;
    if (q.norm) p.x = at(x, q.x), p.x_type = q.x, p.rstd = rstd.data() + begin;
    if (q.centred) p.mean = mean.data() + begin;
    p.rows = end - begin, p.columns = q.columns;
    p.fresh = q.fresh && begin == 0;
    emu::Buffer<float> units("units", size(p.unit_count() * q.columns));
    p.units = units.data();
    const std::string error = message_of(unit_sums(p, nullptr));
    if (!error.empty()) return error;
    if (!units.check_red_zones().empty()) return units.check_red_zones();
  }
  for (size_t c = 0; c < want.size(); c++) {
    if (out[c] != want[c]) return emu::format("column %zu is %.9g, expected %.9g", c, out[c], want[c]);
  }
  return out.check_red_zones();
}

void all(Cases& cases) {
  for (const int64_t rows : {1, 16, 17, 63, 64, 65, 150, 1300}) {
    const std::string title = std::to_string(rows) + " rows";
    cases.check(title, [&] { return run({.rows = rows}); });
    cases.check(title + ", fresh", [&] { return run({.rows = rows, .columns = 7, .fresh = true}); });
    cases.check(title + ", norm", [&] { return run({.rows = rows, .norm = true}); });
    cases.check(title + ", centred", [&] { return run({.rows = rows, .norm = true, .centred = true}); });
    if (rows > 64)
      cases.check(title + " in two calls", [&] { return run({.rows = rows, .cut = 64, .norm = true, .fresh = true}); });
  }
  cases.check("no rows", [] { return run({.rows = 0, .fresh = true}); });
  for (const int columns : {1, 33, 256, 300}) {
    cases.check(std::to_string(columns) + " columns", [&] { return run({.rows = 70, .columns = columns}); });
  }
  for (int grad = 0; grad < 3; grad++) {
    for (int x = 0; x < 3; x++) {
      cases.check("types " + std::to_string(grad) + std::to_string(x), [&] {
        Problem q{.rows = 70, .norm = true, .centred = true};
        q.grad = static_cast<DType>(grad), q.x = static_cast<DType>(x);
        return run(q);
      });
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("unit_sums", ak::test::Seeds(argc, argv, 2));
  ak::test::all(cases);
  return cases.finish();
}
