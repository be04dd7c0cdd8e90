// Barriers of threads: meet() and come().
#include <algorithm>
#include <cstring>

#include "emulator/machine.h"

namespace ak::emu {
namespace {

/// Counts the running thread; if it is the last, releases all waiting threads and returns true.
bool arrive(Rendezvous& meeting, int expected, bool waits, bool ordered, const std::function<void()>& last) {
  Thread& thread = *current;
  if (meeting.arrived == 0) {
    meeting.operation = thread.operation;
    meeting.expected = expected;
  } else if (std::strcmp(meeting.operation, thread.operation) != 0) {
    fail(format("others that must do the same are in %s", meeting.operation));
  } else if (meeting.expected != expected) {
    fail(format("called for %d threads, others called it for %d", expected, meeting.expected));
  }
  if (std::find(meeting.passed.begin(), meeting.passed.end(), &thread) != meeting.passed.end()) {
    fail("the thread comes a second time before the others have come once");
  }
  if (ordered) meeting.release.add(thread.clock);
  if (++meeting.arrived < expected) return false;
  if (last) last();
  if (ordered) {
    const Knowledge all = meeting.release.take();
    for (Thread* other : meeting.waiting.threads) other->clock.acquire(all);
    if (waits) thread.clock.acquire(all);
  }
  meeting.arrived = 0;
  meeting.generation++;
  meeting.passed.clear();
  meeting.waiting.wake_all();
  return true;
}

}  // namespace

void meet(Rendezvous& meeting, int expected, bool ordered, const std::function<void()>& last) {
  const uint64_t generation = meeting.generation;
  if (arrive(meeting, expected, true, ordered, last)) {
    machine->yield();
    return;
  }
  machine->block(meeting.waiting, [&meeting, expected, generation] {
    return format("%d of %d threads have come", meeting.generation == generation ? meeting.arrived : expected,
                  expected);
  });
}

void come(Rendezvous& meeting, int expected) {
  if (!arrive(meeting, expected, false, true, {})) meeting.passed.push_back(current);
  if (machine->random.one_in(4)) machine->yield();
}

void meet_warp(bool ordered, const std::function<void()>& last) {
  meet(current->warp->meeting, kWarpSize, ordered, last);
}

}  // namespace ak::emu
