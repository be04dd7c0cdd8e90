// cross_entropy_rows_: from the schema to loss/call.h.
#include "base/op_call.h"
#include "loss/call.h"

namespace ak {
namespace {

bool has_adjacent_columns(const Tensor& t) { return t.numel() == 0 || t.size(1) == 1 || t.stride(1) == 1; }

const float* vector(OpCall& call, ArgName name, const Tensor& t, int64_t size) {
  check_dtype(call.op(), name, t, {ScalarType::Float});
  AK_CHECK(t.dim() == 1 && t.size(0) == size, call.op(), ": ", name, " must have shape (", size, "); got ",
           Ints{t.sizes()});
  return call.read<float>(name, t);
}

const float* vector(OpCall& call, ArgName name, const std::optional<Tensor>& t, int64_t size) {
  return t ? vector(call, name, *t, size) : nullptr;
}
int64_t stride_of(const std::optional<Tensor>& t) { return t ? t->stride(0) : 0; }

// [2 or 3, rows] of fp32 values, those of a statistic adjacent.
void check_statistics(const char* op, ArgName name, const std::optional<Tensor>& t, int64_t rows) {
  if (!t) return;
  check_dtype(op, name, *t, {ScalarType::Float});
  AK_CHECK(t->dim() == 2 && (t->size(0) == 2 || t->size(0) == 3) && t->size(1) == rows &&
               (rows < 2 || (t->stride(1) == 1 && t->stride(0) >= rows)),
           op, ": ", name, " must have shape (2 or 3, ", rows, ") and adjacent rows; got ", Ints{t->sizes()},
           " with strides ", Ints{t->strides()});
}

void check_target(const char* op, const Tensor& target, const Tensor& logits) {
  if (target.scalar_type() == ScalarType::Long) {
    AK_CHECK(target.dim() == 1 && target.size(0) == logits.size(0), op, ": target must have one class a row, (",
             logits.size(0), "); got ", Ints{target.sizes()});
    return;
  }
  check_dtype(op, {"target"}, target, {ScalarType::Long, ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(same_sizes(target, logits) && has_adjacent_columns(target), op,
           ": target, of probabilities, must have the shape ", Ints{logits.sizes()}, " and adjacent classes; got ",
           Ints{target.sizes()}, " with strides ", Ints{target.strides()});
}

// GPU kernels answer a class that is out of range with NaN; on the CPU it is an error.
void check_classes(const CrossEntropyRows& p, const char* op) {
  const int64_t* const classes = static_cast<const int64_t*>(p.target);
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t value = classes[row * p.target_stride];
    AK_CHECK((value >= 0 && value < p.classes) || value == p.ignore_index, op, ": target[", row, "] is ", value,
             "; accepted: 0 to ", p.classes - 1, ", and ignore_index, ", p.ignore_index);
  }
}

void run_cross_entropy_rows(const Tensor& logits, const Tensor& target, std::optional<Tensor> weight,
                            std::optional<Tensor> factor, std::optional<Tensor> loss, std::optional<Tensor> grad,
                            std::optional<Tensor> temperature, std::optional<Tensor> known,
                            std::optional<Tensor> entropy_factor, std::optional<Tensor> statistics,
                            int64_t ignore_index, double label_smoothing, double z_loss) {
  constexpr const char* op = "cross_entropy_rows_";
  OpCall call(op, {"logits"}, logits);
  check_dtype(op, {"logits"}, logits, kNarrowDtypes);
  AK_CHECK(logits.dim() == 2 && logits.size(1) > 0 && has_adjacent_columns(logits), op,
           ": logits must be [rows, classes] with adjacent classes, at least one; got shape ", Ints{logits.sizes()},
           " with strides ", Ints{logits.strides()});
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const bool soft = target.scalar_type() != ScalarType::Long, wide = logits.scalar_type() == ScalarType::Float;
  AK_CHECK(classes <= kMaxClasses, op, ": logits must have at most ", kMaxClasses, " classes; got ",
           Ints{logits.sizes()});
  check_target(op, target, logits);
  AK_CHECK(!weight || weight->is_contiguous(), op, ": weight must be contiguous");
  AK_CHECK(loss.has_value() != known.has_value(), op,
           ": loss and known must not be given together, and one of them is");
  AK_CHECK(!loss || loss->is_contiguous(), op, ": loss must be contiguous");
  AK_CHECK(factor.has_value() == grad.has_value(), op, ": factor and grad must be given together, or neither");
  if (grad) {
    if (wide) {
      check_dtype(op, {"grad"}, *grad, kNarrowDtypes);
    } else {
      check_dtype(op, {"grad"}, *grad, {logits.scalar_type()});
    }
    AK_CHECK(same_sizes(*grad, logits) && has_adjacent_columns(*grad) && (rows < 2 || grad->stride(0) >= classes), op,
             ": grad must have the shape of logits, ", Ints{logits.sizes()}, ", and adjacent classes; got ",
             Ints{grad->sizes()}, " with strides ", Ints{grad->strides()});
  }
  check_statistics(op, {"known"}, known, rows);
  check_statistics(op, {"statistics"}, statistics, rows);
  AK_CHECK(wide || (!temperature && !known && !entropy_factor && !statistics), op,
           ": temperature, known, entropy_factor and statistics are for logits in float32");
  AK_CHECK(!known || (grad && !weight && !soft && !statistics && label_smoothing == 0.0 && z_loss == 0.0), op,
           ": known is for a gradient alone, of classes without weights, label_smoothing and z_loss");
  AK_CHECK(!entropy_factor || (known && known->size(0) == 3), op, ": entropy_factor needs three known statistics");
  // A gradient in the place of the logits overwrites values.
  const bool in_place = grad && grad->const_data_ptr() == logits.const_data_ptr();
  const CrossEntropyRows p{
      .logits = call.read({"logits"}, logits),
      .target = call.read({"target"}, target),
      .weight = vector(call, {"weight"}, weight, classes),
      .factor = vector(call, {"factor"}, factor, rows),
      .loss = vector(call, {"loss"}, loss, rows) ? static_cast<float*>(call.write({"loss"}, *loss, false)) : nullptr,
      .grad = grad ? call.write({"grad"}, *grad, in_place) : nullptr,
      .rows = rows,
      .classes = static_cast<int>(classes),
      .logits_stride = logits.stride(0),
      .target_stride = target.stride(0),
      .factor_stride = stride_of(factor),
      .grad_stride = stride_of(grad),
      .ignore_index = ignore_index,
      .terms = cross_entropy_terms(label_smoothing, z_loss, classes),
      .type = dtype_of(logits.scalar_type()),
      .target_type = soft ? dtype_of(target.scalar_type()) : DType::kFloat32,
      .soft = soft,
      .grad_type = dtype_of((grad ? *grad : logits).scalar_type()),
      .temperature = vector(call, {"temperature"}, temperature, rows),
      .known = call.read<float>({"known"}, known),
      .entropy_factor = vector(call, {"entropy_factor"}, entropy_factor, rows),
      .statistics = statistics ? static_cast<float*>(call.write({"statistics"}, *statistics, false)) : nullptr,
      .temperature_stride = stride_of(temperature),
      .known_stride = stride_of(known),
      .entropy_stride = stride_of(entropy_factor),
      .statistics_stride = stride_of(statistics),
      .statistics_count = statistics ? static_cast<int>(statistics->size(0)) : 0};
  if (call.kOnCpu && !soft && !known) check_classes(p, op);
  call.launch(cross_entropy_rows, p);
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("cross_entropy_rows_", TORCH_BOX(&ak::run_cross_entropy_rows)); }
