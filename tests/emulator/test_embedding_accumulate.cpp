// embedding_accumulate on the emulator: sums of small integers, which are exact in any order, so that every entry that
// is lost, counted twice or added to another row shows; over runs within and across pieces, types, widths and
// addresses.
#include <algorithm>
#include <cmath>

#include "embedding/accumulate.cu"
#include "emulator/harness.h"
#include "tensor_lists.h"

namespace ak::test {
namespace {

struct Problem {
  std::vector<int64_t> runs;  // entries of rows 1, 2, ...; of row 0 and of the last one none
  int64_t columns = 24;
  int64_t padding = -1, rows_missing = 0;  // rows at the end that the table does not have
  bool by_frequency = false;
  size_t offset = 0, grad_offset = 0;
  DType out = DType::kFloat32, grad = DType::kBFloat16;
};

std::string run(const Problem& q) {
  std::vector<int64_t> sorted;
  for (size_t r = 0; r < q.runs.size(); r++)
    sorted.insert(sorted.end(), static_cast<size_t>(q.runs[r]), int64_t(r) + 1);
  const auto entries = static_cast<int64_t>(sorted.size());
  const int64_t rows = static_cast<int64_t>(q.runs.size()) + 2 - q.rows_missing;
  Rng rng(static_cast<uint64_t>(entries * 31 + q.columns));
  std::vector<int64_t> order(sorted.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
  std::shuffle(order.begin(), order.end(), rng);

  AnyBuffer out("out", q.out, static_cast<size_t>(rows * q.columns), q.offset);
  AnyBuffer grad("grad", q.grad, static_cast<size_t>(entries * q.columns), q.grad_offset);
  emu::Buffer<int64_t> index("sorted", sorted), place("order", order);
  emu::Buffer<float> partial("scratch", embedding_scratch_bytes(entries, q.columns) / sizeof(float));
  for (size_t i = 0; i < out.size(); i++) out.set(i, 3);
  for (size_t i = 0; i < grad.size(); i++) grad.set(i, static_cast<double>(rng() % 3) - 1);

  std::vector<double> want(out.size(), 3), sum(out.size());
  for (size_t i = 0; i < sorted.size(); i++) {
    if (sorted[i] == q.padding || sorted[i] >= rows) continue;
    for (int64_t c = 0; c < q.columns; c++)
      sum[static_cast<size_t>(sorted[i] * q.columns + c)] += grad.get(static_cast<size_t>(order[i] * q.columns + c));
  }
  for (size_t i = 0; i < want.size(); i++) {
    const size_t row = i / static_cast<size_t>(q.columns);
    const bool touched = row >= 1 && row <= q.runs.size();
    const float total = static_cast<float>(sum[i]);
    want[i] += q.by_frequency && touched ? total / static_cast<float>(q.runs[row - 1]) : total;
  }

  EmbeddingAccumulate p{};
  p.out = out.data();
  p.grad = grad.data();
  p.sorted = index.data();
  p.order = place.data();
  p.partial = partial.data();
  p.out_type = q.out;
  p.grad_type = q.grad;
  p.rows = rows;
  p.entries = entries;
  p.columns = q.columns;
  p.padding_idx = q.padding;
  p.by_frequency = q.by_frequency;
  const std::string error = message_of(embedding_accumulate(p, nullptr));
  if (!error.empty()) return error;
  for (size_t i = 0; i < want.size(); i++) {
    const double slack = q.by_frequency ? std::fabs(want[i]) * (q.out == DType::kFloat32 ? 0x1p-22 : 0x1p-7) : 0;
    if (!(std::fabs(out.get(i) - want[i]) <= slack))
      return emu::format("out[%zu] is %g, expected %g", i, static_cast<double>(out.get(i)), want[i]);
  }
  if (!out.check_red_zones().empty()) return out.check_red_zones();
  return grad.check_red_zones();
}

const std::vector<std::vector<int64_t>> kRuns = {{1}, {16}, {17}, {5, 11}, {15, 2, 47, 1}, {100}, {3, 30, 16, 16, 5},
                                                 {}};

void runs(Cases& cases) {
  for (size_t k = 0; k < kRuns.size(); k++) {
    const std::string title = "runs " + std::to_string(k);
    cases.check(title, [&] { return run({.runs = kRuns[k]}); });
    cases.check(title + ", odd columns", [&] { return run({.runs = kRuns[k], .columns = 7}); });
    cases.check(title + ", by frequency", [&] { return run({.runs = kRuns[k], .by_frequency = true}); });
    cases.check(title + ", padding", [&] { return run({.runs = kRuns[k], .padding = 1}); });
    cases.check(title + ", padding in the middle", [&] { return run({.runs = kRuns[k], .padding = 3}); });
    cases.check(title + ", no such row", [&] { return run({.runs = kRuns[k], .rows_missing = 2}); });
  }
  // More entries than pieces of 16: the pieces grow, and the runs with them.
  cases.check("many entries", [] {
    std::vector<int64_t> many(600, 9);
    many[3] = 9000;
    many[400] = 4000;
    return run({.runs = many, .columns = 1, .by_frequency = true});
  });
}

void types_and_addresses(Cases& cases) {
  for (int out = 0; out < 3; out++) {
    for (int grad = 0; grad < 3; grad++) {
      for (const int64_t columns : {8, 264, 1030, 2048}) {
        Problem q{.runs = {3, 30, 16, 5}, .columns = columns};
        q.out = static_cast<DType>(out);
        q.grad = static_cast<DType>(grad);
        cases.check("types " + std::to_string(out) + std::to_string(grad) + ", " + std::to_string(columns) + " columns",
                    [&] { return run(q); });
        if (columns != 8) continue;
        q.offset = 1;
        cases.check("out between boundaries", [&] { return run(q); });
        q.offset = 0;
        q.grad_offset = 3;
        cases.check("grad between boundaries", [&] { return run(q); });
      }
    }
  }
}

/// Entry after entry onto what `out` holds: numbers whose sum depends on the order, in one call and in two.
std::string in_order(const std::vector<int64_t>& runs, int64_t columns, int64_t cut) {
  std::vector<int64_t> sorted;
  for (size_t r = 0; r < runs.size(); r++) sorted.insert(sorted.end(), static_cast<size_t>(runs[r]), int64_t(r));
  const size_t entries = sorted.size(), width = static_cast<size_t>(columns), rows = runs.size();
  Rng rng(entries);
  std::vector<float> values(entries * width), want(rows * width, 0.1f);
  for (float& value : values) value = std::ldexp(static_cast<float>(rng() % 1000) / 1000 - 0.5f, int(rng() % 9));
  // Token t has the word sorted[token_of_word[t]]; tokens are in order within a word.
  std::vector<int64_t> words = sorted;
  std::shuffle(words.begin(), words.end(), rng);
  for (size_t t = 0; t < entries; t++) {
    if (words[t] == 1) continue;  // padding
    for (size_t c = 0; c < width; c++) want[static_cast<size_t>(words[t]) * width + c] += values[t * width + c];
  }
  emu::Buffer<float> out("out", std::vector<float>(rows * width, 0.1f));
  for (const auto& [first, last] :
       {std::pair<size_t, size_t>{0, static_cast<size_t>(cut)}, {static_cast<size_t>(cut), entries}}) {
    if (first == last) continue;
    std::vector<int64_t> order(last - first), index;
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return words[first + static_cast<size_t>(a)] < words[first + static_cast<size_t>(b)];
    });
    for (const int64_t i : order) index.push_back(words[first + static_cast<size_t>(i)]);
    emu::Buffer<float> grad("grad", {values.begin() + int64_t(first * width), values.begin() + int64_t(last * width)});
    emu::Buffer<int64_t> sorted_words("sorted", index), place("order", order);
    EmbeddingAccumulate p{};
    p.out = out.data(), p.grad = grad.data(), p.sorted = sorted_words.data(), p.order = place.data();
    p.out_type = p.grad_type = DType::kFloat32;
    p.rows = static_cast<int64_t>(rows), p.entries = static_cast<int64_t>(last - first), p.columns = columns;
    p.padding_idx = 1;
    p.in_order = true;
    const std::string error = message_of(embedding_accumulate(p, nullptr));
    if (!error.empty()) return error;
  }
  for (size_t i = 0; i < want.size(); i++) {
    if (out[i] != want[i]) return emu::format("out[%zu] is %.9g, expected %.9g", i, out[i], want[i]);
  }
  return out.check_red_zones();
}

void orders(Cases& cases) {
  for (const int64_t columns : {24, 7, 264}) {
    for (const int64_t cut : {0, 1, 30}) {
      cases.check(emu::format("in order, %d columns, cut at %d", int(columns), int(cut)),
                  [&] { return in_order({5, 3, 30, 1, 16, 40, 9}, columns, cut); });
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("embedding_accumulate", ak::test::Seeds(argc, argv, 2));
  ak::test::runs(cases);
  ak::test::types_and_addresses(cases);
  ak::test::orders(cases);
  return cases.finish();
}
