// cross_entropy_rows_ on a GPU: checks, launch of loss/cross_entropy.cu.
#include "loss/cross_entropy.h"

#include "base/gpu/call.h"
#include "loss/arguments.h"

namespace ak {
namespace {

constexpr int64_t kMaxClasses = int64_t{1} << 30;

void run_cross_entropy_rows(const Tensor& logits, const Tensor& target, std::optional<Tensor> weight,
                            std::optional<Tensor> factor, Tensor loss, std::optional<Tensor> grad, int64_t ignore_index,
                            double label_smoothing, double z_loss) {
  constexpr const char* op = "cross_entropy_rows_";
  GpuCall call(op, {"logits"}, logits);
  const CrossEntropyShape shape = check_cross_entropy(op, logits, target, weight, factor, loss, grad);
  AK_CHECK(shape.classes <= kMaxClasses, op, ": logits must have at most ", kMaxClasses, " classes; got ",
           Ints{logits.sizes()});
  CrossEntropyRows p{};
  p.logits = call.read({"logits"}, logits);
  p.target = call.read({"target"}, target);
  if (weight) p.weight = static_cast<const float*>(call.read({"weight"}, *weight));
  if (factor) p.factor = static_cast<const float*>(call.read({"factor"}, *factor));
  p.loss = static_cast<float*>(call.write({"loss"}, loss, false));
  // Where the gradient takes the place of the logits, what it is about to write holds values.
  if (grad) p.grad = call.write({"grad"}, *grad, grad->const_data_ptr() == logits.const_data_ptr());
  p.rows = shape.rows;
  p.classes = static_cast<int>(shape.classes);
  p.logits_stride = shape.logits_stride;
  p.target_stride = shape.target_stride;
  p.factor_stride = factor ? factor->stride(0) : 0;
  p.grad_stride = shape.grad_stride;
  p.ignore_index = ignore_index;
  p.terms = cross_entropy_terms(label_smoothing, z_loss, shape.classes);
  p.type = dtype_of(logits.scalar_type());
  p.soft = shape.soft;
  if (shape.soft) p.target_type = dtype_of(target.scalar_type());
  call.launch(cross_entropy_rows, p);
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("cross_entropy_rows_", TORCH_BOX(&ak::run_cross_entropy_rows)); }
