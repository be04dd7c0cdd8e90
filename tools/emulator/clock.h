#pragma once
// Happens-before by vector clocks. Actors are the threads and the asynchronous units (the loads on one mbarrier, the
// wgmma groups of one warpgroup, the bulk stores of one thread). An actor counts epochs. A thread's knowledge is the
// last epoch it knows of every actor; barriers and atomics pass knowledge on. Two accesses to the same bytes, one of
// them a write, are a race unless the later one's thread knows the earlier one's epoch. This finds races under any
// interleaving.
//
// Threads of a block mostly share their knowledge, so snapshots are immutable and shared, and joins are memoized: a
// barrier of 256 threads costs one pass over the actors, not 256.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace ak::emu {

using Actor = uint32_t;
using Epoch = uint32_t;

struct Snapshot {
  std::vector<Epoch> seen;  // by actor; missing entries are 0
  Epoch of(Actor actor) const { return actor < seen.size() ? seen[actor] : 0; }
};
using Knowledge = std::shared_ptr<const Snapshot>;

/// The union of both.
Knowledge join(const Knowledge& a, const Knowledge& b);
/// `knowledge` and `epoch` of `actor`.
Knowledge with(const Knowledge& knowledge, Actor actor, Epoch epoch);

/// A thread's vector clock.
struct Clock {
  Actor actor = 0;
  Epoch now = 1;
  Knowledge base;  // of the other actors

  bool knows(Actor other, Epoch epoch) const { return other == actor || (base && base->of(other) >= epoch); }
  void acquire(const Knowledge& from) { base = join(base, from); }

  // fence.proxy.async: epochs that this thread ended with one, and its knowledge at the last one.
  std::vector<Epoch> proxy_fences;
  Knowledge at_proxy_fence;
  void proxy_fence();
};

/// True if a fence.proxy.async by either thread is ordered between epoch `epoch` of the thread with clock `other` and
/// the present of `issuer`.
bool proxy_fenced(const Clock& other, Epoch epoch, const Clock& issuer);

/// Collects the knowledge of arriving threads, for the threads that a barrier releases.
class Release {
 public:
  /// Adds everything `clock`'s thread has done.
  void add(Clock& clock);
  void add(const Knowledge& knowledge) { joined_ = join(joined_, knowledge); }
  /// Returns the collected knowledge and resets.
  Knowledge take();

 private:
  Knowledge joined_;
  std::vector<std::pair<Actor, Epoch>> own_;
};

}  // namespace ak::emu
