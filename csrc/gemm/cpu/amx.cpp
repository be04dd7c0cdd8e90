// bf16 by tdpbf16ps, which multiplies a 16 x 32 tile of a by a 32 x 16 tile of b into 16 x 16 fp32 sums.
//
// Work: 16384 flops an instruction, one in 16 cycles; 2 x 2 tiles of sums need four loads of 1 KB for four
// instructions. Rows of `a` are read in place, 64 bytes each; b is packed in pairs along K, as vdpbf16ps wants
// it.
//
// Traps: the tiles are thread state, which other users of AMX reconfigure, so the first product of a task configures
// them and the last one releases them. A tile of fewer rows than 16 is a configuration of its own: memory
// beyond the last row is not read. Like vdpbf16ps, the instruction flushes subnormal numbers; it sums even and odd
// elements of K apart, each by fused multiply-adds, before it adds both to the tile (docs/cpu.md).
//
// EmulatedTiles implements the instructions in C++, so that the kernel is tested on machines without AMX.
#include "base/cpu/simd.h"

#if AK_X86
#include <cmath>
#include <cstring>

#include "base/half.h"

#define AK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "gemm/cpu/avx512.h"
#include "gemm/cpu/tile.h"

namespace ak {
namespace {

constexpr int64_t kTileRows = 16, kTileWords = 16;

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct AmxTiles {
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  static void release() { asm volatile("tilerelease" : : : "memory"); }
  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  static void load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(kTile) : "memory");
  }
  template <int kSums, int kA, int kB>
  static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kB), "i"(kA), "i"(kSums));
  }
};

// The tiles as the manual defines them: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
struct EmulatedTiles {
  struct State {
    TileConfig config;
    uint32_t tiles[8][kTileRows][kTileWords];
  };
  static thread_local State state;

  static void configure(const TileConfig& config) { state = {config, {}}; }
  static void release() { state = {{0, 0, {}, {}, {}}, {}}; }
  template <int kTile>
  static void zero() {
    std::memset(state.tiles[kTile], 0, sizeof state.tiles[kTile]);
  }
  template <int kTile>
  static void load(const void* from, int64_t row_bytes) {
    zero<kTile>();
    for (int64_t i = 0; i < state.config.rows[kTile]; ++i)
      std::memcpy(state.tiles[kTile][i], static_cast<const char*>(from) + i * row_bytes, state.config.row_bytes[kTile]);
  }
  template <int kTile>
  static void store(void* to, int64_t row_bytes) {
    for (int64_t i = 0; i < state.config.rows[kTile]; ++i)
      std::memcpy(static_cast<char*>(to) + i * row_bytes, state.tiles[kTile][i], state.config.row_bytes[kTile]);
  }

  static float flush(float x) { return abs(x) < 0x1p-126f ? x * 0.0f : x; }
  // A sum is tiny if its 24 bits are, with an exponent of any size: one of 2^-126 - 2^-150 is flushed, though as a
  // subnormal number it rounds up to 2^-126. A double holds every sum in question exactly.
  static float multiply_add(float a, float b, float c) {
    const double exact = double{a} * double{b} + double{c};
    return std::abs(exact) < 0x1p-126 - 0x1p-151 ? static_cast<float>(exact * 0.0) : fma(a, b, c);
  }
  static float element(uint32_t word, int odd) {
    return flush(to_float(bf16{static_cast<uint16_t>(odd ? word >> 16 : word)}));
  }
  template <int kSums, int kA, int kB>
  static void multiply_add() {
    const TileConfig& config = state.config;
    for (int64_t i = 0; i < config.rows[kSums]; ++i) {
      for (int64_t j = 0; j < config.row_bytes[kSums] / 4; ++j) {
        float sums[2] = {0, 0};
        for (int64_t p = 0; p < config.row_bytes[kA] / 4; ++p) {
          for (int odd : {0, 1})
            sums[odd] =
                multiply_add(element(state.tiles[kA][i][p], odd), element(state.tiles[kB][p][j], odd), sums[odd]);
        }
        uint32_t& sum = state.tiles[kSums][i][j];
        sum = bits_of(flush(flush(float_of(sum)) + flush(sums[0] + sums[1])));
      }
    }
  }
};

thread_local EmulatedTiles::State EmulatedTiles::state;

// Tiles 0 to 3 are the sums of two blocks of rows by two of columns, 4 and 5 hold rows of a, 6 and 7 columns of b.
template <typename T>
struct Amx {
  static thread_local int64_t configured_rows;

  static void begin() { configured_rows = 0; }
  static void end() { T::release(); }

