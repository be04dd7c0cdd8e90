// The emulator's own tests, part 4: wgmma for every N, layout and swizzle; ldmatrix, stmatrix and mma.sync; the
// arithmetic of the tensor cores. Small integers, so that only one result is right.
#include <cmath>

#include "device/block.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "emulator/harness.h"
#include "emulator/mma.h"

namespace ak::test {
namespace {

template <class T>
void fill(emu::Buffer<T>& buffer, uint64_t seed) {
  emu::Random random{seed};
  for (size_t i = 0; i < buffer.size(); i++) buffer.set(i, round_to<T>(static_cast<float>(random.below(7)) - 3));
}

// ---- wgmma: one warpgroup, D[64 x N] = A[64 x kDepth] B[kDepth x N], operands brought by TMA

enum class Bug { kNone, kNoFence, kNoCommit, kNoWait, kWaitTooFew, kOverwrite, kNoScaleReset, kMisaligned, kDisagree };

constexpr int kDepth = 64;

/// The layout of an operand of `kRows` (m or n) by kDepth in shared memory: as columns of swizzle rows, each as wide as
/// the swizzle.
template <Major kMajor, Swizzle kSwizzle, int kRows>
struct Layout {
  static constexpr int kWide = static_cast<int>(row_bytes(kSwizzle)) / 2;  // elements of a swizzle row
  static constexpr int kColumns = (kMajor == Major::kK ? kDepth : kRows) / kWide,
                       kLong = kMajor == Major::kK ? kRows : kDepth;
  static constexpr int kColumnBytes = kLong * kWide * 2;
  static constexpr int kBytes = kColumns * kColumnBytes;

  static AK_DEVICE void load(uint32_t to, const TensorMap* map, uint32_t barrier) {
    for (int i = 0; i < kColumns; i++) tma_load(to + i * kColumnBytes, map, barrier, i * kWide, 0, 0);
  }
  static AK_DEVICE uint64_t descriptor(uint32_t start, int k16) {
    constexpr int kEight = 8 * kWide * 2;
    if (kMajor == Major::kMN) return wgmma_descriptor(start + k16 * 2 * kEight, kColumnBytes, kEight, kSwizzle);
    const int column = k16 * 16 / kWide, in_row = k16 * 16 % kWide * 2;
    return wgmma_descriptor(start + column * kColumnBytes + in_row, 16, kEight, kSwizzle);
  }
};

template <class T, Major kA, Major kB, Swizzle kSwizzle, int kN, Bug kBug>
AK_KERNEL(128, 1)
product_kernel(AK_PARAM(TensorMap) map_a, AK_PARAM(TensorMap) map_b, float* out) {
  using A = Layout<kA, kSwizzle, 64>;
  using B = Layout<kB, kSwizzle, kN>;
  const uint32_t a = (dynamic_shared() + 1023) & ~1023u, b = a + A::kBytes, full = b + B::kBytes;
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, A::kBytes + B::kBytes);
    A::load(a, &map_a, full);
    B::load(b, &map_b, full);
  }
  block_sync();
  mbarrier_wait(full, 0);
  float d[kN / 2];
  for (float& x : d) x = 100.0f;
  if (kBug != Bug::kNoFence) wgmma_fence();
  for (int k16 = 0; k16 < kDepth / 16; k16++) {
    const uint32_t skew = kBug == Bug::kMisaligned ? 128 : kBug == Bug::kDisagree && t == 77 ? 32 : 0;
    wgmma<T, kA, kB>(d, A::descriptor(a, k16), B::descriptor(b, k16) + (skew >> 4),
                     kBug == Bug::kNoScaleReset || k16 != 0);
    if (kBug == Bug::kWaitTooFew) wgmma_commit();
  }
  if (kBug != Bug::kNoCommit && kBug != Bug::kWaitTooFew) wgmma_commit();
  if (kBug == Bug::kOverwrite) store_shared_2(b + t * 8, 0.0f, 0.0f);
  if (kBug != Bug::kNoWait) wgmma_wait<kBug == Bug::kWaitTooFew ? 1 : 0>();
  for (int j = 0; j < kN / 2; j++) {
    const int row = t / 32 * 16 + t % 32 / 4 + j / 2 % 2 * 8, column = j / 4 * 8 + t % 4 * 2 + j % 2;
    store(out + row * kN + column, d[j]);
  }
}

