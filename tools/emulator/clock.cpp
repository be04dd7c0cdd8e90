#include "emulator/clock.h"

#include <algorithm>

namespace ak::emu {
namespace {

bool covers(const Snapshot& big, const Snapshot& small) {
  for (Actor a = 0; a < small.seen.size(); a++) {
    if (small.seen[a] > big.of(a)) return false;
  }
  return true;
}

struct Remembered {
  Knowledge a, b, result;  // owning a and b keeps their addresses from being reused
};

}  // namespace

Knowledge join(const Knowledge& a, const Knowledge& b) {
  if (a == b || !b) return a;
  if (!a) return b;
  static Remembered table[256];
  const auto x = reinterpret_cast<uintptr_t>(a.get()), y = reinterpret_cast<uintptr_t>(b.get());
  Remembered& entry = table[((x * 31 + y) * 0x9e3779b97f4a7c15u) >> 56];
  if (entry.a == a && entry.b == b) return entry.result;
  Knowledge result;
  if (covers(*b, *a)) {
    result = b;
  } else if (covers(*a, *b)) {
    result = a;
  } else {
    auto merged = std::make_shared<Snapshot>(*a);
    merged->seen.resize(std::max(a->seen.size(), b->seen.size()));
    for (Actor i = 0; i < b->seen.size(); i++) merged->seen[i] = std::max(merged->seen[i], b->seen[i]);
    result = merged;
  }
  entry = {a, b, result};
  return result;
}

Knowledge with(const Knowledge& knowledge, Actor actor, Epoch epoch) {
  auto result = knowledge ? std::make_shared<Snapshot>(*knowledge) : std::make_shared<Snapshot>();
  if (result->seen.size() <= actor) result->seen.resize(actor + 1);
  result->seen[actor] = std::max(result->seen[actor], epoch);
  return result;
}

void Clock::proxy_fence() {
  proxy_fences.push_back(now++);
  at_proxy_fence = base;
}

bool proxy_fenced(const Clock& other, Epoch epoch, const Clock& issuer) {
  const auto& fences = other.proxy_fences;
  const auto first = std::lower_bound(fences.begin(), fences.end(), epoch);
  if (first != fences.end() && issuer.knows(other.actor, *first)) return true;
  return issuer.at_proxy_fence && issuer.at_proxy_fence->of(other.actor) >= epoch;
}

void Release::add(Clock& clock) {
  joined_ = join(joined_, clock.base);
  own_.emplace_back(clock.actor, clock.now++);
}

Knowledge Release::take() {
  auto result = joined_ ? std::make_shared<Snapshot>(*joined_) : std::make_shared<Snapshot>();
  for (auto [actor, epoch] : own_) {
    if (result->seen.size() <= actor) result->seen.resize(actor + 1);
    result->seen[actor] = std::max(result->seen[actor], epoch);
  }
  joined_.reset();
  own_.clear();
  return result;
}

}  // namespace ak::emu
