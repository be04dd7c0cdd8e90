// spread_rows and combine_rows on the emulator, bit for bit: over choices, columns, dtypes and addresses, and with
// places that do not exist.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "emulator/harness.h"
#include "routing/rows.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

struct Problem {
  int64_t tokens;
  int top_k;
  int64_t columns = 40;
  DType narrow = DType::kBFloat16;  // of the rows of choices
  bool wide = false;                // the rows of tokens are fp32
  bool weighted = true, dots = false;
  size_t offset = 0;     // elements from a multiple of 16 bytes to every matrix
  bool hostile = false;  // some places are out of range
};

size_t size(int64_t n) { return static_cast<size_t>(n); }

/// The rows of tokens and of choices, one of which a kernel writes.
struct Operands {
  const Problem& q;
  int64_t rows = q.tokens * q.top_k;
  AnyBuffer of_tokens{"tokens", q.wide ? DType::kFloat32 : q.narrow, size(q.tokens * q.columns), q.offset};
  AnyBuffer of_choices{"choices", q.narrow, size(rows * q.columns), q.offset};
  std::vector<int32_t> place;
  std::vector<float> weight;
  emu::Buffer<int32_t> places;
  emu::Buffer<float> weights;

  explicit Operands(const Problem& q, Rng rng)
      : q(q), place(drawn(q, rng)), weight(factors(q, rng)), places("places", place), weights("weights", weight) {}

  static std::vector<int32_t> drawn(const Problem& q, Rng& rng) {
    std::vector<int32_t> place(size(q.tokens * q.top_k));
    std::iota(place.begin(), place.end(), 0);
    std::shuffle(place.begin(), place.end(), rng);
    if (!q.hostile) return place;
    place.front() = -1, place.back() = static_cast<int32_t>(place.size()), place[place.size() / 2] = INT32_MAX;
    return place;
  }
  static std::vector<float> factors(const Problem& q, Rng& rng) {
    std::vector<float> weight(size(q.tokens * q.top_k), 1.0f);
    for (float& w : weight) w = q.weighted ? symmetric(rng, 2.0f) : 1.0f;
    return weight;
  }
  static void fill(AnyBuffer& buffer, Rng& rng) {
    for (size_t i = 0; i < buffer.size(); i++) buffer.set(i, symmetric(rng, 4.0f));
  }
  bool exists(size_t choice) const { return place[choice] >= 0 && place[choice] < rows; }
  Routes routes() { return {places.data(), q.weighted ? weights.data() : nullptr, q.tokens, q.columns, q.top_k}; }
};

float rounded(DType type, float x) {
  return type == DType::kFloat32    ? x
         : type == DType::kBFloat16 ? to_float(round_to<bf16>(x))
                                    : to_float(round_to<fp16>(x));
}

std::string combine(const Problem& q) {
  Rng rng(size(q.tokens * 31 + q.columns));
  Operands in(q, rng);
  Operands::fill(in.of_choices, rng);
  const CombineRows p{in.routes(), in.of_choices.data(), in.of_tokens.data(), q.narrow, in.of_tokens.dtype()};
  const std::string error = message_of(combine_rows(p, nullptr));
  if (!error.empty()) return error;
  for (int64_t t = 0; t < q.tokens; t++) {
    for (int64_t c = 0; c < q.columns; c++) {
      float sum = 0.0f;
      for (size_t choice = size(t * q.top_k); choice < size((t + 1) * q.top_k); choice++) {
        if (in.exists(choice)) sum += in.weight[choice] * in.of_choices.get(size(in.place[choice] * q.columns + c));
      }
      const float got = in.of_tokens.get(size(t * q.columns + c)), want = rounded(in.of_tokens.dtype(), sum);
      if (!(got == want)) return emu::format("out[%d, %d] is %.9g, expected %.9g", int(t), int(c), got, want);
    }
  }
  return in.of_tokens.check_red_zones();
}

