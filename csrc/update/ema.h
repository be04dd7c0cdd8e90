// Exponential moving average of a weight, in fp32: average = decay average + (1 - decay) weight.
//
// Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 1992, in
// the exponential form of Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS 2017. Written as a
// step towards the weight (torch's lerp): an average that equals the weight stays equal, whatever the decay.
#pragma once

#include "base/config.h"

namespace ak {

// 1 - decay, derived in double and rounded once.
AK_HD float ema_take(double decay) { return static_cast<float>(1.0 - decay); }

// `weight` is the fp32 weight after its update, before anything is rounded to 16 bits.
AK_HD float ema(float average, float weight, float take) { return fma(take, weight - average, average); }

}  // namespace ak
