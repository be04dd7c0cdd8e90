#pragma once
// Global memory of the emulated machine: the buffers that kernels may access. Everything else is out of bounds.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator/shadow.h"

namespace ak::emu {

/// A buffer in host memory.
struct Region {
  std::string name;
  char* base = nullptr;
  std::size_t bytes = 0;
  bool writable = true;
  std::size_t granule = kGranule;
  std::vector<bool> initialised;   // by granule
  std::vector<bool> written;       // by granule, by kernels only
  std::unique_ptr<Shadow> shadow;  // of the current launch
};

/// All regions. Regions may not overlap.
class GlobalMemory {
 public:
  Region* add(std::string name, void* base, std::size_t bytes, bool initialised, bool writable = true,
              std::size_t granule = kGranule);
  void remove(Region* region);
  void clear() { regions_.clear(); }
  /// The region that contains all `bytes` from `p`; otherwise fails and names the nearest region.
  Region& find(const void* p, std::size_t bytes);
  /// Discards the access history: launches are ordered.
  void start_launch();

 private:
  std::map<uintptr_t, std::unique_ptr<Region>> regions_;
  Region* last_ = nullptr;
};
GlobalMemory& global_memory();

/// Host memory that kernels may access: n values between red zones. New memory is NaN and counts as uninitialized until
/// the host or a kernel writes it. `offset` moves the first element away from a 256-byte boundary, as a view's storage
/// offset does.
template <class T>
class Buffer {
 public:
  Buffer(std::string name, std::size_t n, std::size_t offset = 0)
      : n_(n), storage_(n * sizeof(T) + offset * sizeof(T) + 768, 0xff) {
    auto start = (reinterpret_cast<uintptr_t>(storage_.data()) + kRedZone + 255) & ~uintptr_t{255};
    data_ = reinterpret_cast<T*>(start) + offset;
    region_ = global_memory().add(std::move(name), data_, n * sizeof(T), false, true, sizeof(T) == 1 ? 1 : kGranule);
  }
  Buffer(std::string name, const std::vector<T>& values, std::size_t offset = 0)
      : Buffer(std::move(name), values.size(), offset) {
    for (std::size_t i = 0; i < n_; i++) set(i, values[i]);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { global_memory().remove(region_); }

  T* data() { return data_; }
  std::size_t size() const { return n_; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  void set(std::size_t i, T value) {
    data_[i] = value;
    for (std::size_t b = i * sizeof(T); b < (i + 1) * sizeof(T); b += region_->granule)
      region_->initialised[b / region_->granule] = true;
  }
  void fill(T value) {
    for (std::size_t i = 0; i < n_; i++) set(i, value);
  }
  /// "" or an error message: the first element that no kernel wrote, or an overwritten red zone (by a write that
  /// bypassed csrc/device).
  std::string check_written() const {
    for (std::size_t i = 0; i < n_; i++) {
      if (!region_->written[i * sizeof(T) / region_->granule])
        return region_->name + "[" + std::to_string(i) + "] was never written";
    }
    return check_red_zones();
  }
  std::string check_red_zones() const {
    const auto* first = reinterpret_cast<const unsigned char*>(data_);
    for (const unsigned char* p = storage_.data(); p != storage_.data() + storage_.size(); p++) {
      if ((p < first || p >= first + n_ * sizeof(T)) && *p != 0xff)
        return "the red zone of " + region_->name + " was overwritten";
    }
    return "";
  }

 private:
  static constexpr std::size_t kRedZone = 256;
  std::size_t n_;
  std::vector<unsigned char> storage_;
  T* data_;
  Region* region_;
};

}  // namespace ak::emu
