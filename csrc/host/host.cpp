// amp_kernels._host: the formulas over numpy arrays, and what the build was made of. It includes no torch header and
// needs no GPU: the tests compare every formula with an independent oracle through it, without torch's or an op's own
// code in between.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "activation/formula.h"
#include "activation/name.h"
#include "base/block8.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/rounding.h"
#include "base/split_master.h"
#include "base/table_columns.h"
#include "base/tensor_list.h"
#include "gradients/clip.h"
#include "gradients/loss_scale.h"
#include "host/gemm_plan.h"
#include "host/split_master_check.h"
#include "update/ema.h"
#include "update/rules.h"

#ifndef AK_BUILD_FLAGS
#define AK_BUILD_FLAGS "unknown"
#endif

namespace py = pybind11;

namespace ak {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Codes = py::array_t<uint16_t, py::array::c_style>;
using Remainders = py::array_t<int16_t, py::array::c_style>;
using State = py::array_t<float, py::array::c_style>;  // updated in place, so never converted

std::vector<py::ssize_t> shape_of(const py::array& a) { return {a.shape(), a.shape() + a.ndim()}; }

void check_sizes(const char* function, const py::array& a, const py::array& b) {
  if (a.size() != b.size()) {
    throw std::invalid_argument(std::string(function) + ": arrays of " + std::to_string(a.size()) + " and " +
                                std::to_string(b.size()) + " elements");
  }
}

// Calls f with a value of the type that `dtype` names.
template <typename F>
auto with_half(const std::string& dtype, const F& f) {
  if (dtype == "float16") return f(fp16{});
  if (dtype == "bfloat16") return f(bf16{});
  throw std::invalid_argument("dtype is '" + dtype + "'; accepted: float16, bfloat16");
}

Activation activation_of(const std::string& name) {
  if (const auto activation = find_activation(name); activation && !is_gated(*activation)) return *activation;
  throw std::invalid_argument("activation is '" + name + "'; accepted: none, relu, gelu, gelu_tanh, silu");
}

template <typename Out, typename In, typename F>
py::array_t<Out> map(const py::array_t<In, py::array::c_style>& in, const F& f) {
  py::array_t<Out> out(shape_of(in));
  const In* from = in.data();
  Out* to = out.mutable_data();
  for (py::ssize_t i = 0; i < in.size(); ++i) to[i] = f(from[i], i);
  return out;
}

py::array_t<float> widen(const Codes& codes, const std::string& dtype) {
  return with_half(dtype, [&](auto half) {
    return map<float>(codes, [](uint16_t code, py::ssize_t) { return to_float(decltype(half){code}); });
  });
}

py::array_t<uint16_t> round_nearest(const Floats& x, const std::string& dtype) {
  return with_half(dtype, [&](auto half) {
    return map<uint16_t, float>(x, [](float v, py::ssize_t) { return round_to<decltype(half)>(v).bits; });
  });
}

py::array_t<uint16_t> round_away(const Floats& x, const std::string& dtype) {
  return with_half(dtype, [&](auto half) {
    return map<uint16_t, float>(x, [](float v, py::ssize_t) { return round_half_away<decltype(half)>(v).bits; });
  });
}

py::array_t<uint16_t> round_random(const Floats& x, const std::string& dtype, uint64_t seed, uint32_t step,
                                   uint32_t param) {
  return with_half(dtype, [&](auto half) {
    return map<uint16_t, float>(x, [&](float v, py::ssize_t i) {
      const Philox4 bits = rounding_bits(seed, step, param, static_cast<uint64_t>(i) / 8);
      return round_stochastic<decltype(half)>(v, random16(bits, static_cast<int>(i % 8), 0)).bits;
    });
  });
}

py::array_t<uint64_t> random_groups(const py::array_t<uint64_t, py::array::c_style>& groups, uint64_t first,
                                    uint32_t width, uint32_t pitch) {
  const RandomPlace place = random_place(0, first, width, pitch);
  return map<uint64_t>(groups, [&](uint64_t q, py::ssize_t) { return place.group(q); });
}

std::tuple<py::array_t<uint16_t>, py::array_t<int16_t>> split(const Floats& x, const std::string& dtype) {
  return with_half(dtype, [&](auto half) {
    using T = decltype(half);
    return std::tuple{map<uint16_t, float>(x, [](float v, py::ssize_t) { return split_master<T>(v).weight.bits; }),
                      map<int16_t, float>(x, [](float v, py::ssize_t) { return split_master<T>(v).remainder; })};
  });
}

std::tuple<py::array_t<uint16_t>, py::array_t<int8_t>> split24(const Floats& x, const std::string& dtype,
                                                               uint32_t random8) {
  return with_half(dtype, [&](auto half) {
    using T = decltype(half);
    return std::tuple{
        map<uint16_t, float>(x, [&](float v, py::ssize_t) { return split_master24<T>(v, random8).weight.bits; }),
        map<int8_t, float>(x, [&](float v, py::ssize_t) {
          return static_cast<int8_t>(split_master24<T>(v, random8).remainder >> 8);
        })};
  });
}

py::array_t<float> join(const Codes& weight, const Remainders& remainder, const std::string& dtype) {
  check_sizes("join_master", weight, remainder);
  const int16_t* r = remainder.data();
  return with_half(dtype, [&](auto half) {
    return map<float>(weight, [&](uint16_t w, py::ssize_t i) { return join_master(decltype(half){w}, r[i]); });
  });
}

template <typename F>
auto with_code8(bool is_signed, const F& f) {
  return is_signed ? f(SignedCode8{}) : f(UnsignedCode8{});
}

// Codes and exponent bytes of whole blocks.
std::tuple<py::array_t<uint8_t>, py::array_t<uint8_t>> encode_block8(
    const Floats& x, bool is_signed, const py::array_t<uint32_t, py::array::c_style>& random16) {
  check_sizes("encode_block8", x, random16);
  if (x.size() % kBlock8 != 0) throw std::invalid_argument("encode_block8: x must have whole blocks of 32 elements");
  return with_code8(is_signed, [&](auto code) {
    using Code = decltype(code);
    py::array_t<uint8_t> codes(x.size()), exponents(x.size() / kBlock8);
    for (py::ssize_t b = 0; b < exponents.size(); ++b) {
      const float* in = x.data() + b * kBlock8;
      uint32_t largest = 0;
      for (int i = 0; i < kBlock8; ++i) largest = larger(largest, bits_of(abs(in[i])));
      const uint32_t exponent = block8_exponent<Code>(largest);
      exponents.mutable_data()[b] = static_cast<uint8_t>(exponent);
      for (int i = 0; i < kBlock8; ++i) {
        codes.mutable_data()[b * kBlock8 + i] = block8_encode<Code>(in[i], exponent, random16.data()[b * kBlock8 + i]);
      }
    }
    return std::tuple{codes, exponents};
  });
}

py::array_t<float> decode_block8(const py::array_t<uint8_t, py::array::c_style>& codes,
                                 const py::array_t<uint8_t, py::array::c_style>& exponents, bool is_signed) {
  if (codes.size() != exponents.size() * kBlock8) throw std::invalid_argument("decode_block8: 32 codes an exponent");
  return with_code8(is_signed, [&](auto code) {
    return map<float>(codes, [&](uint8_t c, py::ssize_t i) {
      return block8_decode<decltype(code)>(c, exponents.data()[i / kBlock8]);
    });
  });
}

uint64_t check_split_master(const std::string& dtype) {
  return with_half(dtype, [](auto half) {
    const py::gil_scoped_release release;
    return count_broken_splits<decltype(half)>();
  });
}

std::array<uint32_t, 4> philox(const std::array<uint32_t, 4>& counter, uint64_t key) {
  const Philox4 bits = philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key);
  return {bits.word[0], bits.word[1], bits.word[2], bits.word[3]};
}

