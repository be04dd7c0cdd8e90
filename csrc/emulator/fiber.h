#pragma once
// Fibers: every GPU thread is one. Only the machine's own loop and a fiber ever switch to each other.
#include <cstddef>

namespace ak::emu {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// Prepares a run of `entry(argument)` on a stack of its own. `entry` must end with leave() and never return.
  void start(void (*entry)(void*), void* argument);
  /// Runs the fiber until it calls leave(). Called by the machine's loop.
  void enter();
  /// Goes back to the loop. Called on the fiber.
  void leave();

 private:
  void* context_ = nullptr;  // saved stack pointer, or ucontext_t
  void* caller_ = nullptr;
  char* stack_ = nullptr;
};

/// Bytes a kernel may use of a fiber's stack; running over them is a segmentation fault (a guard page), not silent
/// damage.
inline constexpr std::size_t kFiberStackBytes = 64 << 10;

}  // namespace ak::emu
