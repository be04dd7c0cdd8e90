// gemm_repack on the emulator: lines of every alignment, length and distance, matrices that share an operand or lie
// apart, one operand or both, and products of the copies, bit for bit. Memory between the lines is uninitialised,
// and reading it is an error.
#include "gemm/sm90/repack.cu"

#include <numeric>

#include "gemm/sm90/gemm.cuh"
#include "gemm_problem.h"

namespace ak::test {
namespace {

constexpr Major K = Major::kK, MN = Major::kMN;

/// One operand: `planes` matrices of `lines` lines of `length` elements.
struct Layout {
  int lines, length;
  int64_t ld;
  int planes = 1;
  int64_t plane = 0;
  int first = 0;  // elements in front, which so lose their alignment

  int64_t size() const { return first + (planes - 1) * plane + (lines - 1) * ld + length; }
  int64_t at(int z, int line, int x) const { return first + z * plane + line * ld + x; }
  int64_t pitch() const { return length < 512 ? (length + 7) / 8 * 8 : (length + 63) / 64 * 64; }
};

uint16_t value(int64_t i) { return static_cast<uint16_t>(i * 40503 + 1); }

void fill(emu::Buffer<uint16_t>& buffer, const Layout& l) {
  for (int z = 0; z < l.planes; z++) {
    for (int line = 0; line < l.lines; line++) {
      for (int x = 0; x < l.length; x++) buffer.set(static_cast<size_t>(l.at(z, line, x)), value(l.at(z, line, x)));
    }
  }
}

/// A is m-major, so its lines are k's, as are those of B, which is n-major.
GemmProblem problem(const Layout& a, const Layout& b, int batch, const uint16_t* a_data, const uint16_t* b_data) {
  GemmProblem q{};
  q.a = a_data + a.first, q.b = b_data + b.first;
  q.m = a.length, q.n = b.length, q.k = a.lines;
  q.ld_a = a.ld, q.ld_b = b.ld;
  q.m_major_a = q.n_major_b = true;
  q.batch = batch;
  q.batch_stride_a = a.plane, q.batch_stride_b = b.plane;
  return q;
}

void copies(Cases& cases) {
  const auto check = [&](const char* what, Layout a, Layout b, int batch = 1, int sms = 2) {
    cases.check(what, [=] {
      emu::options().sm_count = sms;
      emu::Buffer<uint16_t> a_stored("a", static_cast<size_t>(a.size())), b_stored("b", static_cast<size_t>(b.size()));
      fill(a_stored, a), fill(b_stored, b);
      const GemmProblem q = problem(a, b, batch, a_stored.data(), b_stored.data());
      emu::Buffer<uint16_t> scratch("scratch", gemm_repack_bytes(q) / 2);
      const GemmProblem r = gemm_repacked(q, scratch.data());
      const std::string error = message_of(gemm_repack(q, r, nullptr));
      if (!error.empty()) return error;
      size_t seen = 0;
      const auto compare = [&](const char* name, const Layout& l, const void* data, int64_t ld, int64_t plane,
                               bool moved) {
        if (!moved) return std::string();
        const auto* begin = static_cast<const uint16_t*>(data);
        if (ld != l.pitch() || plane != (l.planes == 1 ? 0 : l.lines * l.pitch()))
          return emu::format("%s: lines are %d apart, matrices %d", name, static_cast<int>(ld),
                             static_cast<int>(plane));
        for (int z = 0; z < l.planes; z++) {
          for (int line = 0; line < l.lines; line++) {
            for (int x = 0; x < l.pitch(); x++, seen++) {
              const uint16_t want = x < l.length ? value(l.at(z, line, x)) : 0;
              const uint16_t got = scratch[static_cast<size_t>(begin + z * plane + line * ld + x - scratch.data())];
              if (got != want) return emu::format("%s[%d, %d, %d] is %d, expected %d", name, z, line, x, got, want);
            }
          }
        }
        return std::string();
      };
      std::string wrong = compare("a", a, r.a, r.ld_a, r.batch_stride_a, r.a != q.a);
      if (wrong.empty()) wrong = compare("b", b, r.b, r.ld_b, r.batch_stride_b, r.b != q.b);
      if (!wrong.empty()) return wrong;
      if (seen != scratch.size()) return emu::format("%zu of %zu elements are a copy", seen, scratch.size());
      return scratch.check_red_zones();
    });
  };
  const Layout aligned{5, 24, 24};
  check("odd lines", {5, 27, 27}, aligned);
  check("of both operands", {5, 27, 27}, {5, 41, 41});
  check("of B alone", aligned, {5, 19, 19});
  check("even lines, apart", {6, 30, 34}, aligned);
  check("lines of 4 more than 8", {6, 28, 36}, {6, 40, 44});
  check("after an odd element", {5, 24, 24, 1, 0, 1}, {5, 32, 40, 1, 0, 3});
  for (int length = 1; length <= 18; length++) {
    check("every length", {4, length, 2 * (length / 2) + 1}, {4, 7, 9});
  }
  check("long lines start at lines of L2", {3, 511, 511}, {3, 513, 515});
  check("matrices in turn", {5, 13, 13, 3, 65}, {5, 11, 15, 3, 76}, 3);
  check("one matrix for the batch", {5, 13, 13, 3, 65}, {5, 11, 11}, 3);
  check("matrices at odd distances", {5, 16, 16, 2, 81}, {5, 24, 24, 2, 120}, 2);
  check("more chunks than threads", {70, 601, 601}, {70, 9, 9}, 1, 1);
  check("many short lines", {2500, 3, 3}, {2500, 1, 1}, 1, 1);
  cases.check("nothing to copy", [&] {
    alignas(16) static uint16_t memory[8];
    return gemm_repack_bytes(problem(aligned, aligned, 1, memory, memory)) == 0 ? "" : "there is something to copy";
  });
}

/// Division by multiplication, at the edges of its range.
void divisions(Cases& cases) {
  cases.check("division", [] {
    for (const int64_t by : {1, 2, 3, 7, 8, 13, 513, 6283, 65535, 65536, 1 << 30, INT32_MAX}) {
      for (const int64_t near : {int64_t{0}, by, 2 * by, INT32_MAX / by * by, int64_t{INT32_MAX}}) {
        for (int64_t x = std::max<int64_t>(near - 2, 0); x <= std::min<int64_t>(near + 2, INT32_MAX); x++) {
          const uint32_t got = divide(static_cast<uint32_t>(x), divisor(by));
          if (got != x / by) return emu::format("%d / %d is %u", static_cast<int>(x), static_cast<int>(by), got);
        }
      }
    }
    return std::string();
  });
}

/// Products of what gemm_sm90 cannot read.
template <class T, Major kMajorA, Major kMajorB>
void product(Cases& cases, const char* what, const Shape& s) {
  Problem<T, kMajorA, kMajorB> problem(s);
  cases.check(title(what, s), [&] {
    return problem.template compare<T>(NAN, [&](const GemmProblem& q) {
      emu::Buffer<uint16_t> scratch("scratch", gemm_repack_bytes(q) / 2);
      const GemmProblem r = gemm_repacked(q, scratch.data());
      const Status copied = gemm_repack(q, r, nullptr);
      if (!copied.ok()) return copied;
      constexpr int kTile = gemm_tile_index(64, 64);
      return gemm::run<T, kTile, kTile + 1>(r, {kTile, 1, false}, {}, nullptr);
    });
  });
}

void products(Cases& cases) {
  product<bf16, K, K>(cases, "NT", {67, 65, 77, 1});
  product<fp16, K, MN>(cases, "NN", {35, 71, 129, 3});
  product<bf16, MN, MN>(cases, "TN", {37, 41, 67, 1, 1, 2, 2});
  product<fp16, MN, K>(cases, "TT, one B", {37, 41, 67, 5, 1, 2, 2, false, true});
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("gemm_repack", Seeds(argc, argv, 2), {copies, divisions, products});
}