py::array_t<float> activation(const std::string& name, const Floats& x) {
  const Activation a = activation_of(name);
  return map<float, float>(x, [a](float v, py::ssize_t) { return activate(a, v); });
}

py::array_t<float> activation_gradient(const std::string& name, const Floats& grad, const Floats& x) {
  const Activation a = activation_of(name);
  check_sizes("activate_backward", grad, x);
  const float* g = grad.data();
  return map<float, float>(x, [&](float v, py::ssize_t i) { return activate_backward(a, g[i], v); });
}

py::array_t<float> swiglu_of(const Floats& gate, const Floats& up) {
  check_sizes("swiglu", gate, up);
  const float* u = up.data();
  return map<float, float>(gate, [u](float g, py::ssize_t i) { return swiglu(g, u[i]); });
}

std::tuple<py::array_t<float>, py::array_t<float>> swiglu_gradient(const Floats& grad, const Floats& gate,
                                                                   const Floats& up) {
  check_sizes("swiglu_backward", grad, gate);
  check_sizes("swiglu_backward", gate, up);
  const float *d = grad.data(), *u = up.data();
  return {map<float, float>(gate, [&](float g, py::ssize_t i) { return swiglu_backward(d[i], g, u[i]).gate; }),
          map<float, float>(gate, [&](float g, py::ssize_t i) { return swiglu_backward(d[i], g, u[i]).up; })};
}

