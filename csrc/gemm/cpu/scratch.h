// Memory and sizes that the products of gemm_blocked.cpp and gemm_thin.cpp share.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ak {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Memory of a thread that grows to what is asked of it and stays: fresh pages would cost as much as the packing.
class Scratch {
 public:
  template <typename T>
  T* of(int64_t count) {
    const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(std::aligned_alloc(64, bytes));
      size_ = memory_ ? bytes : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

}  // namespace ak