template <class T, Major kA, Major kB, Swizzle kSwizzle, int kN, Bug kBug = Bug::kNone>
std::string product() {
  emu::Buffer<T> a("a", 64 * kDepth), b("b", kN * kDepth);
  emu::Buffer<float> out("out", 64 * kN);
  fill(a, 1);
  fill(b, kN);
  constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
  const auto map_of = [&](const T* p, Major major, uint64_t rows, TensorMap* map) {
    const uint64_t inner = major == Major::kK ? kDepth : rows, outer = major == Major::kK ? rows : kDepth;
    return make_tensor_map(
        map, {p, kType, 2, {inner, outer}, {inner}, {row_bytes(kSwizzle) / 2, static_cast<uint32_t>(outer)}, kSwizzle});
  };
  TensorMap map_a, map_b;
  if (!map_of(a.data(), kA, 64, &map_a).ok() || !map_of(b.data(), kB, kN, &map_b).ok()) return "no tensor map";
  const LaunchConfig config{
      .name = "product", .grid = 1, .block = 128, .shared_bytes = 1024 + (64 + kN) * kDepth * 2 + 8};
  const Status status = launch(product_kernel<T, kA, kB, kSwizzle, kN, kBug>, config, map_a, map_b, out.data());
  if (!status.ok()) return status.message;
  for (size_t m = 0; m < 64; m++) {
    for (size_t n = 0; n < kN; n++) {
      float sum = 0;
      for (size_t k = 0; k < kDepth; k++) {
        const size_t in_a = kA == Major::kK ? m * kDepth + k : k * 64 + m,
                     in_b = kB == Major::kK ? n * kDepth + k : k * kN + n;
        sum += to_float(a[in_a]) * to_float(b[in_b]);
      }
      if (!(out[m * kN + n] == sum))
        return emu::format("N = %d: d[%zu, %zu] is %g, expected %g", kN, m, n, out[m * kN + n], sum);
    }
  }
  return "";
}

constexpr Major K = Major::kK, MN = Major::kMN;
constexpr Swizzle s128 = Swizzle::k128, s64 = Swizzle::k64, s32 = Swizzle::k32;

template <int kN>
void every_n(Cases& cases) {
  cases.check("wgmma, N = " + std::to_string(kN), [] {
    const std::string error = product<bf16, K, K, s128, kN>();
    return error.empty() && kN % 32 == 8 ? product<fp16, MN, K, s64, kN>() : error;
  });
  if constexpr (kN < 256) every_n<kN + 8>(cases);
}

void wgmmas(Cases& cases) {
  cases.check("fp16, A m-major", [] { return product<fp16, MN, K, s128, 64>(); });
  cases.check("bf16, B n-major", [] { return product<bf16, K, MN, s128, 192>(); });
  cases.check("fp16, both", [] { return product<fp16, MN, MN, s128, 128>(); });
  cases.check("64-byte swizzle", [] { return product<bf16, K, MN, s64, 96>(); });
  cases.check("32-byte swizzle", [] { return product<fp16, MN, K, s32, 48>(); });
  cases.check("32-byte swizzle, n-major", [] { return product<bf16, K, MN, s32, 80>(); });
  cases.check_fails("no fence", "no wgmma_fence()", [] { return product<bf16, K, K, s128, 64, Bug::kNoFence>(); });
  cases.check_fails("no commit", "not committed", [] { return product<bf16, K, K, s128, 64, Bug::kNoCommit>(); });
  cases.check_fails("no wait", "nothing waited for", [] { return product<bf16, K, K, s128, 64, Bug::kNoWait>(); });
  cases.check_fails("a group too few", "nothing waited for",
                    [] { return product<bf16, K, K, s128, 64, Bug::kWaitTooFew>(); });
  cases.check_fails("operand overwritten", "race: write of shared memory",
                    [] { return product<bf16, K, K, s128, 64, Bug::kOverwrite>(); });
  cases.check_fails("sum does not start at 0", "expected",
                    [] { return product<bf16, K, K, s128, 64, Bug::kNoScaleReset>(); });
  cases.check_fails("misaligned descriptor", "swizzle pattern starts",
                    [] { return product<bf16, K, K, s128, 64, Bug::kMisaligned>(); });
  cases.check_fails("descriptors differ", "do not agree",
                    [] { return product<bf16, K, K, s128, 64, Bug::kDisagree>(); });
}

