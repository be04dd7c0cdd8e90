// Shared by the tests on the emulator: seeds to run, and the counting and printing of failures.
//   test_X            a sample: one of the usual seeds per case, and of long programs one case in two
//   test_X all        all cases, under all of the usual seeds
//   test_X 24         that many seeds per case
//   test_X --seed 17  replays one schedule
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "base/half.h"
#include "device/launch.cuh"
#include "emulator/memory.h"

namespace ak::test {

struct Seeds {
  uint64_t first = 0, count = 4;
  uint64_t one_case_in = 1;
  bool sampled = false;

  Seeds(int argc, char** argv, uint64_t usual, uint64_t one_case_in = 1)
      : count(usual), one_case_in(one_case_in), sampled(argc == 1) {
    if (argc == 3 && std::strcmp(argv[1], "--seed") == 0) {
      first = std::strtoull(argv[2], nullptr, 10);
      count = 1;
    } else if (argc == 2 && std::strcmp(argv[1], "all") != 0) {
      count = std::strtoull(argv[1], nullptr, 10);
    } else if (argc > 2) {
      std::fprintf(stderr, "usage: %s [all | number of seeds | --seed SEED]\n", argv[0]);
      std::exit(2);
    }
  }
  /// Those of a case; none if the sample leaves it out.
  Seeds of_case(int number) const {
    if (!sampled) return *this;
    const uint64_t drawn = static_cast<uint64_t>(number) * 0x9E3779B97F4A7C15 >> 32;  // independent of nested loops
    Seeds one = *this;
    one.first = drawn / one_case_in % count;
    one.count = drawn % one_case_in == 0;
    return one;
  }
};

class Cases {
 public:
  Cases(const char* name, Seeds seeds) : name_(name), seeds_(seeds) {}

  /// Calls run() for each of the case's seeds; it returns "" or what is wrong. The first failure of a case is told.
  template <class Run>
  void check(const std::string& title, Run run) {
    const Seeds seeds = seeds_.of_case(cases_++);
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; seed++) {
      emu::options() = {};
      emu::options().seed = seed;
      const std::string wrong = run();
      if (wrong.empty()) continue;
      failures_++;
      std::printf("FAIL %s, --seed %llu: %s\n", title.c_str(), static_cast<unsigned long long>(seed), wrong.c_str());
      std::fflush(stdout);  // whoever plants bugs stops reading here
      return;
    }
  }
  /// Passes if run() reports something that contains `part` under at least one of the usual seeds.
  template <class Run>
  void check_fails(const std::string& title, const char* part, Run run) {
    cases_++;
    std::string last = "nothing was reported";
    for (uint64_t seed = seeds_.first; seed < seeds_.first + seeds_.count; seed++) {
      emu::options() = {};
      emu::options().seed = seed;
      const std::string wrong = run();
      if (wrong.find(part) != std::string::npos) return;
      if (!wrong.empty()) last = wrong;
    }
    failures_++;
    std::printf("FAIL %s: expected \"%s\", got: %s\n", title.c_str(), part, last.c_str());
  }

  int finish() const {
    std::printf("%s: %d cases, %d failures\n", name_, cases_, failures_);
    return failures_ == 0 ? 0 : 1;
  }

 private:
  const char* name_;
  Seeds seeds_;
  int cases_ = 0, failures_ = 0;
};

/// What main() of a test returns: each part checks cases.
inline int check_parts(const char* name, Seeds seeds, std::initializer_list<void (*)(Cases&)> parts) {
  Cases cases(name, seeds);
  for (auto* part : parts) part(cases);
  return cases.finish();
}

/// The DType of fp16, bf16 or float.
template <class T>
constexpr DType kType = std::is_same_v<T, float>  ? DType::kFloat32
                        : std::is_same_v<T, bf16> ? DType::kBFloat16
                                                  : DType::kFloat16;

inline std::string message_of(const Status& status) { return status.ok() ? "" : status.message; }

}  // namespace ak::test
