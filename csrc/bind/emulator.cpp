// _emulator: CUDA kernels of the package on CPU memory, checked by the emulator (csrc/emulator). No torch header: the
// Python side (amp_kernels/_emulate) passes addresses, and says which bytes exist; a kernel that touches others is an
// error.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "emulator/memory.h"
#include "kernels/adamw.cu"
#include "kernels/check_and_norm.cu"

namespace py = pybind11;

namespace ak {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

/// A piece of memory the kernels may touch: what errors call it, where it is, and whether it holds values already.
using Piece = std::tuple<std::string, Address, size_t, bool>;

/// Tells the emulator of memory that Python owns, for the time of one call. Views of the same bytes become one piece.
class Visible {
 public:
  explicit Visible(std::vector<Piece> pieces) {
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return std::get<1>(a) < std::get<1>(b); });
    for (const auto& [name, address, bytes, initialised] : pieces) {
      if (bytes == 0) continue;
      if (!pieces_.empty() && address < pieces_.back().end) {
        pieces_.back().end = std::max(pieces_.back().end, address + bytes);
      } else {
        pieces_.push_back({name, address, address + bytes, initialised});
      }
    }
    for (const auto& p : pieces_) {
      regions_.push_back(emu::global_memory().add(p.name, at<void>(p.begin), p.end - p.begin, p.initialised));
    }
  }
  Visible(const Visible&) = delete;
  Visible& operator=(const Visible&) = delete;
  ~Visible() {
    for (emu::Region* region : regions_) emu::global_memory().remove(region);
  }

 private:
  struct Interval {
    std::string name;
    Address begin, end;
    bool initialised;
  };
  std::vector<Interval> pieces_;
  std::vector<emu::Region*> regions_;
};

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

void set_options(uint64_t seed, int sm_count, bool truncate_mma) {
  emu::options() = {};
  emu::options().seed = seed;
  emu::options().sm_count = sm_count;
  emu::options().truncate_mma = truncate_mma;
}

using Grad = std::tuple<Address, int64_t, int>;  // address, numel, DType

void run_check_and_norm(const std::vector<Piece>& memory, const std::vector<Grad>& grads, Address grad_scale,
                        Address sum_sq, Address found_inf) {
  const Visible visible(memory);
  std::vector<GradRef> refs;
  for (const auto& [data, numel, dtype] : grads) refs.push_back({at<void>(data), numel, static_cast<DType>(dtype)});
  emu::Buffer<uint64_t> scratch("scratch", (check_and_norm_scratch_bytes(refs) + 7) / 8);
  for (size_t i = 0; i < kNormScratchZeroed / 8; i++) scratch.set(i, 0);
  check(check_and_norm(refs, at<float>(grad_scale), scratch.data(), at<float>(sum_sq), at<float>(found_inf), nullptr));
}

struct AdamWParam {
  AdamWTensor tensor{};

  AdamWParam(Address param, int param_dtype, Address grad, int grad_dtype, int64_t numel, int group) {
    tensor.param = at<void>(param);
    tensor.param_dtype = static_cast<DType>(param_dtype);
    tensor.grad = at<void>(grad);
    tensor.grad_dtype = static_cast<DType>(grad_dtype);
    tensor.numel = numel;
    tensor.group = group;
  }
  void set_moments(Address exp_avg, int exp_avg_dtype, Address exp_avg_sq, int exp_avg_sq_dtype, Address step) {
    tensor.exp_avg = at<void>(exp_avg);
    tensor.exp_avg_dtype = static_cast<DType>(exp_avg_dtype);
    tensor.exp_avg_sq = at<void>(exp_avg_sq);
    tensor.exp_avg_sq_dtype = static_cast<DType>(exp_avg_sq_dtype);
    tensor.step = at<float>(step);
  }
  void set_master(Address master, bool split) {
    tensor.master = at<void>(master);
    tensor.master_kind = split ? Master::kSplit : Master::kFloat32;
  }
  void set_shadow(Address shadow, int dtype) {
    tensor.shadow = at<void>(shadow);
    tensor.shadow_dtype = static_cast<DType>(dtype);
  }
};

using Group =
    std::tuple<double, double, double, double, double, bool, bool, Address>;  // ..., coupled decay, maximize, lr tensor

void run_adamw(const std::vector<Piece>& memory, const std::vector<AdamWParam>& params,
               const std::vector<Group>& groups, Address grad_scale, Address found_inf, Address sum_sq,
               double max_norm) {
  const Visible visible(memory);
  std::vector<AdamWTensor> tensors;
  for (const AdamWParam& p : params) tensors.push_back(p.tensor);
  std::vector<AdamWGroup> all;
  for (const auto& [lr, beta1, beta2, eps, decay, coupled, maximize, lr_tensor] : groups) {
    all.push_back({{lr, beta1, beta2, eps, decay, coupled}, at<float>(lr_tensor), maximize});
  }
  const StepDecisions decisions{at<float>(grad_scale), at<float>(found_inf), at<float>(sum_sq),
                                static_cast<float>(max_norm)};
  emu::Buffer<uint64_t> scratch("scratch", (adamw_scratch_bytes(tensors.size()) + 7) / 8);
  check(adamw(tensors, all, decisions, scratch.data(), nullptr));
}

}  // namespace
}  // namespace ak

PYBIND11_MODULE(_emulator, m) {
  m.doc() = "CUDA kernels of amp_kernels on CPU memory, checked by the emulator. Addresses are integers; 0 is null.";
  m.def("set_options", &ak::set_options, py::arg("seed") = 0, py::arg("sm_count") = 2, py::arg("truncate_mma") = false);
  m.def("check_and_norm", &ak::run_check_and_norm);
  py::class_<ak::AdamWParam>(m, "AdamWParam")
      .def(py::init<ak::Address, int, ak::Address, int, int64_t, int>())
      .def("set_moments", &ak::AdamWParam::set_moments)
      .def("set_master", &ak::AdamWParam::set_master)
      .def("set_shadow", &ak::AdamWParam::set_shadow);
  m.def("adamw", &ak::run_adamw);
}
