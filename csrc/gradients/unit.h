// A unit of an optimizer: what it asks for, and what it remembers. Rows of the op's matrices.
#pragma once

#include "base/config.h"

namespace ak {

struct UnitRule {
  double max_norm;  // below 0: none
  double check;     // not 0: skip a step whose gradients are not all finite
  double zscore;    // 0: no rule for spikes
  double decay, warmup;
  double skips_spikes;  // else they are clipped
  double asked;         // 0: the unit is not stepped
};

struct UnitStatistics {
  double steps, skips, in_a_row;  // taken; asked for and not taken, in all and the last ones in a row
  double seen, mean, variance;    // of the norms: how many, and their averages
};

/// The number of a tensor among those of all units; ~number stands for one whose square counts elsewhere.
AK_HD int64_t row_of(int64_t entry) { return entry < 0 ? ~entry : entry; }

}  // namespace ak
