#pragma once
// Counts stores of half sectors. L2 keeps memory in sectors of 32 bytes; if it evicts one of which a part was written
// and nothing read, it first reads memory to complete it.
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace ak::emu {

struct Region;
struct Thread;
struct Warp;

/// Sectors of one launch. The n-th stores of a warp's lanes to a buffer count as one instruction, so it is exact where
/// all lanes that store there do so as often.
class SectorCount {
 public:
  void note_read(const void* p, std::size_t bytes);
  void note_write(const Thread& thread, const Region& region, const void* p, std::size_t bytes);
  /// Sectors that an instruction wrote in part, though not at the ends of a buffer, and that nothing read. Stores of
  /// a single lane, such as a row's statistics, are left out.
  int halves() const;

 private:
  static constexpr uintptr_t kSector = 32;
  struct Store {
    int lanes = 0;
    std::map<uintptr_t, std::pair<uint32_t, uint32_t>> sectors;  // bytes written, bytes in the buffer
  };
  std::map<std::pair<const Thread*, const Region*>, uint32_t> next_;
  std::map<std::tuple<const Warp*, const Region*, uint32_t>, Store> stores_;
  std::unordered_set<uintptr_t> read_;
};

}  // namespace ak::emu
