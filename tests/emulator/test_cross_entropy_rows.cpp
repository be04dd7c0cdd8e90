// cross_entropy_rows on the emulator: losses and gradients against float64, over types, lengths, addresses, options and
// places where the kernel changes its ways: short and long rows, several rows a block, the gradient over the logits.
#include <array>
#include <cmath>
#include <limits>

#include "emulator/harness.h"
#include "loss/cross_entropy.cu"

namespace ak::test {
namespace {

template <class T>
constexpr double kRoundoff = std::is_same_v<T, float>  ? 0x1p-24
                             : std::is_same_v<T, bf16> ? 0x1p-8
                                                       : 0x1p-11;

struct Options {
  int rows = 3, classes = 13, gap = 0, offset = 0, grad_offset = 0, sms = 1;
  bool weighted = false, gradient = true, in_place = false;
  double smoothing = 0, z_loss = 0;
  int64_t target = -1;  // of all rows; -1: drawn
  int ignored = 0;      // one in so many rows is
  float masked = 0;     // instead of the logits [0, masked_until)
  int masked_until = 0;
  float added = 0;  // to the others
  int target_offset = 0, weight_offset = 0;
  int shared = 232448;                  // bytes a block may have: room for so many teams, or for none
  double temperature = 0;               // near which those of the rows are
  int statistics = 0;                   // values a row
  bool known = false, entropy = false;  // the gradient comes from given statistics; with that of the entropy
  bool holes = false;                   // only the ends of a row have been written: of ignored ones, in one piece
};

/// Empty, or what is wrong. `results`: losses and gradients, if they are asked for.
template <class T, class Target, class Grad = T>
std::string run(const Options& o, std::vector<double>* results = nullptr) {
  constexpr bool kSoft = !std::is_same_v<Target, int64_t>;
  emu::options().sm_count = o.sms;
  emu::options().shared_limit = o.shared;
  const size_t rows = o.rows, classes = o.classes, stride = classes + o.gap, n = rows * stride;
  emu::Random random{n};
  const auto draw = [&] { return (static_cast<float>(random.below(257)) - 128) / 16; };
  emu::Buffer<T> logits("logits", n, o.offset);
  emu::Buffer<Grad> out("grad", n, o.grad_offset);
  emu::Buffer<float> temperature("temperature", rows), bend("entropy_factor", rows), sums("statistics", 3 * rows);
  emu::Buffer<Target> target("target", kSoft ? n : rows, o.target_offset);
  emu::Buffer<float> weight("weight", classes, o.weight_offset), factor("factor", rows), loss("loss", rows);
  std::vector<double> x(n), y(n);
  std::vector<int64_t> chosen(rows);
  for (size_t i = 0; i < n; i++) {
    const bool masked = o.masked_until > 0 && i % stride < static_cast<size_t>(o.masked_until);
    const T value = round_to<T>(masked ? o.masked : draw() + o.added);
    if (!o.holes || i % stride < 8 || i % stride + 8 >= classes) logits.set(i, value);
    x[i] = to_float(value);
  }
  for (size_t i = 0; i < classes; i++) weight.set(i, static_cast<float>(1 + random.below(8)) / 4);
  for (size_t r = 0; r < rows; r++) {
    factor.set(r, static_cast<float>(1 + random.below(8)) / 4);
    chosen[r] = o.target >= 0 || o.target < -1 ? o.target : static_cast<int64_t>(random.below(o.classes));
    if (o.ignored > 0 && r % o.ignored == 1) chosen[r] = -100;
    if constexpr (!kSoft) target.set(r, chosen[r]);
  }
  if constexpr (kSoft) {
    for (size_t i = 0; i < n; i++) {
      const Target value = round_to<Target>(static_cast<float>(random.below(9)) / 64);
      target.set(i, value);
      y[i] = to_float(value);
    }
  }
  for (size_t r = 0; r < rows; r++) {
    temperature.set(r, static_cast<float>(o.temperature) + static_cast<float>(r) / 8);
    bend.set(r, static_cast<float>(r % 3) - 1.5f);
  }
  const auto divided = [&](size_t r, size_t i) {
    return o.temperature > 0 ? static_cast<double>(static_cast<float>(x[i]) / temperature[r]) : x[i];
  };
  const auto statistics_of = [&](size_t r) {
    std::array<double, 3> of{-HUGE_VAL, 0, 0};
    for (size_t i = 0; i < classes; i++) of[0] = std::fmax(of[0], divided(r, r * stride + i));
    for (size_t i = 0; i < classes; i++) {
      const double above = divided(r, r * stride + i) - of[0], e = std::exp(above);
      of[1] += e;
      of[2] += e == 0 ? 0 : e * above;
    }
    return chosen[r] == -100 ? std::array<double, 3>{0, 1, 0} : of;
  };
  for (size_t i = 0; o.known && i < 3 * rows; i++) sums.set(i, static_cast<float>(statistics_of(i % rows)[i / rows]));
  CrossEntropyRows p{};
  p.logits = logits.data();
  p.target = target.data();
  p.weight = o.weighted ? weight.data() : nullptr;
  p.factor = factor.data();
  p.loss = o.known ? nullptr : loss.data();
  p.grad = !o.gradient ? nullptr : o.in_place ? static_cast<void*>(logits.data()) : out.data();
  p.rows = o.rows;
  p.classes = o.classes;
  p.logits_stride = p.grad_stride = static_cast<int64_t>(stride);
  p.target_stride = kSoft ? static_cast<int64_t>(stride) : 1;
  p.factor_stride = 1;
  p.ignore_index = -100;
  p.terms = {static_cast<float>(1 - o.smoothing), static_cast<float>(o.smoothing / o.classes),
             static_cast<float>(o.z_loss)};
  p.type = kType<T>;
  p.grad_type = kType<Grad>;
  p.temperature = o.temperature > 0 ? temperature.data() : nullptr;
  p.known = o.known ? sums.data() : nullptr;
  p.entropy_factor = o.entropy ? bend.data() : nullptr;
  p.statistics = o.statistics > 0 ? sums.data() : nullptr;
  p.statistics_count = o.statistics;
  p.temperature_stride = p.entropy_stride = 1;
  p.known_stride = p.statistics_stride = static_cast<int64_t>(rows);
  if constexpr (kSoft) p.target_type = kType<Target>;
  p.soft = kSoft;
  const std::string error = message_of(cross_entropy_rows(p, nullptr));
  if (!error.empty()) return error;

  for (size_t r = 0; r < rows; r++) {
    std::vector<double> of_row(classes);
    for (size_t i = 0; i < classes; i++) of_row[i] = divided(r, r * stride + i);
    const double* row = of_row.data();
    const bool ignored = !kSoft && chosen[r] == -100,
               unknown = !kSoft && !ignored && (chosen[r] < 0 || chosen[r] >= o.classes);
    double largest = -HUGE_VAL, sum = 0, total = 0, value = 0;
    for (size_t i = 0; i < classes; i++) largest = std::fmax(largest, row[i]);
    for (size_t i = 0; i < classes; i++) sum += std::exp(row[i] - largest);
    const double lse = largest + std::log(sum);
    const auto weight_of = [&](size_t i) { return o.weighted ? static_cast<double>(weight[i]) : 1.0; };
    const auto c = [&](size_t i) {
      const double own = kSoft ? y[r * stride + i] : static_cast<int64_t>(i) == chosen[r] ? 1.0 : 0.0;
      return weight_of(i) * ((1 - o.smoothing) * own + o.smoothing / o.classes);
    };
    for (size_t i = 0; i < classes; i++) {
      total += c(i);
      if (c(i) != 0) value += c(i) * (lse - row[i]);
    }
    const double u = kSoft || ignored || unknown ? 1.0 : weight_of(static_cast<size_t>(chosen[r]));
    value += o.z_loss * u * lse * lse;
    const double slope = total + 2 * o.z_loss * u * lse;
    const double size = 4 * (std::fabs(lse) + 32) * (total + 1);
    // Not the gap of a thousand additions in a row: a thread adds few, and the block joins them in a tree.
    const double tolerance = size * (64 + o.classes / 32.0) * 0x1p-23;
    const auto differs = [&](double got, double want, double bound) {
      return std::isnan(want) ? !std::isnan(got) : std::isinf(want) ? got != want : !(std::fabs(got - want) <= bound);
    };
    const double want = ignored ? 0 : unknown ? std::nan("") : value;
    const auto found = statistics_of(r);
    for (int k = 0; k < o.statistics; k++) {
      const double expected = unknown ? std::nan("") : found[k], got = sums[k * rows + r];
      if (differs(got, expected, ignored || k == 0 ? 0 : tolerance * (1 + found[1])))
        return emu::format("statistic %d of row %zu is %.9g, expected %.9g", k, r, got, expected);
      if (results != nullptr && k < 2) results->push_back(got);
    }
    if (!o.known && differs(loss[r], want, ignored ? 0 : tolerance))
      return emu::format("loss[%zu] is %.9g, expected %.9g", r, loss[r], want);
    if (results != nullptr && !o.known) results->push_back(loss[r]);
    for (size_t i = 0; o.gradient && i < classes; i++) {
      const double f = factor[r], h = o.entropy ? bend[r] : 0.0, p_i = std::exp(row[i] - lse);
      const double own = o.known ? p_i - (static_cast<int64_t>(i) == chosen[r]) : slope * p_i - c(i);
      const double full = f * own - (p_i == 0 ? 0 : h * p_i * (row[i] - found[0] - found[2] / found[1]));
      const double wanted = ignored ? 0 : unknown && !o.known ? std::nan("") : full;
      const double got = o.in_place ? to_float(logits[r * stride + i]) : to_float(out[r * stride + i]);
      if (differs(got, wanted,
                  ignored ? 0
                          : 1.01 * kRoundoff<Grad> * std::fabs(wanted) + (f + std::fabs(h)) * (size * 0x1p-20) / 64 +
                                0x1p-24))
        return emu::format("grad[%zu, %zu] is %.9g, expected %.9g", r, i, got, wanted);
      if (results != nullptr) results->push_back(got);
    }
  }
  const std::string loss_written = o.known ? "" : loss.check_written();
  return !loss_written.empty() || !o.gradient || o.in_place || o.gap > 0 ? loss_written : out.check_written();
}

template <class T, class Target, class Grad = T>
void check(Cases& cases, const std::string& title, const Options& o) {
  cases.check(title, [&] { return run<T, Target, Grad>(o); });
}

template <class T>
void check_type(Cases& cases, const std::string& name) {
  for (int classes : {1, 7, 8, 15, 64, 100, 700}) {
    check<T, int64_t>(cases, name + ", short rows", {.classes = classes});
  }
  check<T, int64_t>(cases, name + ", long rows", {.rows = 2, .classes = 2051, .offset = 1});
  check<T, int64_t>(cases, name + ", longer rows", {.rows = 1, .classes = 20011});
  for (int offset : {1, 3}) {
    check<T, int64_t>(cases, name + ", addresses", {.gap = 2, .offset = offset});
    check<T, int64_t>(cases, name + ", addresses apart", {.classes = 60, .gap = 4, .grad_offset = offset});
  }
  check<T, int64_t>(cases, name + ", several rows a block", {.rows = 40, .classes = 9});
  for (int classes : {200, 203}) {  // a team's rows, and a block's
    check<T, int64_t>(cases, name + ", all options",
                      {.classes = classes, .weighted = true, .smoothing = 0.125, .z_loss = 0.25});
    check<T, int64_t>(cases, name + ", weights", {.classes = classes, .weighted = true, .z_loss = 0.25});
    check<T, int64_t>(cases, name + ", smoothing", {.classes = classes, .smoothing = 0.125});
    check<T, int64_t>(cases, name + ", no gradient", {.classes = classes, .gradient = false});
  }
  for (int classes : {67, 72, 2060, 2064}) {
    check<T, int64_t>(cases, name + ", in place",
                      {.rows = 20, .classes = classes, .in_place = true, .smoothing = classes > 100 ? 0.0 : 0.5});
  }
  for (int classes : {130, 136}) {
    check<T, T>(cases, name + ", probabilities",
                {.classes = classes, .gap = classes % 16, .weighted = true, .smoothing = 0.125, .z_loss = 0.25});
    check<T, float>(cases, name + ", probabilities in fp32", {.rows = 20, .classes = classes});
  }
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (int classes : {88, 90}) {
    for (int target : {-100, -3, classes, 1000}) {
      for (float held : {infinity, nan, 0.5f}) {
        check<T, int64_t>(cases, name + ", ignored or unknown",
                          {.classes = classes,
                           .weighted = true,
                           .smoothing = 0.5,
                           .target = target,
                           .masked = held,
                           .masked_until = 80});
      }
    }
  }
  for (int classes : {900, 904}) {
    for (const float added : {0.0f, -200.0f}) {  // the exponential of -200's distance from 0 is infinite
      check<T, int64_t>(
          cases, name + ", -inf in front",
          {.classes = classes, .target = classes - 1, .masked = -infinity, .masked_until = 890, .added = added});
    }
  }
  for (int classes : {30, 32}) {
    check<T, int64_t>(
        cases, name + ", only -inf",
        {.classes = classes, .gradient = false, .target = 1, .masked = -infinity, .masked_until = classes});
  }
}

template <class T>
void check_teams(Cases& cases, const std::string& name) {
  for (int classes : {128, 256, 264, 520, 776, 1032, 2056, 3080, 4104}) {
    const std::string title = name + ", teams for " + std::to_string(classes);
    check<T, int64_t>(cases, title, {.classes = classes, .gap = 8, .sms = 2});
  }
  check<T, int64_t>(cases, name + ", the largest row of a team", {.rows = 1, .classes = 8192});
  // One team, so that each slot is filled several times.
  check<T, int64_t>(cases, name + ", a ring of 9", {.rows = 21, .classes = 64, .shared = 2400});
  check<T, T>(cases, name + ", a ring of 3 with probabilities",
              {.rows = 7, .classes = 600, .weighted = true, .smoothing = 0.25, .shared = 16000});
  check<T, int64_t>(
      cases, name + ", a ring of 4 warps, all options",
      {.rows = 9, .classes = 1048, .weighted = true, .smoothing = 0.125, .z_loss = 0.25, .shared = 17100});
  check<T, int64_t>(cases, name + ", no room for a team", {.classes = 64, .smoothing = 0.25, .shared = 700});
  check<T, int64_t>(cases, name + ", rows apart by no whole vector", {.classes = 64, .gap = 2});
  check<T, T>(cases, name + ", probabilities that are not aligned", {.classes = 64, .target_offset = 1});
  check<T, int64_t>(cases, name + ", weights that are not aligned",
                    {.classes = 64, .weighted = true, .smoothing = 0.25, .weight_offset = 1});
  check<T, int64_t>(cases, name + ", a gradient that is not aligned", {.classes = 64, .grad_offset = 1});
}

// Rows by way of shared memory: whole ones, and in pieces where it is small.
template <class T>
void check_pieces(Cases& cases, const std::string& name) {
  for (const int shared : {232448, 3200}) {
    const std::string title = name + (shared > 3200 ? ", whole rows" : ", pieces");
    const Options plain{.rows = 5, .classes = 803, .offset = 1, .shared = shared};
    const auto changed = [&](const std::string& what, auto change, auto target) {
      Options o = plain;
      change(o);
      check<T, decltype(target)>(cases, title + what, o);
    };
    const auto all = [](Options& o) { o.weighted = true, o.smoothing = 0.125, o.z_loss = 0.25; };
    changed("", [](Options&) {}, int64_t{});
    changed(", all options", all, int64_t{});
    changed(", probabilities", all, T{});
    changed(", probabilities in fp32", [](Options& o) { o.target_offset = 3; }, float{});
    changed(", no gradient", [](Options& o) { o.gradient = false; }, int64_t{});
    changed(", in place", [](Options& o) { o.in_place = true, o.gap = 3, o.smoothing = 0.25; }, int64_t{});
    changed(", gradients elsewhere", [](Options& o) { o.grad_offset = 2; }, int64_t{});
    const auto many = [](Options& o) { o.rows = 100, o.classes = 131, o.ignored = 3; };
    changed(", many rows a block, some ignored", many, int64_t{});
    changed(", the same in place", [=](Options& o) { many(o), o.in_place = true, o.gap = 3; }, int64_t{});
    changed(", ignored", [](Options& o) { o.grad_offset = 1, o.target = -100; }, int64_t{});
    for (const int target : {0, 7, 801, 802})
      changed(", the target " + std::to_string(target), [=](Options& o) { o.target = target; }, int64_t{});
    changed(
        ", only -inf in front", [](Options& o) { o.masked = -INFINITY, o.masked_until = 700, o.target = 802; },
        int64_t{});
    const auto same_bits = [=]<class Target>(Target, Options o) {
      std::vector<double> first, other;
      std::string error = run<T, Target>(o, &first);
      for (o.offset = 1; error.empty() && o.offset < 8; o.offset++) {
        o.grad_offset = o.offset / 2 * 3 % 8;  // also apart from the logits
        other.clear();
        error = run<T, Target>(o, &other);
        if (error.empty() && other != first) error = emu::format("offset %d has other bits", o.offset);
      }
      return error;
    };
    Options o = plain;
    o.offset = 0;
    cases.check(title + ", the address changes no bit", [=] { return same_bits(int64_t{}, o); });
    o.smoothing = 0.125;
    cases.check(title + ", the address changes no bit of smoothing", [=] { return same_bits(int64_t{}, o); });
    cases.check(title + ", the address changes no bit of probabilities", [=] { return same_bits(T{}, o); });
  }
  check<T, int64_t>(cases, name + ", ignored rows are not read",
                    {.classes = 901, .offset = 1, .target = -100, .holes = true});
}

// Options of fp32 logits alone.
template <class Grad>
void check_more(Cases& cases, const std::string& name) {
  for (const int shared : {232448, 3200}) {
    const std::string title = "fp32 logits, gradient in " + name + (shared > 3200 ? ", " : ", pieces, ");
    for (const int classes : {1, 64, 803, 4100}) {
      const Options o{.rows = 5, .classes = classes, .offset = classes % 4, .ignored = 4, .shared = shared};
      const auto changed = [&](const std::string& what, auto change) {
        Options with = o;
        change(with);
        check<float, int64_t, Grad>(cases, title + what + std::to_string(classes), with);
      };
      changed("all options ", [](Options& w) { w.weighted = true, w.smoothing = 0.125, w.z_loss = 0.25, w.rows = 2; });
      changed("plain ", [](Options& w) { w.gap = 3, w.grad_offset = 1; });
      changed("statistics ", [](Options& w) { w.gradient = false, w.statistics = 3, w.temperature = 0.75; });
      changed("known ", [](Options& w) { w.known = w.entropy = true, w.temperature = 0.75, w.gap = 1; });
      changed("known, no entropy, a class elsewhere ", [](Options& w) { w.known = true, w.target = 1 << 20; });
      changed("unknown ", [](Options& w) { w.target = 1 << 20, w.statistics = 3, w.rows = 2; });
      for (const float added : {0.0f, -200.0f})
        changed("-inf in front ", [=](Options& w) {
          w.masked = -INFINITY, w.masked_until = classes - 1, w.target = classes - 1, w.added = added, w.statistics = 3;
        });
      changed("known -inf in front ", [=](Options& w) {
        w.masked = -INFINITY, w.masked_until = classes - 1, w.target = classes - 1, w.known = w.entropy = true;
      });
    }
    check<float, float, Grad>(cases, title + "probabilities", {.classes = 77, .smoothing = 0.125, .shared = shared});
    check<float, int64_t>(
        cases, title + "known, in place",
        {.rows = 9, .classes = 901, .gap = 3, .in_place = true, .shared = shared, .known = true, .entropy = true});
    cases.check(title + "the same loss and sums without what is more", [=] {
      std::vector<double> plain, two, three;
      Options o{.classes = 1501, .gradient = false, .shared = shared};
      std::string error = run<float, int64_t>(o, &plain);
      for (auto [count, into] : {std::pair{2, &two}, {3, &three}}) {
        o.statistics = count;
        if (error.empty()) error = run<float, int64_t>(o, into);
      }
      if (error.empty() && two != three) error = "the third statistic changes another";
      for (size_t r = 0; error.empty() && r < plain.size(); r++) {
        if (two[3 * r + 2] != plain[r]) error = "statistics change the loss";
      }
      return error;
    });
  }
}

// Bytes of the next rows on their way to an SM of an H200, of which 13 KB are needed: 4.25 TB/s of reads and writes,
// 800 ns.
void bytes_in_flight(Cases& cases) {
  emu::options().sm_count = 132;
  emu::options().shared_limit = 232448;
  for (const int classes : {128, 256, 512, 768, 1000, 2048, 3072, 4096, 8192}) {
    cases.check("bytes in flight, " + std::to_string(classes), [=] {
      int64_t bytes = 0;
      (void)with_row_team<RowTeam<16, 16>>(classes, [&]<class Team>(Team) -> Status {
        const RingMatrix logits[] = {{&bytes, DType::kBFloat16, classes}};
        const int most = three_row_warps(Team::kColumns) / Team::kWarps;
        bytes = int64_t{ring_teams<Team>(logits, 1 << 20, classes, most)} * (Team::kStages - 1) * classes * 2;
        return {};
      });
      return bytes >= 16 * 1024 ? "" : emu::format("%d bytes", static_cast<int>(bytes));
    });
  }
}

void check_all(Cases& cases) {
  bytes_in_flight(cases);
  check_type<bf16>(cases, "bf16");
  check_type<fp16>(cases, "fp16");
  check_type<float>(cases, "fp32");
  check_teams<bf16>(cases, "bf16");
  check_pieces<bf16>(cases, "bf16");
  check_pieces<float>(cases, "fp32");
  check_more<bf16>(cases, "bf16");
  check_more<fp16>(cases, "fp16");
  check<bf16, int64_t>(cases, "GPT-2's classes", {.rows = 2, .classes = 50257, .in_place = true});
  for (int classes : {264, 1032})
    check<float, int64_t>(cases, "fp32, teams for " + std::to_string(classes), {.classes = classes});
  cases.check("no rows", [] {
    CrossEntropyRows p{};
    p.type = DType::kFloat32;
    return message_of(cross_entropy_rows(p, nullptr));
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("cross_entropy_rows", Seeds(argc, argv, 2), {check_all});
}