// ---- mma.sync: one warp, C[16 x 8] = A[16 x 16] B[16 x 8], through ldmatrix and stmatrix

template <class T, bool kTransposedB>
AK_KERNEL(32, 1)
fragment_kernel(const T* a, const T* b, T* c) {
  // Rows of 16 elements and 16 bytes more, so that the eight rows of a matrix differ in banks.
  constexpr int kPitch = 48;
  const uint32_t in_a = dynamic_shared(), in_b = in_a + 16 * kPitch, out = in_b + 16 * kPitch;
  const int lane = lane_index();
  auto tile_a = shared_at<T>(in_a), tile_b = shared_at<T>(in_b);
  for (int i = lane; i < 256; i += 32) {
    tile_a[i / 16 * kPitch / 2 + i % 16] = load(a + i);
    tile_b[i / 16 * kPitch / 2 + i % 16] = load(b + i);
  }
  warp_sync();
  // Lane l gives the row l % 16 of the left (l < 16) or right half: matrices in the order top left, bottom left, top
  // right, bottom right.
  const uint32_t offset = static_cast<uint32_t>(lane % 16 * kPitch + lane / 16 * 16);
  uint32_t ra[4], rb[4];
  ldmatrix_x4(ra, in_a + offset);
  // B as [k][n]: its first 8 columns are matrices 0 and 1; as [n][k]: its first 8 rows are matrices 0 and 2.
  if (kTransposedB) {
    ldmatrix_x4(rb, in_b + offset, true);
  } else {
    ldmatrix_x4(rb, in_b + offset);
  }
  if (!kTransposedB) rb[1] = rb[2];
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma_m16n8k16<T>(d, ra, {rb[0], rb[1]});
  const uint32_t top = round_pair<T>(d[0], d[1]), bottom = round_pair<T>(d[2], d[3]);
  stmatrix_x4(out + offset, {top, bottom, top, bottom});  // twice, side by side
  warp_sync();
  auto tile_c = shared_at<T>(out);
  for (int i = lane; i < 256; i += 32) store(c + i, static_cast<T>(tile_c[i / 16 * kPitch / 2 + i % 16]));
}

/// out = the transpose of a, 16 x 16: the way back of fragments by stmatrix_x4_trans.
AK_KERNEL(32, 1)
transpose_kernel(const fp16* a, fp16* out) {
  const int lane = lane_index();
  const uint32_t from = dynamic_shared(), to = from + 16 * 32;
  auto tile = shared_at<fp16>(from);
  for (int i = lane; i < 256; i += 32) tile[i] = load(a + i);
  warp_sync();
  uint32_t r[4];  // top left, bottom left, top right, bottom right
  ldmatrix_x4(r, from + lane % 16 * 32 + lane / 16 * 16);
  stmatrix_x4_trans(to + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16, r);
  warp_sync();
  auto turned = shared_at<fp16>(to);
  for (int i = lane; i < 256; i += 32) store(out + i, static_cast<fp16>(turned[i]));
}

std::string transposed() {
  emu::Buffer<fp16> a("a", 256), out("out", 256);
  fill(a, 7);
  const LaunchConfig config{.name = "transpose", .grid = 1, .block = 32, .shared_bytes = 2 * 16 * 32};
  const Status status = launch(transpose_kernel, config, a.data(), out.data());
  if (!status.ok()) return status.message;
  for (size_t i = 0; i < 256; i++) {
    if (out[i].bits != a[i % 16 * 16 + i / 16].bits) return emu::format("element %d is another", static_cast<int>(i));
  }
  return {};
}

