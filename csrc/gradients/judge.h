// The decision about one unit of an optimizer (parameter groups that clip, check and skip by themselves), and the
// statistics that the unit keeps.
//
// Source of the rule for spikes: ZClip (arXiv 2504.02507), one-sided, with two changes. A flagged norm enters the
// averages as the border of the band, m + z0 s: with the clipped norm of the published form a lasting change of level
// is flagged for ever. And the term that keeps a quotient finite is relative to the mean, so that the rule has no
// scale.
#pragma once

#include <cmath>

#include "base/config.h"
#include "gradients/clip.h"
#include "gradients/unit.h"

namespace ak {

struct UnitVerdict {
  float factor;  // of the gradients; kLeave: everything stays
  bool skipped;
};

/// Takes a finite norm into the averages; the norm to clip to, infinite unless it is a spike.
AK_HD double follow_norm(UnitStatistics& s, double norm, const UnitRule& rule) {
  s.seen += 1;
  if (s.seen <= rule.warmup) {
    const double d = norm - s.mean;
    s.mean += div(d, s.seen);
    s.variance += div(d * (norm - s.mean) - s.variance, s.seen);
    return INFINITY;
  }
  const double deviation = sqrt(s.variance);
  const double z = s.mean > 0 ? div(norm - s.mean, deviation + 1e-6 * s.mean) : 0.0;
  const bool spike = z > rule.zscore;
  const double limit = spike ? s.mean + div(rule.zscore * rule.zscore * deviation, z) : INFINITY;
  const double entered = spike ? s.mean + rule.zscore * deviation : norm;
  s.mean = rule.decay * s.mean + (1 - rule.decay) * entered;
  const double d = entered - s.mean;
  s.variance = rule.decay * s.variance + (1 - rule.decay) * (d * d);
  return limit;
}

/// `sum_sq` is of the unscaled gradients, `nonfinite` of their elements.
AK_HD UnitVerdict judge(UnitStatistics& s, float sum_sq, bool nonfinite, const UnitRule& rule) {
  bool skip = nonfinite && rule.check != 0;
  double limit = INFINITY;
  const float norm = sqrt(sum_sq);
  if (!nonfinite && rule.zscore > 0 && is_finite(norm)) limit = follow_norm(s, norm, rule);
  skip = skip || (limit < INFINITY && rule.skips_spikes != 0);
  s.steps += skip ? 0 : 1;
  s.skips += skip ? 1 : 0;
  s.in_a_row = skip ? s.in_a_row + 1 : 0;
  if (skip) return {kLeave, true};
  const double bound = rule.max_norm >= 0 && rule.max_norm < limit ? rule.max_norm : limit;
  if (rule.max_norm < 0 && bound == INFINITY) return {1.0f, false};
  return {clip_factor(sum_sq, static_cast<float>(bound)), false};
}

struct UnitResult {
  float norm, factor;
  bool skipped, nonfinite;
};

/// The sum and flags of some tensors of a unit. A flag above 0: an element is not finite; below 0: there is no
/// gradient.
struct UnitTotal {
  double sum = 0;
  bool there = false, nonfinite = false;

  AK_HD void add(int64_t entry, float sum_sq, float flag) {
    there = there || flag >= 0;
    nonfinite = nonfinite || flag > 0;
    if (entry >= 0 && flag >= 0) sum += sum_sq;
  }

  /// Of all tensors of a unit. One that was not asked for, or has no gradient, stays with its statistics.
  AK_HD UnitResult judge(UnitStatistics& statistics, bool found_before, const UnitRule& rule) const {
    if (!there || rule.asked == 0) return {0.0f, kLeave, false, false};
    const float sum_sq = static_cast<float>(sum);
    const UnitVerdict verdict = ak::judge(statistics, sum_sq, nonfinite || found_before, rule);
    return {sqrt(sum_sq), verdict.factor, verdict.skipped, nonfinite};
  }
};

}  // namespace ak
