// Tensors of a dtype known at run time, for the tests of kernels over tensor lists.
#pragma once
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "device/tensor_list.cuh"
#include "emulator/harness.h"
#include "gradients/list.h"

namespace ak::test {

using Rng = std::mt19937_64;

inline int64_t pick(Rng& rng, const std::vector<int64_t>& from) { return from[rng() % from.size()]; }
inline double uniform(Rng& rng) { return static_cast<double>(rng() >> 11) * 0x1p-53; }
inline float symmetric(Rng& rng, float bound) { return static_cast<float>(2 * uniform(rng) - 1) * bound; }

/// A buffer of n elements that a kernel may touch, its first element `offset` elements away from the 256-byte boundary.
/// The bytes around it are red zones.
class AnyBuffer {
 public:
  AnyBuffer(const std::string& name, DType dtype, size_t n, size_t offset = 0) : dtype_(dtype), n_(n) {
    switch (dtype) {
      case DType::kFloat64:
        f64_ = std::make_unique<emu::Buffer<double>>(name, n, offset);
        break;
      case DType::kFloat32:
        f32_ = std::make_unique<emu::Buffer<float>>(name, n, offset);
        break;
      default:
        u16_ = std::make_unique<emu::Buffer<uint16_t>>(name, n, offset);
        break;
    }
  }

  DType dtype() const { return dtype_; }
  size_t size() const { return n_; }
  void* data() const {
    return f64_   ? static_cast<void*>(f64_->data())
           : f32_ ? static_cast<void*>(f32_->data())
                  : static_cast<void*>(u16_->data());
  }
  void set_bits(size_t i, uint16_t bits) { u16_->set(i, bits); }
  void set(size_t i, double x) {
    switch (dtype_) {
      case DType::kFloat64:
        return f64_->set(i, x);
      case DType::kFloat32:
        return f32_->set(i, static_cast<float>(x));
      case DType::kFloat16:
        return u16_->set(i, round_to<fp16>(static_cast<float>(x)).bits);
      case DType::kBFloat16:
        return u16_->set(i, round_to<bf16>(static_cast<float>(x)).bits);
    }
  }
  double get64(size_t i) const { return dtype_ == DType::kFloat64 ? (*f64_)[i] : static_cast<double>(get(i)); }
  float get(size_t i) const {
    switch (dtype_) {
      case DType::kFloat64:
        return static_cast<float>((*f64_)[i]);
      case DType::kFloat32:
        return (*f32_)[i];
      case DType::kFloat16:
        return to_float(fp16{(*u16_)[i]});
      default:
        return to_float(bf16{(*u16_)[i]});
    }
  }
  uint16_t bits(size_t i) const { return (*u16_)[i]; }
  std::vector<char> bytes() const {
    const char* p = static_cast<const char*>(data());
    return {p, p + n_ * static_cast<size_t>(bytes_of(dtype_))};
  }
  std::string check_red_zones() const {
    return f64_ ? f64_->check_red_zones() : f32_ ? f32_->check_red_zones() : u16_->check_red_zones();
  }

 private:
  DType dtype_;
  size_t n_;
  std::unique_ptr<emu::Buffer<double>> f64_;
  std::unique_ptr<emu::Buffer<float>> f32_;
  std::unique_ptr<emu::Buffer<uint16_t>> u16_;
};

/// Gradients with the buffers behind them.
template <class Void>
struct GradList {
  std::vector<std::unique_ptr<AnyBuffer>> buffers;
  std::vector<GradRefTo<Void>> grads;

  void add(DType dtype, size_t n, size_t offset) {
    buffers.push_back(std::make_unique<AnyBuffer>("grads[" + std::to_string(buffers.size()) + "]", dtype, n, offset));
    grads.push_back({buffers.back()->data(), static_cast<int64_t>(n), dtype});
  }
  void fill(Rng& rng) {
    for (auto& b : buffers) {
      for (size_t i = 0; i < b->size(); i++) b->set(i, symmetric(rng, 4.0f));
    }
  }
};

/// Tensors of all dtypes, sizes and alignments; `large`: some of more than one unit or run.
template <class Void>
GradList<Void> random_list(Rng& rng, int tensors, bool large) {
  static const std::vector<int64_t> kSizes = {0,  1,  1,  2,  3,  5,   7,   8,   9,    15,  16,
                                              17, 31, 63, 64, 65, 127, 255, 513, 1000, 4096};
  static const std::vector<int64_t> kLargeSizes = {kUnit - 1, kUnit, kUnit + 1, kRunUnits * kUnit + 1,
                                                   2 * kRunUnits * kUnit + 3};
  static const std::vector<int64_t> kOffsets = {0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8};
  GradList<Void> list;
  for (int i = 0; i < tensors; i++) {
    const auto dtype = static_cast<DType>(rng() % 4);
    const int64_t n = large && i % 4 == 1 ? pick(rng, kLargeSizes) : pick(rng, kSizes);
    list.add(dtype, static_cast<size_t>(n), static_cast<size_t>(pick(rng, kOffsets)));
  }
  list.fill(rng);
  return list;
}

/// As many small tensors as a shipped instance is tested with; an empty one for none.
template <class Void>
GradList<Void> list_of(int tensors) {
  Rng rng(static_cast<uint64_t>(tensors));
  GradList<Void> list;
  for (int i = 0; i < tensors; i++) list.add(DType::kBFloat16, i % 7 ? 2 : 300, static_cast<size_t>(i % 3));
  if (tensors == 0) list.add(DType::kFloat32, 0, 0);
  list.fill(rng);
  return list;
}

}  // namespace ak::test
