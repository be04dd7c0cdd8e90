// norm_forward and norm_backward on the emulator, against double: every team and shape of block, rows in pieces, types,
// alignments and absent operands.
#include "norm_problem.h"

namespace ak::test {
namespace {

template <class X, class R, class W, class Y, class B = W>
void check_forward(Cases& cases, const std::string& title, int rows, int columns, const Options& o = {}) {
  cases.check(title, [&] { return forward<X, R, W, Y, B>(rows, columns, o); });
}

template <class X, class G, class W, class Branch = float>
void check_backward(Cases& cases, const std::string& title, int rows, int columns, const Options& o = {}) {
  cases.check(title, [&] { return backward<X, G, W, Branch>(rows, columns, o); });
}

void forward_cases(Cases& cases) {
  for (const int columns : {1, 8, 33, 512}) {
    const std::string title = "forward, " + std::to_string(columns);
    check_forward<bf16, float, fp16, bf16>(cases, title, 3, columns);
    check_forward<fp16, bf16, float, fp16>(cases, title + ", rms", 2, columns, {.centred = false});
    check_forward<float, float, float, float>(cases, title + ", alone", 2, columns, {.affine = false, .added = false});
  }
  for (const int columns : {256, 264, 768, 1024, 1032, 2048, 2056, 3072, 3080, 4096, 4104}) {
    const std::string title = "forward, teams for " + std::to_string(columns);
    check_forward<bf16, float, float, bf16>(cases, title, 3, columns, {.sms = 2});
  }
  check_forward<float, bf16, fp16, float>(cases, "forward, the largest row of a team", 1, 8192);
  for (const int columns : {8200, 16384}) {
    const std::string title = "forward, long rows, " + std::to_string(columns);
    check_forward<bf16, bf16, bf16, bf16>(cases, title, columns < 9000 ? 2 : 1, columns,
                                          {.centred = columns < 20000, .added = columns < 20000});
  }
  check_forward<bf16, float, bf16, bf16>(cases, "forward, long rows without room", 1, 8200, {.shared = 1000});
  check_forward<float, float, float, float>(cases, "forward, long rows, squares overflow", 1, 8200,
                                            {.affine = false, .added = false, .scale = 1e30});
  // Rows of which shared memory has room for one, in the registers of an SM.
  for (const int rows : {1, 5}) {
    check_forward<float, bf16, float, float>(cases, "forward, wide rows", rows, 16392,
                                             {.added = false, .sms = 2, .shared = 100000});
  }
  check_forward<bf16, float, float, fp16>(cases, "forward, wide rows of 16 bits", 2, 20488,
                                          {.added = false, .shared = 60000});
  check_forward<float, float, float, float>(cases, "forward, the widest row", 2, 32768,
                                            {.affine = false, .added = false});
  check_forward<float, float, float, float>(cases, "forward, wide rows, squares overflow", 1, 29064,
                                            {.affine = false, .added = false, .scale = 1e30});
  check_forward<float, float, float, float>(cases, "forward, wide rows without room", 1, 32768,
                                            {.added = false, .shared = 130000});
  // More columns than registers hold: two teams, one, and no room for one.
  check_forward<bf16, float, float, fp16>(cases, "forward, resident rows", 5, 16400, {.added = false});
  check_forward<fp16, float, bf16, bf16>(cases, "forward, resident rows, a round and steps one by one", 4, 20488,
                                         {.added = false});
  check_forward<bf16, fp16, bf16, bf16>(cases, "forward, resident rows, sum", 5, 20488, {.sms = 2});
  check_forward<bf16, float, bf16, bf16>(cases, "forward, resident rows, fp32 sum", 1, 32768,
                                         {.centred = false, .affine = false});
  check_forward<fp16, float, bf16, bf16, float>(cases, "forward, resident rows, no bias", 1, 16392,
                                                {.centred = false, .biased = false, .added = false});
  check_forward<fp16, float, bf16, float, float>(cases, "forward, resident rows, a bias of another type", 1, 16392,
                                                 {.added = false});
  check_forward<bf16, bf16, bf16, bf16>(cases, "forward, resident rows, longer ones", 1, 65544,
                                        {.affine = false, .added = false});
  check_forward<float, float, float, float>(cases, "forward, resident rows, squares overflow", 1, 24576,
                                            {.affine = false, .added = false, .scale = 1e30});
  check_forward<float, float, float, float>(cases, "forward, resident rows, several in fp32", 5, 16392,
                                            {.affine = false, .added = false});
  check_forward<float, float, bf16, bf16>(cases, "forward, resident rows without room", 1, 32768, {.shared = 200000});
  // One team, so that each slot is filled several times.
  check_forward<bf16, float, fp16, bf16>(cases, "forward, a ring of 9", 21, 64, {.shared = 4000});
  check_forward<float, fp16, bf16, float>(cases, "forward, a ring of 4", 10, 264,
                                          {.centred = false, .added = false, .shared = 4500});
  check_forward<bf16, bf16, bf16, bf16>(cases, "forward, a ring of 3", 7, 600, {.shared = 8000});
  check_forward<bf16, fp16, float, fp16>(cases, "forward, a ring of 4 warps", 9, 1048, {.shared = 18000});
  for (const int columns : {64, 768, 2056}) {
    check_forward<bf16, float, float, bf16>(cases, "forward, no room for a team, " + std::to_string(columns), 2,
                                            columns, {.shared = 100});
  }
  check_forward<float, bf16, float, bf16>(cases, "forward, 128 threads, odd", 1, 1001);
  check_forward<fp16, fp16, bf16, float>(cases, "forward, 512 threads, odd", 2, 2057);
  check_forward<bf16, float, float, bf16>(cases, "forward, unaligned", 3, 64, {.offset = 1});
  for (const int columns : {512, 1040, 1541}) {
    const std::string title = "forward in pieces, " + std::to_string(columns);
    check_forward<bf16, float, fp16, float>(cases, title, 3, columns, {.forced = true});
    check_forward<float, bf16, float, bf16>(cases, title + ", 16-bit sum", 3, columns, {.forced = true});
    check_forward<float, float, float, float>(cases, title + ", alone", 3, columns,
                                              {.centred = false, .affine = false, .added = false, .forced = true});
  }
  for (const bool forced : {false, true}) {
    for (const bool centred : {false, true}) {
      check_forward<float, float, float, float>(
          cases, "forward, squares overflow", 2, 600,
          {.centred = centred, .affine = false, .added = false, .scale = 1e30, .forced = forced});
    }
    check_forward<float, float, float, float>(cases, "forward, large mean", 2, 600,
                                              {.affine = false, .added = false, .mean = 512, .forced = forced});
  }
  check_forward<float, float, float, float>(cases, "forward, no rows", 0, 8);
}

void backward_cases(Cases& cases) {
  for (const int columns : {1, 8, 33, 512}) {
    const std::string title = "backward, " + std::to_string(columns);
    check_backward<bf16, float, fp16>(cases, title, 3, columns);
    check_backward<fp16, bf16, float>(cases, title + ", rms", 20, columns, {.centred = false, .parameters = 1});
    check_backward<float, fp16, float>(cases, title + ", alone", 2, columns,
                                       {.affine = false, .added = false, .parameters = 0});
    check_backward<float, float, bf16>(cases, title + ", several rows a block", 41, columns, {.added = false});
  }
  for (const int columns : {256, 264, 768, 1024, 1032, 2048, 2056, 3072, 3080, 4096, 4104}) {
    const std::string title = "backward, teams for " + std::to_string(columns);
    // Column sums of more than 4,000 columns take more threads than the emulator has stacks.
    const int parameters = columns < 2000 ? 2 : columns < 4000 ? 1 : 0;
    check_backward<bf16, float, float>(cases, title, 5, columns, {.parameters = parameters, .sms = 2});
  }
  check_backward<float, bf16, fp16>(cases, "backward, the largest row of a team", 1, 8192, {.parameters = 0});
  check_backward<bf16, float, fp16>(cases, "backward, a ring of 9", 21, 64, {.shared = 6000});
  check_backward<float, fp16, bf16>(cases, "backward, a ring of 4", 10, 264,
                                    {.added = false, .parameters = 1, .shared = 7000});
  check_backward<bf16, bf16, bf16>(cases, "backward, a ring of 3", 7, 600,
                                   {.centred = false, .added = false, .shared = 8000});
  check_backward<bf16, fp16, float>(cases, "backward, a ring of 4 warps", 9, 1048, {.shared = 27000});
  for (const int columns : {64, 768, 2056}) {
    check_backward<bf16, float, float>(cases, "backward, no room for a team, " + std::to_string(columns), 5, columns,
                                       {.parameters = 1, .shared = 100});
  }
  check_backward<float, bf16, float>(cases, "backward, 128 threads, odd", 6, 601);
  check_backward<fp16, fp16, bf16>(cases, "backward, 512 threads, odd", 3, 2057, {.parameters = 1});
  check_backward<bf16, float, float>(cases, "backward, unaligned", 3, 64, {.offset = 1});
  for (const int columns : {512, 1040, 1541}) {
    const std::string title = "backward in pieces, " + std::to_string(columns);
    check_backward<bf16, float, fp16>(cases, title, 7, columns, {.forced = true});
    check_backward<float, bf16, float>(cases, title + ", weight alone", 7, columns,
                                       {.centred = false, .added = false, .forced = true, .parameters = 1});
    check_backward<float, bf16, float>(cases, title + ", rows alone", 4, columns,
                                       {.affine = false, .forced = true, .parameters = 0});
  }
  check_backward<bf16, float, fp16>(cases, "backward, sums of many rows a share", 29, 1032, {.forced = true});
  for (const int columns : {8200, 8201}) {
    check_backward<bf16, bf16, float>(cases, "backward, long rows, " + std::to_string(columns), 2, columns,
                                      {.added = false, .parameters = 0});
  }
  // A row shared by the blocks of a cluster; the last has fewer columns. With 4 SMs one cluster takes all rows.
  for (const int columns : {1032, 1536}) {
    const std::string title = "backward, a cluster a row, " + std::to_string(columns);
    check_backward<bf16, float, fp16>(cases, title, 7, columns, {.shared_rows = true, .sms = 4});
    check_backward<float, bf16, float, bf16>(cases, title + ", two clusters", 3, columns,
                                             {.shared_rows = true, .parameters = 1, .sms = 9, .branches = true});
    check_backward<fp16, fp16, bf16>(
        cases, title + ", rms, one team", 4, columns,
        {.centred = false, .added = false, .shared_rows = true, .sms = 4, .shared = 30000});
  }
  for (const int columns : {8200, 16392, 32776}) {
    const std::string title = "backward, clusters of blocks, " + std::to_string(columns);
    check_backward<float, bf16, float>(cases, title, columns < 9000 ? 5 : 1, columns,
                                       {.added = false, .parameters = 0, .sms = 8});
  }
  cases.check("backward, long rows on chips without clusters", [] {
    emu::options().runs_sm90_code = false;
    return backward<bf16, bf16, float>(2, 8200, {.added = false, .parameters = 0, .sms = 8});
  });
  check_backward<bf16, bf16, float>(cases, "backward, rows too long for a cluster's shared memory", 1, 8200,
                                    {.parameters = 0, .sms = 8, .shared = 2000});
  cases.check("backward, the shares of long rows", [] {
    emu::options().sm_count = 132;
    const bool right = norm_backward_slots(2048, 32768, 2) == 16 * 2 * 32768 &&
                       norm_backward_slots(5, 32768, 1) == 5 * 32768 &&
                       norm_backward_slots(2048, 16384, 1) == 33 * 16384 &&
                       norm_backward_slots(9, 1 << 20, 1) == 1 << 20 && norm_backward_slots(0, 32768, 2) == 0;
    emu::options().runs_sm90_code = false;
    return right && norm_backward_slots(2048, 32768, 2) == 12 * 2 * 32768 ? "" : "other sizes";
  });
  check_backward<float, bf16, float, bf16>(cases, "backward, teams, a branch", 5, 264,
                                           {.parameters = 1, .sms = 2, .branches = true});
  check_backward<fp16, float, bf16, float>(cases, "backward, odd, a branch", 3, 601, {.branches = true});
  check_backward<bf16, float, float, fp16>(cases, "backward, unaligned, a branch", 3, 62,
                                           {.offset = 1, .branches = true});
  for (const int columns : {1040, 1541}) {
    check_backward<float, bf16, fp16, bf16>(cases, "backward in pieces, a branch, " + std::to_string(columns), 3,
                                            columns, {.forced = true, .branches = true});
  }
  cases.check("backward, no rows", [] { return message_of(norm_backward(NormBackward{}, nullptr)); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("norm", Seeds(argc, argv, 2), {forward_cases, backward_cases});
}
