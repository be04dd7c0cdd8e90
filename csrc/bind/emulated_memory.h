// Memory that Python owns, as the emulated kernels see it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "device/status.h"
#include "emulator/memory.h"

namespace ak {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

/// A piece of memory the kernels may touch: what errors call it, where it is, and whether it holds values already.
using Piece = std::tuple<std::string, Address, size_t, bool>;

/// Tells the emulator of memory that Python owns, for the time of one call. Views of the same bytes become one piece.
class Visible {
 public:
  explicit Visible(std::vector<Piece> pieces) {
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return std::get<1>(a) < std::get<1>(b); });
    for (const auto& [name, address, bytes, initialised] : pieces) {
      if (bytes == 0) continue;
      if (!pieces_.empty() && address < pieces_.back().end) {
        pieces_.back().end = std::max(pieces_.back().end, address + bytes);
      } else {
        pieces_.push_back({name, address, address + bytes, initialised});
      }
    }
    for (const auto& p : pieces_) {
      regions_.push_back(emu::global_memory().add(p.name, at<void>(p.begin), p.end - p.begin, p.initialised));
    }
  }
  Visible(const Visible&) = delete;
  Visible& operator=(const Visible&) = delete;
  ~Visible() {
    for (emu::Region* region : regions_) emu::global_memory().remove(region);
  }

 private:
  struct Interval {
    std::string name;
    Address begin, end;
    bool initialised;
  };
  std::vector<Interval> pieces_;
  std::vector<emu::Region*> regions_;
};

inline void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

}  // namespace ak
