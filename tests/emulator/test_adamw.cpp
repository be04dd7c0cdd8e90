// adamw_ on the emulator: every way to keep a weight, every dtype of gradient and moments, all alignments, sizes and
// tails, bit for bit against math/adamw.h applied element by element, under many schedules.
#include <cstring>

#include "kernels/adamw.cu"
#include "tensor_lists.h"

namespace ak::test {
namespace {

/// One parameter with all its state, and what the state should be after the step.
struct Param {
  WeightKind kind;
  std::unique_ptr<AnyBuffer> param, grad, exp_avg, exp_avg_sq, master,
      shadow;  // master: fp32, or remainders as raw 16 bits
  int group;
  std::vector<std::vector<char>> expected;

  std::vector<AnyBuffer*> state() const {
    std::vector<AnyBuffer*> all = {param.get(), exp_avg.get(), exp_avg_sq.get()};
    if (master) all.push_back(master.get());
    if (shadow) all.push_back(shadow.get());
    return all;
  }
};

constexpr DType kF16 = DType::kFloat16, kB16 = DType::kBFloat16, kF32 = DType::kFloat32;

bool is_split(WeightKind k) { return k == WeightKind::kSplitFp16 || k == WeightKind::kSplitBf16; }

float join(const AnyBuffer& weight, uint16_t remainder, size_t i) {
  const auto r = static_cast<int16_t>(remainder);
  return weight.dtype() == kF16 ? join_master(fp16{weight.bits(i)}, r) : join_master(bf16{weight.bits(i)}, r);
}
void split(float x, AnyBuffer& weight, AnyBuffer& remainder, size_t i) {
  if (weight.dtype() == kF16) {
    const auto s = split_master<fp16>(x);
    weight.set_bits(i, s.weight.bits);
    remainder.set_bits(i, static_cast<uint16_t>(s.remainder));
  } else {
    const auto s = split_master<bf16>(x);
    weight.set_bits(i, s.weight.bits);
    remainder.set_bits(i, static_cast<uint16_t>(s.remainder));
  }
}

struct Model {
  std::vector<std::unique_ptr<Param>> params;
  std::vector<AdamWGroup> groups;
  std::vector<float> group_lr;  // NaN: the host's value counts
  std::vector<std::unique_ptr<emu::Buffer<float>>> lrs;
  std::unique_ptr<emu::Buffer<float>> steps;

