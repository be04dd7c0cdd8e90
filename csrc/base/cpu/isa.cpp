// Reads the CPU's features once, asks the operating system for AMX once, and keeps the choice.
#include "base/cpu/isa.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "base/check.h"
#include "base/cpu/simd.h"

#if AK_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if AK_X86
// torch.use_deterministic_algorithms, which the stable ABI does not expose. Both symbols have been exported since torch
// 1.7; weak, so that the library loads without them.
namespace at {
class Context {
 public:
  __attribute__((weak)) bool deterministicAlgorithms() const;
};
__attribute__((weak)) Context& globalContext();
}  // namespace at
#endif

namespace ak {
namespace {

constexpr std::array<std::string_view, 6> kNames{"portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"};

bool supported(Isa isa) {
#if AK_X86
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
    case Isa::amx_emulated:
      return supported(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return supported(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::amx: {
      unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
      constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
      if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
      if (!(edx & kAmxBf16) || !(edx & kAmxTile) || !supported(Isa::avx512_bf16)) return false;
      // The state of the tiles, 8 KB a thread, is granted to a process that asks; the answer holds for all its threads.
      constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
      return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
    }
  }
  return false;
#else
  return isa == Isa::portable;
#endif
}

std::string list(const std::vector<Isa>& isas) {
  std::string names;
  for (Isa isa : isas) {
    if (!names.empty()) names += ", ";
    names += kNames[static_cast<size_t>(isa)];
  }
  return names;
}

const std::vector<Isa>& available() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> found;
    for (size_t i = 0; i < kNames.size(); ++i) {
      if (supported(static_cast<Isa>(i))) found.push_back(static_cast<Isa>(i));
    }
    return found;
  }();
  return isas;
}

// The best one for products, the last that is not slow.
Isa best() {
  Isa isa = Isa::portable;
  for (Isa each : available()) isa = each == Isa::amx_emulated ? isa : each;
  return isa;
}

Isa named(const char* who, std::string_view name) {
  for (Isa isa : available()) {
    if (kNames[static_cast<size_t>(isa)] == name) return isa;
  }
  fail(who, " is '", name, "'; this machine has: ", list(available()));
}

std::optional<Isa> by_environment() {
  const char* name = std::getenv("AMP_KERNELS_CPU_ISA");
  return name && *name ? std::optional(named("AMP_KERNELS_CPU_ISA", name)) : std::nullopt;
}

// Vector width in bits.
[[maybe_unused]] int bits_of_set(Isa isa) { return isa == Isa::portable ? 128 : isa == Isa::avx2 ? 256 : 512; }

std::atomic<int> forced{-1};

bool deterministic() {
#if AK_X86
  return at::globalContext && at::globalContext().deterministicAlgorithms();
#else
  return false;
#endif
}

// The choice, then all sets of this machine. `request`: the name of a set to use from now on, or "" for the
// environment's.
std::vector<std::string> cpu_isa(std::optional<std::string> request) {
  if (request) forced = request->empty() ? -1 : static_cast<int>(named("cpu_isa: request", *request));
  std::vector<std::string> names{std::string(kNames[static_cast<size_t>(current_isa())])};
  for (Isa isa : available()) names.emplace_back(kNames[static_cast<size_t>(isa)]);
  return names;
}

}  // namespace

AK_EXPORT Isa current_isa() {
  if (const int isa = forced; isa >= 0) return static_cast<Isa>(isa);
  static const std::optional<Isa> wanted = by_environment();  // where that throws, the next call asks again
  static const Isa automatic = best();
  return wanted ? *wanted : deterministic() ? Isa::portable : automatic;
}

int vector_bits() {
#if AK_X86 && AK_HAS_SIMD_CLONES
  static const int widest = __builtin_cpu_supports("x86-64-v4") ? 512 : __builtin_cpu_supports("x86-64-v3") ? 256 : 128;
  // `portable` asks for other bits of products. Rows have the same bits at any width, and 128 bits without fused
  // multiply-adds are slow.
  static const int wanted = [] {
    const std::optional<Isa> isa = by_environment();
    return isa ? std::max(256, bits_of_set(*isa)) : 512;
  }();
  const int isa = forced;
  return std::min(widest, isa >= 0 ? bits_of_set(static_cast<Isa>(isa)) : wanted);
#else
  return 128;
#endif
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&ak::cpu_isa)); }
