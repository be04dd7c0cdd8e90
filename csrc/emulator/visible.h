#pragma once
// Memory that somebody else owns (torch's tensors), shown to the kernels of one call.
#include <cstddef>
#include <string>
#include <vector>

#include "emulator/memory.h"

namespace ak::emu {

/// Regions for as long as the object lives. Views of the same bytes become one region, with the name of the first.
class VisibleMemory {
 public:
  VisibleMemory() = default;
  VisibleMemory(const VisibleMemory&) = delete;
  VisibleMemory& operator=(const VisibleMemory&) = delete;
  ~VisibleMemory();

  /// `initialised`: whether these bytes hold values; it counts, whatever was said of them before.
  void add(std::string name, const void* data, std::size_t bytes, bool initialised, bool writable);
  /// These bytes, added before, hold values now.
  void set_initialised(const void* data, std::size_t bytes);

 private:
  std::vector<Region*> regions_;
};

}  // namespace ak::emu
