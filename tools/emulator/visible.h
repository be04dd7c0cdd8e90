#pragma once
// External memory (torch's tensors), made accessible to the kernels of one call.
#include <cstddef>
#include <string>
#include <vector>

#include "emulator/memory.h"

namespace ak::emu {

/// Regions with the lifetime of the object. Overlapping memory is merged into one region, named after the first.
class VisibleMemory {
 public:
  VisibleMemory() = default;
  VisibleMemory(const VisibleMemory&) = delete;
  VisibleMemory& operator=(const VisibleMemory&) = delete;
  ~VisibleMemory();

  /// Adds memory. `initialised`: the bytes hold values; overrides earlier calls. `granule`: 1 if its elements are
  /// bytes.
  void add(std::string name, const void* data, std::size_t bytes, bool initialised, bool writable,
           std::size_t granule = kGranule);
  /// Marks bytes, added before, as initialized.
  void set_initialised(const void* data, std::size_t bytes);

 private:
  std::vector<Region*> regions_;
};

}  // namespace ak::emu
