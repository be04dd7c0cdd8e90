// GPU properties used by the glue.
#pragma once

namespace ak {

struct GpuProperties {
  int sm_count;
  int capability;        // 10 major + minor
  bool geforce = false;  // device/chip_name.h
};

}  // namespace ak
