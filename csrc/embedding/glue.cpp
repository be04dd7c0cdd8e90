// embedding_accumulate_ on a GPU: checks, scratch, launch of embedding/accumulate.cu.
#include "embedding/accumulate.h"

#include "base/gpu/call.h"
#include "embedding/arguments.h"

namespace ak {
namespace {

void run_embedding_accumulate(Tensor out, const Tensor& grad, const Tensor& sorted, const Tensor& order,
                              int64_t padding_idx, bool scale_by_frequency) {
  constexpr const char* op = "embedding_accumulate_";
  GpuCall call(op, {"out"}, out);
  check_embedding(op, out, grad, sorted, order);
  EmbeddingAccumulate p{};
  p.out = call.write({"out"}, out);
  p.grad = call.read({"grad"}, grad);
  p.sorted = static_cast<const int64_t*>(call.read({"sorted"}, sorted));
  p.order = static_cast<const int64_t*>(call.read({"order"}, order));
  p.out_type = dtype_of(out.scalar_type());
  p.grad_type = dtype_of(grad.scalar_type());
  p.rows = out.size(0);
  p.entries = grad.size(0);
  p.columns = grad.size(1);
  p.padding_idx = padding_idx;
  p.by_frequency = scale_by_frequency;
  const Tensor scratch = call.scratch(embedding_scratch_bytes(p.entries, p.columns));
  p.partial = static_cast<float*>(scratch.mutable_data_ptr());
  call.launch(embedding_accumulate, p);
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("embedding_accumulate_", TORCH_BOX(&ak::run_embedding_accumulate)); }
