#include "emulator/mma.h"

#include <algorithm>
#include <cmath>

#include "emulator/access.h"
#include "emulator/warp.h"

namespace ak::emu {
namespace {

float truncating_sum(float c, std::span<const float> a, std::span<const float> b) {
  constexpr int kKeptBits = 24 + 2;
  int largest = c == 0 ? -1000 : std::ilogb(c);
  for (std::size_t i = 0; i < a.size(); i++) {
    if (a[i] != 0 && b[i] != 0) largest = std::max(largest, std::ilogb(a[i]) + std::ilogb(b[i]));
  }
  if (largest == -1000) return c;
  const double unit = std::ldexp(1.0, largest - (kKeptBits - 1));
  double sum = std::trunc(c / unit);
  for (std::size_t i = 0; i < a.size(); i++) sum += std::trunc(static_cast<double>(a[i]) * b[i] / unit);
  const double exact = sum * unit;
  const auto rounded = static_cast<float>(exact);
  return std::fabs(rounded) > std::fabs(exact) ? std::nextafter(rounded, 0.0f) : rounded;
}

float value_of(uint32_t pair, int half, bool is_bf16) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * half));
  return is_bf16 ? to_float(bf16{bits}) : to_float(fp16{bits});
}

}  // namespace

float tensor_core_sum(float c, std::span<const float> a, std::span<const float> b) {
  double sum = c;
  for (std::size_t i = 0; i < a.size(); i++) sum += static_cast<double>(a[i]) * b[i];
  if (!options().truncate_mma || !std::isfinite(sum)) return static_cast<float>(sum);
  return truncating_sum(c, a, b);
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address, bool transpose) {
  if (row_address % 16 != 0) fail(format("row address 0x%x is not aligned to 16 bytes", row_address & kWindow));
  auto& slots = warp_slots();
  const int lane = current->lane();
  slots[lane][0] = row_address;
  meet_warp(false);
  for (int matrix = 0; matrix < 4; matrix++) {
    const auto row = [&](int i) { return static_cast<uint32_t>(slots[8 * matrix + i][0]); };
    if (!transpose) {
      read_shared(&r[matrix], row(lane / 4) + 4 * static_cast<uint32_t>(lane % 4), 4);
      continue;
    }
    uint16_t pair[2];
    for (int i = 0; i < 2; i++) read_shared(&pair[i], row(2 * (lane % 4) + i) + 2 * static_cast<uint32_t>(lane / 4), 2);
    r[matrix] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4], bool transpose) {
  if (row_address % 16 != 0) fail(format("row address 0x%x is not aligned to 16 bytes", row_address & kWindow));
  auto& slots = warp_slots();
  const int lane = current->lane();
  slots[lane][0] = row_address;
  meet_warp(false);
  for (int matrix = 0; matrix < 4; matrix++) {
    const auto row = [&](int i) { return static_cast<uint32_t>(slots[8 * matrix + i][0]); };
    if (!transpose) {
      write_shared(row(lane / 4) + 4 * static_cast<uint32_t>(lane % 4), &r[matrix], 4);
      continue;
    }
    const uint16_t pair[2] = {static_cast<uint16_t>(r[matrix]), static_cast<uint16_t>(r[matrix] >> 16)};
    for (int i = 0; i < 2; i++)
      write_shared(row(2 * (lane % 4) + i) + 2 * static_cast<uint32_t>(lane / 4), &pair[i], 2);
  }
}

// a has 2 registers per 8 columns of A (rows 0-7, rows 8-15), b has one per 8 rows of B.
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16) {
  auto& slots = warp_slots();
  const int lane = current->lane();
  for (int i = 0; i < 4; i += 2) slots[lane][i / 2] = a[i] | static_cast<uint64_t>(a[i + 1]) << 32;
  slots[lane][2] = b[0] | static_cast<uint64_t>(b[1]) << 32;
  meet_warp(false);
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, upper = i / 2, column = 2 * (lane % 4) + i % 2;
    float x[16], y[16];
    for (int j = 0; j < 16; j++) {
      const int block = j / 8, in_block = j % 8;
      const uint64_t from_a = slots[4 * row + in_block / 2][block], from_b = slots[4 * column + in_block / 2][2];
      x[j] = value_of(static_cast<uint32_t>(from_a >> (32 * upper)), in_block % 2, is_bf16);
      y[j] = value_of(static_cast<uint32_t>(from_b >> (32 * block)), in_block % 2, is_bf16);
    }
    d[i] = tensor_core_sum(d[i], x, y);
  }
}

}  // namespace ak::emu