  std::vector<AdamWTensor> tensors() {
    std::vector<AdamWTensor> list;
    for (size_t i = 0; i < params.size(); i++) {
      const Param& p = *params[i];
      AdamWTensor t{};
      t.param = p.param->data();
      t.grad = p.grad->data();
      t.numel = static_cast<int64_t>(p.param->size());
      t.param_dtype = p.param->dtype();
      t.grad_dtype = p.grad->dtype();
      t.exp_avg = p.exp_avg->data();
      t.exp_avg_sq = p.exp_avg_sq->data();
      t.exp_avg_dtype = p.exp_avg->dtype();
      t.exp_avg_sq_dtype = p.exp_avg_sq->dtype();
      t.step = steps->data() + i;
      t.master_kind = !p.master ? Master::kNone : is_split(p.kind) ? Master::kSplit : Master::kFloat32;
      t.master = p.master ? p.master->data() : nullptr;
      t.shadow = p.shadow ? p.shadow->data() : nullptr;
      t.shadow_dtype = p.shadow ? p.shadow->dtype() : kF32;
      t.group = p.group;
      list.push_back(t);
    }
    return list;
  }
};

/// A weight of the given kind; both uses of a kFp32Copy* are drawn: a 16-bit param with an fp32 master, an fp32 param
/// with a shadow.
std::unique_ptr<Param> make_param(Rng& rng, WeightKind kind, size_t n, int group, const std::vector<int64_t>& offsets,
                                  bool shift_state) {
  auto p = std::make_unique<Param>();
  p->kind = kind;
  p->group = group;
  auto buffer = [&](const char* name, DType dtype, bool shifted) {
    return std::make_unique<AnyBuffer>(name, dtype, n, shifted ? static_cast<size_t>(pick(rng, offsets)) : 0);
  };
  const DType grads[] = {kF16, kB16, kF32};
  auto moment = [&] { return rng() % 2 ? kB16 : kF32; };
  p->grad = buffer("grad", grads[rng() % 3], true);
  p->exp_avg = buffer("exp_avg", moment(), shift_state);
  p->exp_avg_sq = buffer("exp_avg_sq", moment(), shift_state);
  const DType copy = kind == WeightKind::kFp32CopyFp16 ? kF16 : kB16;
  switch (kind) {
    case WeightKind::kFp32:
      p->param = buffer("param", kF32, true);
      break;
    case WeightKind::kFp32CopyFp16:
    case WeightKind::kFp32CopyBf16:
      if (rng() % 2) {
        p->param = buffer("param", kF32, true);
        p->shadow = buffer("shadow", copy, shift_state);
      } else {
        p->param = buffer("param", copy, true);
        p->master = buffer("master", kF32, shift_state);
      }
      break;
    case WeightKind::kFp16:
    case WeightKind::kBf16:
      p->param = buffer("param", kind == WeightKind::kFp16 ? kF16 : kB16, true);
      break;
    case WeightKind::kSplitFp16:
    case WeightKind::kSplitBf16:
      p->param = buffer("param", kind == WeightKind::kSplitFp16 ? kF16 : kB16, true);
      p->master = buffer("remainder", kF16, shift_state);
      break;
  }
  for (size_t i = 0; i < n; i++) {
    const float weight = symmetric(rng, 2.0f);
    if (is_split(kind)) {
      split(weight, *p->param, *p->master, i);
    } else {
      // What is only written stays NaN, so that a kernel that reads it is caught.
      if (!p->master) p->param->set(i, weight);
      if (p->master) p->master->set(i, weight);
    }
    p->grad->set(i, symmetric(rng, 64.0f));
    p->exp_avg->set(i, symmetric(rng, 0.5f));
    p->exp_avg_sq->set(i, uniform(rng));
  }
  return p;
}

Model make_model(Rng& rng, const std::vector<std::pair<WeightKind, int64_t>>& shapes,
                 const std::vector<int64_t>& offsets) {
  Model m;
  for (int g = 0; g < 3; g++) {
    AdamWGroup group{};
    group.options = {0.01 * (g + 1), 0.9 - 0.1 * g, 0.999 - 0.01 * g, 1e-8, g == 1 ? 0.1 : 0.0, g == 2};
    if (g == 2) group.options.weight_decay = 0.05;
    group.maximize = g == 1;
    m.group_lr.push_back(g == 2 ? 0.37f : NAN);
    m.lrs.push_back(std::make_unique<emu::Buffer<float>>("lr", 1));
    if (g == 2) {
      m.lrs.back()->set(0, 0.37f);
      group.lr = m.lrs.back()->data();
    }
    m.groups.push_back(group);
  }
  for (auto [kind, n] : shapes) {
    m.params.push_back(make_param(rng, kind, static_cast<size_t>(n), static_cast<int>(rng() % m.groups.size()), offsets,
                                  rng() % 4 == 0));
  }
  m.steps = std::make_unique<emu::Buffer<float>>("steps", m.params.size());
  for (size_t i = 0; i < m.params.size(); i++) m.steps->set(i, static_cast<float>(rng() % 5 ? rng() % 3 : 1000));
  return m;
}

/// The scalars on the device, each present or not.
struct Decisions {
  emu::Buffer<float> grad_scale{"grad_scale", 1}, found_inf{"found_inf", 1}, sum_sq{"sum_sq", 1};
  StepDecisions on_device{};
  float inv_scale = 1, clip = 1;
  bool skip = false;

