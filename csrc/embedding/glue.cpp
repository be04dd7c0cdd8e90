// embedding_accumulate_: from the schema to embedding/call.h.
#include "base/op_call.h"
#include "embedding/call.h"

namespace ak {
namespace {

// GPU kernels skip what is out of range; on the CPU it is an error.
void check_values(const EmbeddingAccumulate& p, const char* op) {
  for (int64_t i = 0; i < p.entries; ++i) {
    AK_CHECK(p.sorted[i] >= 0 && p.sorted[i] < p.rows, op, ": sorted[", i, "] is ", p.sorted[i], "; accepted: 0 to ",
             p.rows - 1);
    AK_CHECK(i == 0 || p.sorted[i - 1] <= p.sorted[i], op, ": sorted[", i, "] is ", p.sorted[i], " after ",
             p.sorted[i - 1], "; accepted: ascending numbers");
    AK_CHECK(p.order[i] >= 0 && p.order[i] < p.entries, op, ": order[", i, "] is ", p.order[i], "; accepted: 0 to ",
             p.entries - 1);
  }
}

void run_embedding_accumulate(Tensor out, const Tensor& grad, const Tensor& sorted, const Tensor& order,
                              int64_t padding_idx, bool scale_by_frequency, bool in_order) {
  constexpr const char* op = "embedding_accumulate_";
  OpCall call(op, {"out"}, out);
  for (const auto& [name, t] : {std::pair{"out", &std::as_const(out)}, {"grad", &grad}}) {
    check_dtype(op, {name}, *t, kNarrowDtypes);
    AK_CHECK(t->dim() == 2 && t->is_contiguous(), op, ": ", name, " must be a contiguous matrix; got shape ",
             Ints{t->sizes()}, " and strides ", Ints{t->strides()});
  }
  AK_CHECK(out.size(1) == grad.size(1), op, ": out has ", out.size(1), " columns and grad ", grad.size(1));
  for (const auto& [name, t] : {std::pair{"sorted", &sorted}, {"order", &order}}) {
    check_dtype(op, {name}, *t, {ScalarType::Long});
    AK_CHECK(t->dim() == 1 && t->is_contiguous() && t->size(0) == grad.size(0), op, ": ", name,
             " must be contiguous with shape (", grad.size(0), "); got ", Ints{t->sizes()});
  }
  AK_CHECK(!in_order || (out.scalar_type() == ScalarType::Float && !scale_by_frequency), op,
           ": in_order takes a float32 out and no scale_by_frequency");
  EmbeddingAccumulate p{.out = call.write({"out"}, out),
                        .grad = call.read({"grad"}, grad),
                        .sorted = call.read<int64_t>({"sorted"}, sorted),
                        .order = call.read<int64_t>({"order"}, order),
                        .partial = nullptr,
                        .out_type = dtype_of(out.scalar_type()),
                        .grad_type = dtype_of(grad.scalar_type()),
                        .rows = out.size(0),
                        .entries = grad.size(0),
                        .columns = grad.size(1),
                        .padding_idx = padding_idx,
                        .by_frequency = scale_by_frequency,
                        .in_order = in_order};
  if (call.kOnCpu) {
    check_values(p, op);
  } else if (!in_order) {
    p.partial = static_cast<float*>(call.scratch(embedding_scratch_bytes(p.entries, p.columns)));
  }
  call.launch(embedding_accumulate, p);
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("embedding_accumulate_", TORCH_BOX(&ak::run_embedding_accumulate)); }