template <class T, bool kTransposedB>
std::string fragments() {
  emu::Buffer<T> a("a", 256), b("b", 256), c("c", 256);
  fill(a, 5);
  fill(b, 6);
  const LaunchConfig config{.name = "fragments", .grid = 1, .block = 32, .shared_bytes = 3 * 16 * 48};
  const Status status = launch(fragment_kernel<T, kTransposedB>, config, a.data(), b.data(), c.data());
  if (!status.ok()) return status.message;
  for (size_t m = 0; m < 16; m++) {
    for (size_t n = 0; n < 16; n++) {
      float sum = 1;
      for (size_t k = 0; k < 16; k++)
        sum += to_float(a[m * 16 + k]) * to_float(b[kTransposedB ? k * 16 + n % 8 : n % 8 * 16 + k]);
      if (!(to_float(c[m * 16 + n]) == sum))
        return emu::format("c[%zu, %zu] is %g, expected %g", m, n, to_float(c[m * 16 + n]), sum);
    }
  }
  return "";
}

void fragments_of_one_warp(Cases& cases) {
  cases.check("stmatrix, transposed", transposed);
  cases.check("m16n8k16 bf16", [] { return fragments<bf16, false>(); });
  cases.check("m16n8k16 fp16, transposed B", [] { return fragments<fp16, true>(); });
}

// ---- arithmetic

void arithmetic(Cases& cases) {
  const auto sum = [](bool truncate, float c, std::vector<float> a, std::vector<float> b) {
    emu::options().truncate_mma = truncate;
    return emu::tensor_core_sum(c, a, b);
  };
  cases.check("one rounding", [&] {
    // 2^24 + 1 + 1: each addend alone would be lost.
    if (sum(false, 0x1p24f, {1, 1}, {1, 1}) != 0x1p24f + 2) return "the exact sum is not rounded once";
    if (sum(false, 1.0f, {0x1p-24f, 0x1p-30f}, {1, 1}) != 1.0f + 0x1p-23f) return "not rounded to nearest";
    return "";
  });
  cases.check("truncation", [&] {
    if (sum(true, 1.0f, {0x1p-24f, 0x1p-30f}, {1, 1}) != 1.0f) return "not cut";
    if (sum(true, -1.0f, {-0x1p-24f, -0x1p-30f}, {1, 1}) != -1.0f) return "not cut towards 0";
    // Two bits beyond fp32's 24 are kept: four quarters of the last bit make one, eight eighths make none.
    const std::vector<float> ones4(4, 1.0f), ones8(8, 1.0f);
    if (sum(true, 1.0f, std::vector<float>(4, 0x1p-25f), ones4) != 1.0f + 0x1p-23f)
      return "the extra bits are not kept";
    if (sum(true, 1.0f, std::vector<float>(8, 0x1p-26f), ones8) != 1.0f) return "more than the extra bits are kept";
    if (sum(true, 0x1p24f, {1, 1}, {1, 1}) != 0x1p24f + 2) return "integers are not exact";
    return "";
  });
  cases.check("truncation is a bias", [&] {
    float cut = 0, rounded = 0;
    emu::Random random{1};
    double exact = 0;
    for (int i = 0; i < 256; i++) {
      std::vector<float> a(16), b(16);
      for (size_t k = 0; k < 16; k++) {
        a[k] = to_float(round_to<bf16>(1.0f + static_cast<float>(random.below(1000)) / 1000));
        b[k] = to_float(round_to<bf16>(1.0f + static_cast<float>(random.below(1000)) / 1000));
        exact += static_cast<double>(a[k]) * b[k];
      }
      cut = sum(true, cut, a, b);
      rounded = sum(false, rounded, a, b);
    }
    const double error = (cut - exact) / exact, fair = (rounded - exact) / exact;
    if (!(error < 0 && error > -256 * 0x1p-23)) return emu::format("relative error %g when cutting", error);
    return std::fabs(fair) > 16 * 0x1p-24 ? emu::format("relative error %g when rounding", fair) : "";
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  const ak::test::Seeds seeds(argc, argv, 8);
  ak::test::Cases cases("tensor_cores", seeds);
  ak::test::wgmmas(cases);
  ak::test::fragments_of_one_warp(cases);
  ak::test::every_n<8>(cases);
  ak::test::arithmetic(cases);
  return cases.finish();
}
