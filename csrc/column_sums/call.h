// The call of column_sums: the sums of a matrix's columns, the gradient of a bias.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

/// sums[c] = the sum of x[r, c] over the rows, in fp32. The elements of a row are adjacent.
struct ColumnSums {
  const void* x;
  float* sums;
  float* slots;  // scratch: a row of sums for each share of the rows, if there are several; the CPU needs none
  DType type;    // fp16, bf16 or fp32
  int64_t rows;
  int64_t pitch;  // elements from a row to the next; the CPU's rows are dense
  int columns;
};

/// The work of a grid, by the shape alone, so that the order of additions depends on nothing else. A block has a strip
/// of columns and a share of the rows; a thread has 8 columns, and a team of `lanes` threads a row of the strip.
struct ColumnStrips {
  static constexpr int kThreads = 256, kColumns = 8, kLanes = 32;
  static constexpr int kRows = 4;         // of a team, at least, before the rows are shared
  static constexpr int kMostRows = 1024;  // of a team: it adds them in fp32, one after the other
  static constexpr int kBlocks = 528;     // four on each of 132 SMs, or more for many rows

  int count, lanes, teams;
  int64_t shares;

  ColumnStrips(int64_t rows, int columns) {
    const int held = (columns - 1) / kColumns + 1;
    count = (held - 1) / kLanes + 1;
    lanes = (held - 1) / count + 1;
    teams = kThreads / lanes;
    const int64_t least = (rows - 1) / (teams * kMostRows) + 1, most = (rows - 1) / (teams * kRows) + 1;
    shares = std::clamp<int64_t>(kBlocks / count, least, most);
  }
};

Status column_sums(const ColumnSums& call, Stream stream);

}  // namespace ak
