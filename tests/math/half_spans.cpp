// Each version of csrc/base/cpu/half_spans.cpp that this CPU runs against base/half.h: every fp16 code, floats around
// every rounding boundary of fp16 and bf16 and at random, and every length up to three vectors, with what lies behind
// left alone.
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/cpu/half_spans.cpp"

using namespace ak;

static bool nan_code(uint16_t bits) { return (bits & 0x7fffu) > 0x7c00u; }

static long wrong_numbers(Spans s, const std::vector<fp16>& codes, const std::vector<float>& floats) {
  long wrong = 0;
  std::vector<float> wide(codes.size());
  s.widen(codes.data(), wide.data(), static_cast<int64_t>(codes.size()));
  for (size_t i = 0; i < codes.size(); ++i) {
    const float expected = to_float(codes[i]);
    wrong += nan_code(codes[i].bits) ? wide[i] == wide[i] : std::memcmp(&wide[i], &expected, 4) != 0;
  }
  std::vector<fp16> narrow(floats.size());
  s.round(floats.data(), narrow.data(), static_cast<int64_t>(floats.size()));
  for (size_t i = 0; i < floats.size(); ++i) wrong += narrow[i].bits != round_to<fp16>(floats[i]).bits;
  std::vector<bf16> brief(floats.size());
  s.round_bf16(floats.data(), brief.data(), static_cast<int64_t>(floats.size()));
  for (size_t i = 0; i < floats.size(); ++i) wrong += brief[i].bits != round_to<bf16>(floats[i]).bits;
  return wrong;
}

static long wrong_lengths(Spans s) {
  long wrong = 0;
  for (int64_t n = 0; n <= 97; ++n) {
    std::vector<fp16> codes(100, fp16{0x3c00}), back(100, fp16{0x1234});
    std::vector<bf16> brief(100, bf16{0x1234});
    std::vector<float> ones(100, 1.0f), wide(100, -7.0f);
    s.widen(codes.data(), wide.data(), n);
    s.round(ones.data(), back.data(), n);
    s.round_bf16(ones.data(), brief.data(), n);
    for (int64_t i = 0; i < 100; ++i) {
      wrong += wide[static_cast<size_t>(i)] != (i < n ? 1.0f : -7.0f);
      wrong += back[static_cast<size_t>(i)].bits != (i < n ? 0x3c00 : 0x1234);
      wrong += brief[static_cast<size_t>(i)].bits != (i < n ? 0x3f80 : 0x1234);
    }
  }
  return wrong;
}

int main() {
  std::vector<fp16> codes;
  std::vector<float> floats;
  for (uint32_t code = 0; code < 0x10000u; ++code) {
    codes.push_back({static_cast<uint16_t>(code)});
    for (const uint32_t more : {0u, 1u, 0xfffu, 0x1000u, 0x1001u})
      floats.push_back(float_of(bits_of(to_float(codes.back())) + more));
  }
  for (uint32_t code = 0; code < 0x10000u; ++code)  // alone among its 32, so that a vector holds one special number
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      for (uint32_t i = 0; i < 32; ++i) floats.push_back(i == code % 32 ? float_of(code << 16 | low) : 1.0f);
  for (uint32_t i = 0, bits = 1; i < (1u << 20); ++i) floats.push_back(float_of(bits = bits * 1664525u + 1013904223u));
  std::vector<std::pair<const char*, Spans>> versions{{"plain", {widen_plain, round_plain, round_bf16_plain}},
                                                      {"chosen", kSpans}};
#if AK_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    versions.push_back({"f16c", {widen_f16c, round_f16c, round_bf16_plain}});
#endif
  long wrong = 0;
  for (const auto& [name, spans] : versions) {
    const long numbers = wrong_numbers(spans, codes, floats), lengths = wrong_lengths(spans);
    if (numbers || lengths) std::printf("%s: %ld numbers, %ld lengths are wrong\n", name, numbers, lengths);
    wrong += numbers + lengths;
  }
  return wrong != 0;
}