// One step of a tensor; of LAMB, which takes it in two passes, returns the length.
template <typename Rule>
std::optional<float> take_step(State& p, std::vector<State>& moments, const Floats& grad,
                               const std::vector<double>& options, int64_t flags, float step, float inv_scale,
                               float clip) {
  const bool optional = moments.size() == Rule::kMoments;
  if ((!optional && moments.size() != Rule::kRequiredMoments) || options.size() != Rule::kOptions) {
    throw std::invalid_argument(std::string(Rule::kName) + ": " + std::to_string(moments.size()) + " moments and " +
                                std::to_string(options.size()) + " options");
  }
  check_sizes(Rule::kName, p, grad);
  float *weights = p.mutable_data(), *states[Rule::kMoments] = {};
  for (size_t k = 0; k < moments.size(); ++k) {
    check_sizes(Rule::kName, p, moments[k]);
    states[k] = moments[k].mutable_data();
  }
  auto s = Rule::scalars(Rule::options(options.data(), flags), step);
  const auto gradient = [&](py::ssize_t i) { return effective_grad(grad.data()[i], inv_scale, clip); };
  std::optional<float> rate;
  if constexpr (std::is_same_v<Rule, Lamb>) {
    double weight_sq = 0, direction_sq = 0;
    for (py::ssize_t i = 0; i < p.size(); ++i) {
      Lamb::move_moments(states[0][i], states[1][i], gradient(i), s);
      const double weight = weights[i], direction = Lamb::direction(weights[i], states[0][i], states[1][i], s);
      weight_sq += weight * weight;
      direction_sq += direction * direction;
    }
    rate = s.rate = Lamb::rate_of(weight_sq, direction_sq, s);
  }
  for (py::ssize_t i = 0; i < p.size(); ++i) {
    float of_element[Rule::kMoments] = {};
    for (size_t k = 0; k < moments.size(); ++k) of_element[k] = states[k][i];
    Rule::update(weights[i], of_element, optional, gradient(i), s);
    for (size_t k = 0; k < moments.size(); ++k) states[k][i] = of_element[k];
  }
  return rate;
}

std::optional<float> update(const std::string& op, State p, std::vector<State> moments, const Floats& grad,
                            const std::vector<double>& options, int64_t flags, float step, float inv_scale,
                            float clip) {
  std::optional<float> rate;
  bool known = false;
  for_each_rule([&]<typename Rule>(Rule) {
    if (op != Rule::kName) return;
    known = true;
    rate = take_step<Rule>(p, moments, grad, options, flags, step, inv_scale, clip);
  });
  if (!known) throw std::invalid_argument("op is '" + op + "', which is no update op");
  return rate;
}

void ema_step(State average, const Floats& weight, double decay) {
  check_sizes("ema", average, weight);
  float* to = average.mutable_data();
  for (py::ssize_t i = 0; i < average.size(); ++i) to[i] = ema(to[i], weight.data()[i], ema_take(decay));
}

std::tuple<float, int32_t, int32_t> loss_scale(float scale, int32_t growth_tracker, int32_t hysteresis_tracker,
                                               bool overflow, double growth_factor, double backoff_factor,
                                               int64_t growth_interval, double min_scale, double max_scale,
                                               int64_t hysteresis, bool consecutive) {
  const LossScale s = update_loss_scale(
      {scale, growth_tracker, hysteresis_tracker}, overflow,
      {growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis, consecutive});
  return {s.scale, s.growth_tracker, s.hysteresis_tracker};
}

struct Numel {
  int64_t numel;
};
struct NumelArgs {
  static constexpr int kTensors = 528;  // as in an update
  ListMap<kTensors> map;

  void set(int, const Numel&, size_t) {}
};

