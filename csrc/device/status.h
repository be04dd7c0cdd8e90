#pragma once
// Stream and result of a launcher, in plain C++, so that kernel headers need neither torch nor CUDA.

namespace ak {

/// A cudaStream_t; ignored by the emulator.
using Stream = void*;

/// Result of a launch. The caller must check it: a failed launch returns at once and looks infinitely fast.
struct [[nodiscard]] Status {
  int code = 0;              ///< 0, or the cudaError_t of the launch
  const char* message = "";  ///< error message; valid until the next launch of this thread

  bool ok() const { return code == 0; }
};

}  // namespace ak
