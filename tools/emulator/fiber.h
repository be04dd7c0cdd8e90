#pragma once
// Fibers: one per GPU thread. Switches are only between the machine's loop and a fiber.
#include <cstddef>

namespace ak::emu {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() { release(); }

  /// Prepares `entry(argument)` on its own stack. `entry` must end with leave() and never return.
  void start(void (*entry)(void*), void* argument);
  /// Runs the fiber until it calls leave(). Called by the machine's loop.
  void enter();
  /// Returns to the loop. Called on the fiber.
  void leave();
  /// Frees the stack of a fiber that will not be entered again.
  void release();

 private:
  void* context_ = nullptr;  // saved stack pointer, or ucontext_t
  void* caller_ = nullptr;
  char* stack_ = nullptr;
};

/// Stack size of a fiber in bytes. A guard page turns an overflow into a segmentation fault.
inline constexpr std::size_t kFiberStackBytes = 64 << 10;

}  // namespace ak::emu
