// A search for schedules under which a grouped product hangs or races: few small tiles in every mixture of empty and
// other groups, on fewer and more SMs than tiles, under many seeds. `make test-all` runs 100 of them.
#include "grouped_problem.h"

namespace ak::test {
namespace {

template <class Out>
std::string run(const Setup& s, Kernel kernel) {
  emu::options().sm_count = s.sms;
  return Product<bf16, Out>(s).run(kernel, s.ends);
}

/// `filled`: a bit for each of four groups that is not empty.
Setup mixture(int filled, bool sums, int sms) {
  Setup s{};
  constexpr int kSizes[] = {3, 65, 1, 130};  // one step of k, two and three
  for (int g = 0; g < 4; g++) s.ends.push_back(s.total += filled >> g & 1 ? kSizes[g] : 0);
  s.total += 5;  // of nobody
  s.other = sums ? 8 : 72, s.n = 16;
  s.sums = sums, s.sms = sms;
  return s;
}

void mixtures(Cases& cases) {
  for (int filled = 0; filled < 16; filled++) {
    for (const int sms : {1, 2, 7}) {
      for (const bool sums : {false, true}) {
        Setup s = mixture(filled, sums, sms);
        s.fp32 = s.accumulate = sums && filled % 2 == 0;
        s.keeps_z = !sums && filled % 3 == 0;  // the scheduler warp moves boxes
        cases.check(s.title(), [=] { return s.fp32 ? run<float>(s, Kernel::kSm90) : run<bf16>(s, Kernel::kSm90); });
        if (sms == 2)
          cases.check("sm80: " + s.title(),
                      [=] { return s.fp32 ? run<float>(s, Kernel::kSm80) : run<bf16>(s, Kernel::kSm80); });
      }
    }
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("grouped_schedules", Seeds(argc, argv, 1), {mixtures});
}
