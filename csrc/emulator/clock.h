#pragma once
// Happens-before, by vector clocks. Every thread is an actor; so is everything asynchronous that completes by itself
// (the loads that arrive on one mbarrier, the wgmma groups of one warpgroup, the bulk stores of one thread). An actor
// counts epochs; a thread carries what it knows of every actor, and barriers and atomics pass knowledge on. Two
// accesses to the same bytes, one of them a write, are a race unless the later one's thread knows the earlier one's
// epoch: no unlucky interleaving is needed to find it.
//
// The threads of a block mostly know the same, so knowledge is immutable and shared, and joins are remembered: a
// barrier of 256 threads costs one pass over the actors, not 256.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace ak::emu {

using Actor = uint32_t;
using Epoch = uint32_t;

struct Snapshot {
  std::vector<Epoch> seen;  // by actor; shorter than the number of actors means 0 for the rest
  Epoch of(Actor actor) const { return actor < seen.size() ? seen[actor] : 0; }
};
using Knowledge = std::shared_ptr<const Snapshot>;

/// What either knows.
Knowledge join(const Knowledge& a, const Knowledge& b);
/// `knowledge` and, beyond it, `epoch` of `actor`.
Knowledge with(const Knowledge& knowledge, Actor actor, Epoch epoch);

/// One thread's place in the order of events.
struct Clock {
  Actor actor = 0;
  Epoch now = 1;
  Knowledge base;  // of the other actors

  bool knows(Actor other, Epoch epoch) const { return other == actor || (base && base->of(other) >= epoch); }
  void acquire(const Knowledge& from) { base = join(base, from); }

  // fence.proxy.async: epochs that this thread closed with one, and what it knew at its last one.
  std::vector<Epoch> proxy_fences;
  Knowledge at_proxy_fence;
  void proxy_fence();

  // Fences around relaxed atomics: what an atomic after a fence publishes, and what a fence after an atomic takes over.
  Knowledge fenced;
  Knowledge seen_relaxed;
};

/// True if a fence.proxy.async stands between epoch `epoch` of the thread with clock `other` and now in `issuer`:
/// executed by either.
bool proxy_fenced(const Clock& other, Epoch epoch, const Clock& issuer);

/// Collects what arriving threads know, until a barrier hands all of it to whoever passes.
class Release {
 public:
  /// Adds everything `clock`'s thread did up to now.
  void add(Clock& clock);
  void add(const Knowledge& knowledge) { joined_ = join(joined_, knowledge); }
  /// The collected knowledge; starts anew.
  Knowledge take();

 private:
  Knowledge joined_;
  std::vector<std::pair<Actor, Epoch>> own_;
};

}  // namespace ak::emu
