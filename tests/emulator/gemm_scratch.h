// Scratch of a split product, for the tests of the GEMM kernels.
#pragma once
#include "emulator/harness.h"
#include "gemm/call.h"

namespace ak::test {

/// Scratch of a split product; afterwards the counters must be 0 again.
class Scratch {
 public:
  explicit Scratch(GemmScratchSize size)
      : partials_("partials", size.partials), counters_("counters", std::vector<uint32_t>(size.counters, 0u)) {}
  GemmScratch get() { return {partials_.data(), counters_.data()}; }
  std::string check() const {
    for (size_t i = 0; i < counters_.size(); i++) {
      if (counters_[i] != 0) return emu::format("counter %zu is left at %u", i, counters_[i]);
    }
    return partials_.check_red_zones() + counters_.check_red_zones();
  }

 private:
  emu::Buffer<float> partials_;
  emu::Buffer<uint32_t> counters_;
};

}  // namespace ak::test