  void scale_by(float scale) {
    grad_scale.set(0, scale);
    on_device.grad_scale = grad_scale.data();
    inv_scale = inverse_scale(scale);
  }
  void clip_to(float max_norm, float norm_sq) {
    sum_sq.set(0, norm_sq);
    on_device.sum_sq = sum_sq.data();
    on_device.max_norm = max_norm;
    clip = clip_factor(norm_sq, max_norm);
  }
  void found(float value) {
    found_inf.set(0, value);
    on_device.found_inf = found_inf.data();
    skip = value > 0;
  }
};

/// The state after one step, element by element, in `expected`; the buffers themselves are put back.
std::vector<float> expect(Model& m, const Decisions& d) {
  std::vector<float> steps;
  for (size_t k = 0; k < m.params.size(); k++) {
    Param& p = *m.params[k];
    std::vector<std::vector<char>> before;
    for (AnyBuffer* b : p.state()) before.push_back(b->bytes());
    const AdamWGroup& group = m.groups[static_cast<size_t>(p.group)];
    const float step = (*m.steps)[k] + (d.skip ? 0.0f : 1.0f);
    steps.push_back(step);
    AdamWOptions options = group.options;
    if (!is_nan(m.group_lr[static_cast<size_t>(p.group)])) options.lr = m.group_lr[static_cast<size_t>(p.group)];
    const AdamWScalars scalars = adamw_scalars(options, step);
    for (size_t i = 0; i < p.param->size() && !d.skip; i++) {
      float w = is_split(p.kind) ? join(*p.param, p.master->bits(i), i) : p.master ? p.master->get(i) : p.param->get(i);
      float mean = p.exp_avg->get(i), square = p.exp_avg_sq->get(i);
      const float grad = effective_grad(p.grad->get(i), d.inv_scale, d.clip);
      adamw(w, mean, square, group.maximize ? -grad : grad, scalars);
      p.exp_avg->set(i, mean);
      p.exp_avg_sq->set(i, square);
      if (is_split(p.kind)) {
        split(w, *p.param, *p.master, i);
      } else {
        p.param->set(i, w);
        if (p.master) p.master->set(i, w);
        if (p.shadow) p.shadow->set(i, w);
      }
    }
    p.expected.clear();
    size_t j = 0;
    for (AnyBuffer* b : p.state()) {
      p.expected.push_back(b->bytes());
      std::memcpy(b->data(), before[j].data(), before[j].size());
      j++;
    }
  }
  return steps;
}

/// Equal bits; two NaNs count as equal, since which of two NaNs an addition keeps is nobody's contract.
bool same_elements(const AnyBuffer& got, const std::vector<char>& expected, bool is_float, size_t* at) {
  const std::vector<char> bytes = got.bytes();
  const size_t size = static_cast<size_t>(bytes_of(got.dtype()));
  for (size_t i = 0; i < got.size(); i++) {
    if (std::memcmp(bytes.data() + i * size, expected.data() + i * size, size) == 0) continue;
    *at = i;
    float other;
    if (got.dtype() == kF32) {
      std::memcpy(&other, expected.data() + i * size, size);
    } else {
      uint16_t bits;
      std::memcpy(&bits, expected.data() + i * size, size);
      other = got.dtype() == kF16 ? to_float(fp16{bits}) : to_float(bf16{bits});
    }
    if (!is_float || !is_nan(other) || !is_nan(got.get(i))) return false;
  }
  return true;
}

/// Runs a step; "" or what is wrong.
template <class Run>
std::string compare(Model& m, const Decisions& d, const Run& run) {
  const std::vector<float> steps = expect(m, d);
  std::vector<std::vector<char>> grads;
  for (auto& p : m.params) grads.push_back(p->grad->bytes());
  emu::Buffer<AdamWRow> rows("rows", m.params.size());
  const std::vector<AdamWTensor> tensors = m.tensors();
  const Status status = run(tensors, rows.data());
  if (!status.ok()) return status.message;
  for (size_t k = 0; k < m.params.size(); k++) {
    const Param& p = *m.params[k];
    const std::string param = "params[" + std::to_string(k) + "]: ";
    if ((*m.steps)[k] != steps[k]) return param + "step is " + std::to_string((*m.steps)[k]);
    size_t j = 0, at = 0;
    for (AnyBuffer* b : p.state()) {
      const bool remainder = is_split(p.kind) && b == p.master.get();
      if (!same_elements(*b, p.expected[j], !remainder, &at)) {
        return param + "element " + std::to_string(at) + " of " + std::to_string(b->size()) + " of state " +
               std::to_string(j);
      }
      if (!b->check_red_zones().empty()) return param + b->check_red_zones();
      j++;
    }
    if (p.grad->bytes() != grads[k]) return param + "the gradient was changed";
  }
  return "";
}

const std::vector<int64_t> kSizes = {0, 1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 65, 127, 250, 511, 513, 1024, 3000};
const std::vector<int64_t> kAnyOffset = {0, 0, 1, 2, 3, 4, 5, 7, 8};
const std::vector<int64_t> kAligned = {0, 8, 16};

WeightKind kind_number(uint64_t i) { return static_cast<WeightKind>(i % 7); }

template <int kThreads, int kPlaces, int kRows>
auto small_instance(const Model& m, const Decisions& d, int blocks) {
  return [&m, &d, blocks](std::span<const AdamWTensor> tensors, AdamWRow* rows) {
    const Status prepared =
        detail::adamw_prepare_on<32, PrepareArgs<kRows>, kRows>(tensors, m.groups, d.on_device, rows, nullptr);
    if (!prepared.ok()) return prepared;
    return detail::adamw_update_on<kThreads, AdamWArgs<kPlaces>>(blocks, tensors, d.on_device, rows, nullptr);
  };
}

/// Two steps of models of random parameters, decisions and launch shapes.
void random_models(Cases& cases) {
  for (uint64_t number = 0; number < 60; number++) {
    cases.check("random model " + std::to_string(number), [number] {
      Rng rng(number);
      std::vector<std::pair<WeightKind, int64_t>> shapes;
      const uint64_t count = 1 + rng() % 9;
      for (uint64_t i = 0; i < count; i++) {
        const int64_t n = number % 8 == 0 && i == 1 ? kChunk + pick(rng, {-1, 0, 1, 9}) : pick(rng, kSizes);
        shapes.push_back({kind_number(rng()), n});
      }
      Model m = make_model(rng, shapes, number % 2 ? kAnyOffset : kAligned);
      Decisions d;
      if (rng() % 2) d.scale_by(rng() % 2 ? 1024.0f : 3.0f);
      if (rng() % 2) d.clip_to(1.0f, rng() % 2 ? 9.0f : 0.25f);
      if (rng() % 2) d.found(rng() % 3 == 0 ? 1.0f + static_cast<float>(rng() % 2) : 0.0f);
      const int blocks = 1 + static_cast<int>(rng() % 4);
      const std::string first = compare(m, d, small_instance<64, 3, 4>(m, d, blocks));
      return first.empty() ? compare(m, d, small_instance<32, 16, 64>(m, d, blocks)) : first;
    });
  }
}

/// Each kind of weight alone, with elements that are NaN, infinite or overflow the 16-bit type.
void extreme_values(Cases& cases) {
  for (uint64_t k = 0; k < 7; k++) {
    cases.check("extreme values of kind " + std::to_string(k), [k] {
      Rng rng(100 + k);
      Model m = make_model(rng, {{kind_number(k), 40}, {kind_number(k), 33}}, kAligned);
      for (auto& p : m.params) {
        p->grad->set(0, INFINITY);
        p->grad->set(5, NAN);
        p->exp_avg->set(9, 3e38f);
        p->exp_avg->set(17, -1e30f);
        p->exp_avg_sq->set(17, 0);
        p->exp_avg_sq->set(32, 0);
      }
      const Decisions d;
      return compare(m, d, small_instance<32, 4, 4>(m, d, 2));
    });
  }
}

/// As the package calls it, up to more tensors than fit one launch of either kernel.
void shipped_instance(Cases& cases) {
  for (int64_t count : {int64_t{1}, int64_t{5}, int64_t{kAdamWTensors + 3}}) {
    cases.check("shipped instance, " + std::to_string(count) + " tensors", [count]() -> std::string {
      Rng rng(static_cast<uint64_t>(count));
      std::vector<std::pair<WeightKind, int64_t>> shapes;
      for (int64_t i = 0; i < count; i++) shapes.push_back({kind_number(rng()), count > 100 ? 1 + i % 11 : 2100 + i});
      Model m = make_model(rng, shapes, kAligned);
      Decisions d;
      d.scale_by(64.0f);
      d.clip_to(1.0f, 100.0f);
      d.found(0.0f);
      if (adamw_scratch_bytes(m.params.size()) != m.params.size() * sizeof(AdamWRow))
        return "scratch is not one row a parameter";
      return compare(m, d, [&](std::span<const AdamWTensor> tensors, AdamWRow* rows) {
        return adamw(tensors, m.groups, d.on_device, rows, nullptr);
      });
    });
  }
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("adamw", ak::test::Seeds(argc, argv, 4));
  ak::test::random_models(cases);
  ak::test::extreme_values(cases);
  ak::test::shipped_instance(cases);
  return cases.finish();
}
