// gemm_repack: copies operands of a product so that each of their lines begins at a multiple of 16 bytes, long ones at
// one of 128.
//
// Work: 2 bytes per element, read once and written once: bound by memory. Plan: one launch for both operands. A thread
// writes 16 bytes of a line at a time, from the four or five aligned words that hold them (the overlap with its
// neighbours hits the cache); a persistent grid of eight blocks per SM keeps 40 KB of loads in flight on each. The
// stores are not streaming, so that the GEMM finds the copy in L2. Traps: words at either end of a line may be partly
// out of bounds, so single elements are read there. Lines are padded with zeros so that the copy is fully initialized;
// the GEMM never reads the padding, since the tensor map ends with the line. 64-bit divisions would take longer than
// the copy.
#include "gemm/sm90/repack.h"

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

constexpr int kRepackThreads = 256;
constexpr int kRepackBlocksPerSm = 8;
constexpr int kInChunk = 8;  // elements per 16-byte store

/// A divisor known at launch, for division by multiplication.
struct Divisor {
  uint32_t by, inverse;  // 2^32 / by, rounded down
};
AK_DEVICE uint32_t divide(uint32_t x, const Divisor& d) {
  const auto quotient = static_cast<uint32_t>(static_cast<uint64_t>(x) * d.inverse >> 32);  // or one less
  return quotient + (x - quotient * d.by >= d.by);
}
Divisor divisor(int64_t by) {
  return {static_cast<uint32_t>(by), static_cast<uint32_t>(std::min<int64_t>((int64_t{1} << 32) / by, UINT32_MAX))};
}

/// Lines of `length` elements, `ld` apart, in matrices `plane` apart; contiguous in the copy.
struct LineCopy {
  const uint16_t* from;
  uint16_t* to;
  int64_t ld, plane;
  int length;
  Divisor lines, chunks;  // lines per matrix, chunks per line
  uint32_t total;         // chunks; 0: nothing to copy
};

struct RepackArgs {
  LineCopy a, b;
};

/// kInChunk elements of a line from the `x`-th on, in pairs; 0 out of bounds.
AK_DEVICE Vec<uint32_t, 4> load_chunk(const uint16_t* line, int x, int length) {
  const uint16_t* const p = line + x;
  const bool odd = reinterpret_cast<uintptr_t>(p) % 4 != 0;
  Vec<uint32_t, 4> pairs;
  if (odd ? x > 0 && x + kInChunk < length : x + kInChunk <= length) {
    uint32_t words[5];
    const auto* const aligned = reinterpret_cast<const uint32_t*>(p - odd);
    AK_UNROLL
    for (int i = 0; i < 5; i++) words[i] = i < 4 || odd ? load(aligned + i) : 0;
    AK_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint64_t both = static_cast<uint64_t>(words[i + 1]) << 32 | words[i];
      pairs[i] = static_cast<uint32_t>(both >> (odd ? 16 : 0));
    }
    return pairs;
  }
  AK_UNROLL
  for (int i = 0; i < 4; i++) {
    const uint32_t low = x + 2 * i < length ? load(p + 2 * i) : 0,
                   high = x + 2 * i + 1 < length ? load(p + 2 * i + 1) : 0;
    pairs[i] = high << 16 | low;
  }
  return pairs;
}

AK_DEVICE void copy_lines(const LineCopy& c) {
  for (uint32_t i = block_index() * kRepackThreads + thread_index(); i < c.total; i += grid_blocks() * kRepackThreads) {
    const uint32_t line = divide(i, c.chunks), matrix = divide(line, c.lines);
    const int x = static_cast<int>(i - line * c.chunks.by) * kInChunk;
    const uint16_t* const from = c.from + matrix * c.plane + (line - matrix * c.lines.by) * c.ld;
    store_vec(reinterpret_cast<uint32_t*>(c.to + static_cast<int64_t>(i) * kInChunk), load_chunk(from, x, c.length));
  }
}

AK_KERNEL(kRepackThreads, kRepackBlocksPerSm) gemm_repack_kernel(AK_PARAM(RepackArgs) args) {
  wait_for_previous_kernel();  // it may still use the scratch
  allow_next_kernel();
  copy_lines(args.a);
  copy_lines(args.b);
}

/// Layout of operand A or B.
struct Lines {
  const void* data;
  int64_t ld, plane, planes, lines;
  int length;

  Lines(const GemmProblem& q, bool of_b)
      : data(of_b ? q.b : q.a),
        ld(of_b ? q.ld_b : q.ld_a),
        plane(of_b ? q.batch_stride_b : q.batch_stride_a),
        planes(plane == 0 ? 1 : q.batch) {
    const int other = of_b ? q.n : q.m;
    const bool along_k = of_b ? !q.n_major_b : !q.m_major_a;
    lines = along_k ? other : q.k;
    length = along_k ? q.k : other;
  }
  bool fits() const { return gemm_sm90_reads(data, ld, plane); }
  int64_t pitch() const { return gemm_repack_pitch(length); }
  int64_t size() const { return planes * lines * pitch(); }  // elements of the copy
};

}  // namespace

size_t gemm_repack_bytes(const GemmProblem& q) {
  size_t bytes = 0;
  for (const bool of_b : {false, true}) {
    const Lines lines(q, of_b);
    if (!lines.fits()) bytes += static_cast<size_t>(lines.size()) * 2;
  }
  return bytes;
}

GemmProblem gemm_repacked(const GemmProblem& q, void* scratch) {
  GemmProblem r = q;
  auto* next = static_cast<uint16_t*>(scratch);
  for (const bool of_b : {false, true}) {
    const Lines lines(q, of_b);
    if (lines.fits()) continue;
    (of_b ? r.b : r.a) = next;
    (of_b ? r.ld_b : r.ld_a) = lines.pitch();
    (of_b ? r.batch_stride_b : r.batch_stride_a) = lines.planes == 1 ? 0 : lines.lines * lines.pitch();
    next += lines.size();
  }
  return r;
}

Status gemm_repack(const GemmProblem& from, const GemmProblem& to, Stream stream) {
  RepackArgs args{};
  int64_t most = 0;
  for (const bool of_b : {false, true}) {
    const Lines lines(from, of_b);
    if (lines.fits()) continue;
    const int64_t chunks = lines.size() / kInChunk;
    if (chunks > INT32_MAX) return {1, "gemm_repack: an operand has more than 2^34 elements"};
    LineCopy& copy = of_b ? args.b : args.a;
    copy.from = static_cast<const uint16_t*>(lines.data);
    copy.to = static_cast<uint16_t*>(const_cast<void*>(of_b ? to.b : to.a));
    copy.ld = lines.ld, copy.plane = lines.plane;
    copy.length = lines.length;
    copy.lines = divisor(lines.lines), copy.chunks = divisor(lines.pitch() / kInChunk);
    copy.total = static_cast<uint32_t>(chunks);
    most = std::max(most, chunks);
  }
  const int64_t blocks = (most + kRepackThreads - 1) / kRepackThreads;
  const LaunchConfig config{
      .name = "gemm_repack",
      .grid = static_cast<int>(std::min<int64_t>(blocks, int64_t{kRepackBlocksPerSm} * device_sm_count())),
      .block = kRepackThreads,
      .overlap_previous = true,
      .stream = stream};
  return launch(gemm_repack_kernel, config, args);
}

}  // namespace ak
