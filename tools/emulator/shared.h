#pragma once
// device/shared.cuh on the emulator: SharedPtr checks every access.
#include "emulator/access.h"

namespace ak {

/// Reference to an element, whose reads and writes are checked.
template <class T>
class SharedRef {
 public:
  explicit SharedRef(uint32_t address) : address_(address) {}
  SharedRef(const SharedRef&) = default;

  operator T() const {
    emu::enter("shared load");
    T value;
    emu::read_shared(&value, address_, sizeof value);
    return value;
  }
  SharedRef& operator=(const T& value) {
    emu::enter("shared store");
    emu::write_shared(address_, &value, sizeof value);
    return *this;
  }
  SharedRef& operator=(const SharedRef& other) { return *this = static_cast<T>(other); }
  SharedRef& operator+=(const T& value) { return *this = static_cast<T>(*this) + value; }

 private:
  uint32_t address_;
};

template <class T>
class SharedPtr {
 public:
  explicit SharedPtr(uint32_t address) : address_(address) {}
  SharedRef<T> operator[](int i) const { return SharedRef<T>(address_ + static_cast<uint32_t>(i) * sizeof(T)); }
  SharedRef<T> operator*() const { return (*this)[0]; }
  SharedPtr operator+(int i) const { return SharedPtr(address_ + static_cast<uint32_t>(i) * sizeof(T)); }
  uint32_t address() const { return address_; }

 private:
  uint32_t address_;
};

namespace emu {
inline uint32_t window() { return static_cast<uint32_t>(current->cta->rank) << 24 | kSharedBase; }
}  // namespace emu

template <class T, int N, class Tag = void>
SharedPtr<T> shared() {
  static const char key = 0;
  return SharedPtr<T>(emu::window() + emu::machine->static_shared(&key, sizeof(T) * N));
}

inline uint32_t dynamic_shared() { return emu::window() + emu::machine->dynamic_offset; }

template <class T>
SharedPtr<T> shared_at(uint32_t address) {
  return SharedPtr<T>(address);
}

inline Vec<uint32_t, 4> load_shared_16(uint32_t address) {
  emu::enter("load_shared_16");
  Vec<uint32_t, 4> v;
  emu::read_shared(&v, address, 16);
  return v;
}
inline Vec<float, 2> load_shared_2(uint32_t address) {
  emu::enter("load_shared_2");
  Vec<float, 2> v;
  emu::read_shared(&v, address, 8);
  return v;
}
inline void store_shared_16(uint32_t address, const Vec<uint32_t, 4>& v) {
  emu::enter("store_shared_16");
  emu::write_shared(address, &v, 16);
}
inline void store_shared_4(uint32_t address, uint32_t x) {
  emu::enter("store_shared_4");
  emu::write_shared(address, &x, 4);
}
inline void store_shared_2(uint32_t address, float x, float y) {
  emu::enter("store_shared_2");
  const float v[2] = {x, y};
  emu::write_shared(address, v, 8);
}

}  // namespace ak
