// Every rule of the package.
#pragma once

#include <tuple>

#include "update/rules/adamw.h"
#include "update/rules/lamb.h"
#include "update/rules/lion.h"
#include "update/rules/muon.h"
#include "update/rules/sgd.h"

namespace ak {

using Rules = std::tuple<AdamW, Lamb, Lion, Muon, Sgd>;

// Calls f(Rule{}) for each.
template <typename F>
void for_each_rule(const F& f) {
  std::apply([&](auto... rule) { (f(rule), ...); }, Rules{});
}

}  // namespace ak
