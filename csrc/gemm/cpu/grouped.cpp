// The grouped product of gemm/call.h on the CPU: a product of gemm_cpu for each group, its rows or terms by an offset.
//
// A group with a large part of the rows is shared by all threads, one such group after the other. The other groups are
// dealt to threads whole, in runs of about as many rows each: one region of threads instead of one a group. An element
// is summed the same way in both, so the bits do not depend on the number of threads.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "gemm/call.h"

namespace ak {
namespace {

// Flops that a thread should have to do.
constexpr int64_t kFlopsPerThread = 4 << 20;

struct Group {
  int index;
  int64_t begin, size;
};

std::vector<Group> groups_of(const GroupedProblem& p, int64_t total) {
  std::vector<Group> groups;
  int64_t begin = 0;
  for (int index = 0; index < p.groups; ++index) {
    const int64_t end = std::clamp<int64_t>(p.offs[index * p.offs_stride], begin, total);
    groups.push_back({index, begin, end - begin});
    begin = end;
  }
  return groups;
}

void* element(const GemmValues& values, int64_t offset) {
  return values.data ? static_cast<char*>(values.data) + offset * bytes_of(values.type) : nullptr;
}

// The operand from a line of one of its dimensions on: `ld` apart, or next to each other.
const void* from_line(const void* data, int64_t line, int64_t stride) {
  return static_cast<const uint16_t*>(data) + line * stride;
}

GemmProblem problem_of(const GroupedProblem& p, const Group& group) {
  GemmProblem q = p.product;
  GemmEpilogue& e = q.epilogue;
  if (p.sums) {
    q.k = static_cast<int>(group.size);
    q.a = from_line(q.a, group.begin, q.m_major_a ? q.ld_a : 1);
    q.b = from_line(q.b, group.begin, q.n_major_b ? q.ld_b : 1);
    q.c.data = element(q.c, group.index * q.c.batch_stride);
  } else {
    q.m = static_cast<int>(group.size);
    q.a = from_line(q.a, group.begin, q.m_major_a ? 1 : q.ld_a);
    q.b = from_line(q.b, group.index, q.batch_stride_b);
    q.c.data = element(q.c, group.begin * q.c.row_stride);
    e.z.data = element(e.z, group.begin * e.z.row_stride);
    e.bias.data = element(e.bias, group.index * e.bias.batch_stride);
  }
  q.batch_stride_b = 0;
  return q;
}

// Contiguous rows from `first` on.
void zero_rows(const GemmValues& values, int64_t first, int64_t rows) {
  if (values.data)
    std::memset(element(values, first * values.row_stride), 0,
                static_cast<size_t>((rows - first) * values.row_stride * bytes_of(values.type)));
}

}  // namespace

Status grouped_gemm_cpu(const GroupedProblem& p, Stream stream) {
  const int64_t total = p.sums ? p.product.k : p.product.m;
  std::vector<Group> groups = groups_of(p, total);
  const int64_t end = groups.empty() ? 0 : groups.back().begin + groups.back().size;
  if (!p.sums) {
    zero_rows(p.product.c, end, total);
    zero_rows(p.product.epilogue.z, end, total);
  }
  const bool skips_empty = !p.sums || p.product.accumulate;
  std::erase_if(groups, [&](const Group& group) { return skips_empty && group.size == 0; });

  const int64_t large = end / (2 * torch::stable::get_num_threads());
  std::vector<Group> small;
  for (const Group& group : groups) {
    if (group.size <= large) {
      small.push_back(group);
    } else {
      gemm_cpu(problem_of(p, group), stream);
    }
  }
  // Cut by rows, and by one more for each group, so that every group, even an empty one, begins at a place of its own.
  int64_t places = 0;
  for (const Group& group : small) places += group.size + 1;
  const int64_t flops = 2 * std::max<int64_t>(1, int64_t{p.product.n} * (p.sums ? p.product.m : p.product.k));
  torch::stable::parallel_for(0, places, std::max<int64_t>(1, kFlopsPerThread / flops), [&](int64_t from, int64_t to) {
    int64_t place = 0;
    for (const Group& group : small) {
      if (from <= place && place < to) gemm_cpu(problem_of(p, group), stream);
      place += group.size + 1;
    }
  });
  return {};
}

}  // namespace ak
