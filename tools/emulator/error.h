#pragma once
// Errors of the emulated machine. Operations call fail(); the machine adds kernel, CTA, warp, seed and operation.
#include <cstdarg>
#include <cstdio>
#include <string>

namespace ak::emu {

struct Error {
  std::string what;
};

/// printf into a std::string.
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* text, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, text);
  std::vsnprintf(buffer, sizeof buffer, text, args);
  va_end(args);
  return buffer;
}

[[noreturn]] inline void fail(std::string what) { throw Error{std::move(what)}; }

}  // namespace ak::emu
