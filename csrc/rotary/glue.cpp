// rotary_forward and rotary_backward: from the schema to rotary/call.h. Operands whose columns have gaps are made
// contiguous first.
#include "base/op_call.h"
#include "rotary/call.h"

namespace ak {
namespace {

// Operands as kernels read them; they live as long as the call.
struct RotaryOperands {
  Tensor in[2], cos, sin;
  std::optional<Tensor> x[2], weight[2];
};

constexpr const char* kSides[2] = {"q", "k"};
constexpr const char* kGradients[2] = {"grad_q", "grad_k"};
constexpr const char* kWeights[2] = {"q_weight", "k_weight"};

Tensor with_dense_columns(const Tensor& t) { return t.stride(3) == 1 ? t : torch::stable::contiguous(t); }
std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional(torch::stable::contiguous(*t)) : std::nullopt;
}

// [batch, tokens, heads, width], as the first one except for its number of heads.
void check_heads(const char* op, ArgName name, const Tensor& t, const Tensor& first) {
  check_dtype(op, name, t, kNarrowDtypes);
  AK_CHECK(t.dim() == 4, op, ": ", name, " must have shape (batch, tokens, heads, width); got ", Ints{t.sizes()});
  AK_CHECK(t.size(3) % 2 == 0 && t.size(3) > 0 && t.size(3) <= kMaxHeadWidth, op, ": the width of ", name,
           " must be even and from 2 to ", kMaxHeadWidth, "; got ", t.size(3));
  AK_CHECK(t.scalar_type() == first.scalar_type() && t.size(0) == first.size(0) && t.size(1) == first.size(1) &&
               t.size(3) == first.size(3),
           op, ": q and k must agree in dtype, batch, tokens and width; got ", Ints{first.sizes()}, " and ",
           Ints{t.sizes()});
}

void check_angles(const char* op, ArgName name, const Tensor& t, const Tensor& cos, const Tensor& heads) {
  check_dtype(op, name, t, kNarrowDtypes);
  const int64_t d = t.dim();
  AK_CHECK(d == 2 || (d == 3 && (t.size(0) == 1 || t.size(0) == heads.size(0))), op, ": ", name,
           " must have shape (tokens, rotary) or (batch, tokens, rotary); got ", Ints{t.sizes()});
  AK_CHECK(
      t.size(d - 2) == heads.size(1) && t.size(d - 1) % 2 == 0 && t.size(d - 1) > 0 && t.size(d - 1) <= heads.size(3),
      op, ": ", name, " must have ", heads.size(1), " tokens and an even rotary width up to ", heads.size(3), "; got ",
      Ints{t.sizes()});
  AK_CHECK(same_sizes(t, cos) && t.scalar_type() == cos.scalar_type(), op,
           ": sin must have the shape and dtype of cos");
}

void check_weights(const char* op, const std::optional<Tensor>& q, const std::optional<Tensor>& k, int64_t width) {
  AK_CHECK(q.has_value() == k.has_value(), op, ": q_weight and k_weight must be given together");
  for (int side = 0; q && side < 2; ++side) {
    const Tensor& t = side == 0 ? *q : *k;
    check_dtype(op, {kWeights[side]}, t, kNarrowDtypes);
    AK_CHECK(t.dim() == 1 && t.size(0) == width && t.scalar_type() == q->scalar_type(), op, ": ", kWeights[side],
             " must have shape (", width, ") and the dtype of q_weight; got ", Ints{t.sizes()});
  }
}

// The operands that both ops have, checked.
RotaryOperands checked(const char* op, const char* const (&names)[2], const Tensor& q, const Tensor& k,
                       const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
                       const std::optional<Tensor>& k_weight) {
  check_heads(op, {names[0]}, q, q);
  check_heads(op, {names[1]}, k, q);
  check_angles(op, {"cos"}, cos, cos, q);
  check_angles(op, {"sin"}, sin, cos, q);
  check_weights(op, q_weight, k_weight, q.size(3));
  return {{with_dense_columns(q), with_dense_columns(k)},
          torch::stable::contiguous(cos),
          torch::stable::contiguous(sin),
          {},
          {dense(q_weight), dense(k_weight)}};
}

HeadRows head_rows(OpCall& call, ArgName name, const Tensor& t) {
  HeadRows rows{call.read(name, t), {}};
  for (int d = 0; d < 3; ++d) rows.strides[d] = t.size(d) == 1 ? 0 : t.stride(d);
  return rows;
}

// Everything but outputs and scratch.
Rotary problem_of(OpCall& call, const RotaryOperands& of, const char* const (&names)[2], double eps, bool interleaved) {
  const Tensor &q = of.in[0], &cos = of.cos;
  Rotary p{.cos = call.read({"cos"}, cos),
           .sin = call.read({"sin"}, of.sin),
           .slots = nullptr,
           .sums = nullptr,
           .in_type = dtype_of(q.scalar_type()),
           .x_type = dtype_of((of.x[0] ? *of.x[0] : q).scalar_type()),
           .weight_type = of.weight[0] ? dtype_of(of.weight[0]->scalar_type()) : DType::kFloat32,
           .angle_type = dtype_of(cos.scalar_type()),
           .batch = q.size(0),
           .tokens = q.size(1),
           .angle_batch = cos.dim() == 3 && cos.size(0) > 1 ? cos.size(1) * cos.size(2) : 0,
           .width = static_cast<int>(q.size(3)),
           .rotary = static_cast<int>(cos.size(cos.dim() - 1)),
           .eps = static_cast<float>(eps),
           .interleaved = interleaved};
  for (int side = 0; side < 2; ++side) {
    RotaryHeads& heads = p.sides[side];
    heads.in = head_rows(call, {names[side]}, of.in[side]);
    if (of.x[side]) heads.x = head_rows(call, {kSides[side]}, *of.x[side]);
    heads.weight = call.read({kWeights[side]}, of.weight[side]);
    heads.heads = static_cast<int>(of.in[side].size(2));
  }
  return p;
}

// The outputs, dense.
std::pair<Tensor, Tensor> outputs(OpCall& call, const RotaryOperands& of, ScalarType dtype, Rotary& p) {
  check_dtype(call.op(), {"out_dtype"}, dtype, kNarrowDtypes);
  const Tensor q = call.empty({"out of q"}, of.in[0].sizes(), dtype);
  const Tensor k = call.empty({"out of k"}, of.in[1].sizes(), dtype);
  p.sides[0].out = q.mutable_data_ptr(), p.sides[1].out = k.mutable_data_ptr();
  p.out_type = dtype_of(dtype);
  return {q, k};
}

std::tuple<Tensor, Tensor> run_rotary_forward(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                              const std::optional<Tensor> q_weight,
                                              const std::optional<Tensor> k_weight, const double eps,
                                              const bool interleaved, const ScalarType out_dtype) {
  constexpr const char* op = "rotary_forward";
  OpCall call(op, {"q"}, q);
  const RotaryOperands of = checked(op, kSides, q, k, cos, sin, q_weight, k_weight);
  Rotary p = problem_of(call, of, kSides, eps, interleaved);
  const auto [q_out, k_out] = outputs(call, of, out_dtype, p);
  call.launch(rotary_forward, p);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor, Tensor> run_rotary_backward(const Tensor& grad_q, const Tensor& grad_k, const Tensor& cos,
                                                       const Tensor& sin, const std::optional<Tensor> q,
                                                       const std::optional<Tensor> k,
                                                       const std::optional<Tensor> q_weight,
                                                       const std::optional<Tensor> k_weight, const double eps,
                                                       const bool interleaved, const ScalarType out_dtype) {
  constexpr const char* op = "rotary_backward";
  OpCall call(op, {"grad_q"}, grad_q);
  RotaryOperands of = checked(op, kGradients, grad_q, grad_k, cos, sin, q_weight, k_weight);
  AK_CHECK(q_weight.has_value() == q.has_value() && q.has_value() == k.has_value(), op,
           ": q and k must be given with the weights, and only then");
  if (q) {
    check_heads(op, {"q"}, *q, *q);
    check_heads(op, {"k"}, *k, *q);
    AK_CHECK(same_sizes(*q, grad_q) && same_sizes(*k, grad_k), op, ": q and k must have the shapes of their gradients");
    of.x[0] = with_dense_columns(*q), of.x[1] = with_dense_columns(*k);
  }
  Rotary p = problem_of(call, of, kGradients, eps, interleaved);
  const auto [q_out, k_out] = outputs(call, of, out_dtype, p);
  const Tensor sums = call.empty({"grad_weights"}, {q_weight ? 2 : 0, p.width}, ScalarType::Float);
  if (q_weight) {
    p.sums = static_cast<float*>(sums.mutable_data_ptr());
    if (p.rows() == 0) call.zero(sums, static_cast<size_t>(sums.numel()) * sizeof(float));
    const size_t slots = static_cast<size_t>(rotary_backward_slots(p.rows(), p.width));
    p.slots = static_cast<float*>(call.scratch(slots * sizeof(float)));
  }
  call.launch(rotary_backward, p);
  return {q_out, k_out, sums};
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("rotary_forward", TORCH_BOX(&ak::run_rotary_forward));
  m.impl("rotary_backward", TORCH_BOX(&ak::run_rotary_backward));
}