std::string spread(const Problem& q) {
  Rng rng(size(q.tokens * 17 + q.columns));
  Operands in(q, rng);
  Operands::fill(in.of_tokens, rng);
  AnyBuffer y("y", q.narrow, in.of_choices.size(), q.offset);
  Operands::fill(y, rng);
  emu::Buffer<float> dots("dots", size(in.rows));
  const SpreadRows p{in.routes(),
                     in.of_tokens.data(),
                     q.dots ? y.data() : nullptr,
                     in.of_choices.data(),
                     q.dots ? dots.data() : nullptr,
                     in.of_tokens.dtype(),
                     q.narrow};
  const std::string error = message_of(spread_rows(p, nullptr));
  if (!error.empty()) return error;
  for (size_t choice = 0; choice < size(in.rows); choice++) {
    double dot = 0, magnitude = 0;
    for (int64_t c = 0; in.exists(choice) && c < q.columns; c++) {
      const size_t at = size(in.place[choice] * q.columns + c);
      const float x = in.of_tokens.get(choice / size(q.top_k) * size(q.columns) + size(c));
      const float got = in.of_choices.get(at), want = rounded(q.narrow, in.weight[choice] * x);
      if (!(got == want)) return emu::format("out[%zu] is %.9g, expected %.9g", at, got, want);
      dot += static_cast<double>(x) * y.get(at), magnitude += std::fabs(static_cast<double>(x) * y.get(at));
    }
    if (q.dots && !(std::fabs(dots[choice] - dot) <= magnitude * double(q.columns) * 0x1p-24))
      return emu::format("dots[%zu] is %.9g, expected %.9g", choice, dots[choice], dot);
  }
  const std::string zones = in.of_choices.check_red_zones();
  return zones.empty() ? dots.check_red_zones() : zones;
}

/// The bits of the sums of products at an odd address are those at an even one.
std::string addresses(Problem q) {
  std::vector<float> found[2];
  for (const size_t offset : {0, 1}) {
    Rng rng(7);
    q.offset = offset;
    Operands in(q, rng);
    AnyBuffer y("y", q.narrow, in.of_choices.size(), q.offset);
    Operands::fill(in.of_tokens, rng), Operands::fill(y, rng);
    emu::Buffer<float> dots("dots", size(in.rows));
    const SpreadRows p{in.routes(), in.of_tokens.data(),  y.data(), in.of_choices.data(),
                       dots.data(), in.of_tokens.dtype(), q.narrow};
    const std::string error = message_of(spread_rows(p, nullptr));
    if (!error.empty()) return error;
    for (size_t i = 0; i < size(in.rows); i++) found[offset].push_back(dots[i]);
  }
  return found[0] == found[1] ? "" : "the sums depend on the address";
}

void both(Cases& cases, const std::string& title, const Problem& q) {
  cases.check("combine " + title, [=] { return combine(q); });
  cases.check("spread " + title, [=] { return spread(q); });
  Problem multiplied = q;
  multiplied.dots = true;
  cases.check("spread and multiply " + title, [=] { return spread(multiplied); });
}

void all(Cases& cases) {
  for (const auto& [tokens, top_k] : {std::pair{1, 1}, {5, 2}, {3, 4}, {2, 5}, {4, 8}, {3, 9}, {20, 1}}) {
    for (const int columns : {8, 37, 264, 520}) {
      const std::string title = emu::format("%d x %d, %d columns", tokens, top_k, columns);
      both(cases, title, {.tokens = tokens, .top_k = top_k, .columns = columns, .wide = columns > 40});
    }
  }
  for (const DType narrow : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const bool wide : {false, true}) {
      const std::string title = emu::format("of type %d, wide %d", int(narrow), wide);
      both(cases, title, {.tokens = 3, .top_k = 2, .narrow = narrow, .wide = wide});
      both(cases, title + ", at odd addresses", {.tokens = 3, .top_k = 2, .narrow = narrow, .wide = wide, .offset = 1});
      both(cases, title + ", unweighted", {.tokens = 3, .top_k = 2, .narrow = narrow, .wide = wide, .weighted = false});
    }
  }
  both(cases, "with places that do not exist", {.tokens = 3, .top_k = 3, .hostile = true});
  cases.check("addresses", [] { return addresses({.tokens = 3, .top_k = 2, .columns = 600}); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("routing", ak::test::Seeds(argc, argv, 2));
  ak::test::all(cases);
  return cases.finish();
}
