#pragma once
// What a launcher takes and returns, in plain C++, so that the headers of kernels need neither torch nor CUDA.

namespace ak {

/// A cudaStream_t; ignored by the emulator.
using Stream = void*;

/// Result of a launch. Every launcher returns one and the caller must look: a launch that failed is instant and looks
/// infinitely fast.
struct [[nodiscard]] Status {
  int code = 0;  ///< 0, or the cudaError_t of the launch
  const char* message =
      "";  ///< what went wrong, for the exception's text; lives at least until the next launch of this thread

  bool ok() const { return code == 0; }
};

}  // namespace ak