  static void configure(int64_t rows) {
    if (rows == configured_rows) return;
    configured_rows = rows;
    TileConfig config;
    const auto set = [&config](int tile, int64_t tile_rows) {
      config.rows[tile] = static_cast<uint8_t>(std::clamp<int64_t>(tile_rows, 0, kTileRows));
      config.row_bytes[tile] = tile_rows > 0 ? 4 * kTileWords : 0;
    };
    for (int tile : {0, 1, 4}) set(tile, rows);
    for (int tile : {2, 3, 5}) set(tile, rows - kTileRows);
    for (int tile : {6, 7}) set(tile, kTileRows);
    T::configure(config);
  }

  template <bool kTwoRows, bool kTwoColumns>
  static void multiply_tiles(int64_t steps, const Words& a, const uint32_t* b, float* sums, int64_t stride,
                             bool accumulate) {
    const int64_t stride_bytes = 4 * stride, panel_bytes = 8 * kTileWords;
    float* const below = sums + kTileRows * stride;
    if (accumulate) {
      T::template load<0>(sums, stride_bytes);
      if constexpr (kTwoColumns) T::template load<1>(sums + kTileWords, stride_bytes);
      if constexpr (kTwoRows) T::template load<2>(below, stride_bytes);
      if constexpr (kTwoRows && kTwoColumns) T::template load<3>(below + kTileWords, stride_bytes);
    } else {
      T::template zero<0>();
      if constexpr (kTwoColumns) T::template zero<1>();
      if constexpr (kTwoRows) T::template zero<2>();
      if constexpr (kTwoRows && kTwoColumns) T::template zero<3>();
    }
    const char* rows = a.data;
    const int64_t row_bytes = a.lane_bytes;
    for (int64_t p = 0; p < steps;
         p += kTileWords, b += kTileWords * 2 * kTileWords, rows += kTileWords * a.step_bytes) {
      T::template load<4>(rows, row_bytes);
      T::template load<6>(b, panel_bytes);
      T::template multiply_add<0, 4, 6>();
      if constexpr (kTwoColumns) {
        T::template load<7>(b + kTileWords, panel_bytes);
        T::template multiply_add<1, 4, 7>();
      }
      if constexpr (kTwoRows) {
        T::template load<5>(rows + kTileRows * row_bytes, row_bytes);
        T::template multiply_add<2, 5, 6>();
      }
      if constexpr (kTwoRows && kTwoColumns) T::template multiply_add<3, 5, 7>();
    }
    T::template store<0>(sums, stride_bytes);
    if constexpr (kTwoColumns) T::template store<1>(sums + kTileWords, stride_bytes);
    if constexpr (kTwoRows) T::template store<2>(below, stride_bytes);
    if constexpr (kTwoRows && kTwoColumns) T::template store<3>(below + kTileWords, stride_bytes);
  }

  static void multiply(int64_t steps, const Words& a, const uint32_t* b, float* sums, int64_t stride, int64_t rows,
                       int64_t columns, bool accumulate) {
    configure(rows);
    const bool two_columns = columns > kTileWords;
    const auto tiles = rows > kTileRows ? (two_columns ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                                        : (two_columns ? multiply_tiles<false, true> : multiply_tiles<false, false>);
    tiles(steps, a, b, sums, stride, accumulate);
  }

  static int64_t burn(int64_t rounds) {
    configure(2 * kTileRows);
    for (int64_t i = 0; i < rounds; ++i) {
      T::template multiply_add<0, 4, 6>();
      T::template multiply_add<1, 4, 7>();
      T::template multiply_add<2, 5, 6>();
      T::template multiply_add<3, 5, 7>();
    }
    return rounds * 4 * 2 * kTileRows * kTileWords * 2 * kTileWords;
  }

  static constexpr Kernel kKernel = {.rows = 2 * kTileRows,
                                     .columns = 2 * kTileWords,
                                     .lanes_log2 = 4,
                                     .group = 2 * kTileWords,
                                     .word_elements = 2,
                                     .depth = 256,
                                     .most_columns = 768,
                                     .in_place = true,
                                     .packs_rows = true,
                                     .pack_panels = pack_panels<PairWords>,
                                     .pack_rows = pack_rows<PairWords>,
                                     .multiply = multiply,
                                     .dot = nullptr,
                                     .burn = burn,
                                     .begin = begin,
                                     .end = end};
};

template <typename T>
thread_local int64_t Amx<T>::configured_rows = 0;

}  // namespace

const Kernel& amx_kernel() { return Amx<AmxTiles>::kKernel; }
const Kernel& amx_emulated_kernel() { return Amx<EmulatedTiles>::kKernel; }

}  // namespace ak
#endif
