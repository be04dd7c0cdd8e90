#pragma once
// device/memory.cuh on the emulator: checks every access and ignores cache policies.
#include "emulator/access.h"

namespace ak {

template <int N, Cache kCache = Cache::kDefault, class T>
Vec<T, N> load_vec(const T* p) {
  emu::enter("load");
  Vec<T, N> values;
  emu::read_global(&values, p, sizeof values, Vec<T, N>::kAccessBytes);
  return values;
}

template <Cache kCache = Cache::kDefault, class T, int N>
void store_vec(T* p, const Vec<T, N>& values) {
  emu::enter("store");
  emu::write_global(p, &values, sizeof values, Vec<T, N>::kAccessBytes);
}

template <Cache kCache = Cache::kDefault, class T>
T load(const T* p) {
  return load_vec<1, kCache>(p).data[0];
}

template <Cache kCache = Cache::kDefault, class T>
void store(T* p, T value) {
  store_vec<kCache>(p, Vec<T, 1>{{value}});
}

}  // namespace ak