std::vector<std::vector<std::pair<int64_t, int64_t>>> block_loads(const std::vector<int64_t>& numels,
                                                                  int resident_blocks) {
  if (resident_blocks < 1) throw std::invalid_argument("resident_blocks is " + std::to_string(resident_blocks));
  std::vector<Numel> entries;
  for (const int64_t numel : numels) entries.push_back({numel});
  LaunchPlan<NumelArgs, Numel> plan(entries, resident_blocks);
  NumelArgs args;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> launches;
  while (plan.next(args)) {
    auto& blocks = launches.emplace_back(plan.blocks());
    for (int block = 0; block < plan.blocks(); block++) {
      auto& [units, elements] = blocks[block];
      ListWalk walk(static_cast<uint32_t>(block), static_cast<uint32_t>(plan.blocks()));
      for (TensorSpan span; walk.next(args.map, span);) {
        units += (span.count + kUnit - 1) / kUnit;
        elements += span.count;
      }
    }
  }
  return launches;
}

py::dict build_info() {
  py::dict info;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "gcc " __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  info["flags"] = AK_BUILD_FLAGS;
  return info;
}

}  // namespace
}  // namespace ak

PYBIND11_MODULE(_host, m) {
  using namespace pybind11::literals;
  m.doc() =
      "The formulas of csrc over numpy arrays; 16-bit floats travel as uint16 codes, dtype is 'float16' or "
      "'bfloat16'.";
  m.def("build_info", &ak::build_info);
#define AK_NAME(name) #name,
  m.def("table_columns", [] { return std::vector<std::string>{AK_TABLE_COLUMNS(AK_NAME)}; });
#undef AK_NAME
  ak::bind_gemm_plan(m);
  m.def("to_float", &ak::widen, "codes"_a.noconvert(), "dtype"_a);
  m.def("round_to", &ak::round_nearest, "x"_a, "dtype"_a);
  m.def("round_half_away", &ak::round_away, "x"_a, "dtype"_a);
  m.def("random_groups", &ak::random_groups, "groups"_a, "first"_a, "width"_a, "pitch"_a);
  m.def("round_stochastic", &ak::round_random, "x"_a, "dtype"_a, "seed"_a, "step"_a, "param"_a);
  m.def("split_master", &ak::split, "x"_a, "dtype"_a);
  m.def("split_master24", &ak::split24, "x"_a, "dtype"_a, "random8"_a);
  m.def("join_master", &ak::join, "weight"_a.noconvert(), "remainder"_a.noconvert(), "dtype"_a);
  m.def("check_split_master", &ak::check_split_master, "dtype"_a,
        "Splits and joins all 2^32 fp32 codes; how many break the promises of csrc/base/split_master.h.");
  m.def("encode_block8", &ak::encode_block8, "x"_a, "is_signed"_a, "random16"_a);
  m.def("decode_block8", &ak::decode_block8, "codes"_a.noconvert(), "exponents"_a.noconvert(), "is_signed"_a);
  m.def("philox4x32_10", &ak::philox, "counter"_a, "key"_a);
  m.def("activate", &ak::activation, "activation"_a, "x"_a);
  m.def("activate_backward", &ak::activation_gradient, "activation"_a, "grad"_a, "x"_a);
  m.def("swiglu", &ak::swiglu_of, "gate"_a, "up"_a);
  m.def("swiglu_backward", &ak::swiglu_gradient, "grad"_a, "gate"_a, "up"_a);
  m.def("block_loads", &ak::block_loads, "numels"_a, "resident_blocks"_a,
        "Units and elements of each block, for each launch of an update of tensors of these sizes.");
  m.def("inverse_scale", &ak::inverse_scale, "scale"_a);
  m.def("clip_factor", &ak::clip_factor, "sum_sq"_a, "max_norm"_a);
  m.def("update", &ak::update, "op"_a, "p"_a.noconvert(), "moments"_a.noconvert(), "grad"_a, "options"_a, "flags"_a = 0,
        "step"_a = 1.0f, "inv_scale"_a = 1.0f, "clip"_a = 1.0f);
  m.def("ema", &ak::ema_step, "average"_a.noconvert(), "weight"_a, "decay"_a);
  m.def("update_loss_scale", &ak::loss_scale, "scale"_a, "growth_tracker"_a, "hysteresis_tracker"_a, "overflow"_a,
        "growth_factor"_a = 2.0, "backoff_factor"_a = 0.5, "growth_interval"_a = 2000, "min_scale"_a = 0.0,
        "max_scale"_a = std::numeric_limits<double>::infinity(), "hysteresis"_a = 1, "consecutive"_a = false);
}
