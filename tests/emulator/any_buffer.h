// A buffer of a dtype known at run time.
#pragma once
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/half.h"
#include "emulator/harness.h"

namespace ak::test {

/// A buffer of n elements of fp16, bf16 or fp32 that a kernel may touch. The bytes around it are red zones.
class AnyBuffer {
 public:
  AnyBuffer(const std::string& name, DType dtype, size_t n) : dtype_(dtype), n_(n) {
    if (dtype == DType::kFloat32) {
      f32_ = std::make_unique<emu::Buffer<float>>(name, n);
    } else {
      u16_ = std::make_unique<emu::Buffer<uint16_t>>(name, n);
    }
  }

  size_t size() const { return n_; }
  void* data() const { return f32_ ? static_cast<void*>(f32_->data()) : static_cast<void*>(u16_->data()); }
  void set(size_t i, double value) {
    const auto x = static_cast<float>(value);
    if (f32_) return f32_->set(i, x);
    u16_->set(i, dtype_ == DType::kFloat16 ? round_to<fp16>(x).bits : round_to<bf16>(x).bits);
  }
  float get(size_t i) const {
    if (f32_) return (*f32_)[i];
    return dtype_ == DType::kFloat16 ? to_float(fp16{(*u16_)[i]}) : to_float(bf16{(*u16_)[i]});
  }

 private:
  DType dtype_;
  size_t n_;
  std::unique_ptr<emu::Buffer<float>> f32_;
  std::unique_ptr<emu::Buffer<uint16_t>> u16_;
};

}  // namespace ak::test
