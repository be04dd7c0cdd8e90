// judge_units_ on the CPU.
#include "gradients/call.h"
#include "gradients/judge.h"

namespace ak {

Status judge_units(const UnitsRef& at, Stream) {
  for (int64_t unit = 0, begin = 0; unit < at.units; begin = at.ends[unit++]) {
    UnitTotal total;
    for (int64_t i = begin; i < at.ends[unit]; ++i) {
      const int64_t row = row_of(at.rows[i]);
      total.add(at.rows[i], at.sums[row], at.flags[row]);
    }
    const bool found_before = at.found_infs && found(at.found_infs[unit]);
    const UnitResult result = total.judge(at.statistics[unit], found_before, at.rules[unit]);
    at.results[unit] = result.norm;
    at.results[at.units + unit] = result.skipped ? 1.0f : 0.0f;
    at.results[2 * at.units + unit] = result.nonfinite ? 1.0f : 0.0f;
    for (int64_t i = begin; i < at.ends[unit]; ++i) at.factors[row_of(at.rows[i])] = result.factor;
  }
  return {};
}

}  // namespace ak
