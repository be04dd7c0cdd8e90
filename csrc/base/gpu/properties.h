// What the glue asks of a GPU.
#pragma once

namespace ak {

struct GpuProperties {
  int sm_count;
  int capability;  // 10 major + minor
};

}  // namespace ak
