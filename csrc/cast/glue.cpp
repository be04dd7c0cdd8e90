// cast_: from the schema to cast/call.h.
#include <vector>

#include "base/op_call.h"
#include "cast/call.h"

namespace ak {
namespace {

void run_cast(const TensorList destinations, const TensorList sources, const std::optional<int64_t> seed,
              const std::optional<Tensor> step) {
  constexpr const char* op = "cast_";
  AK_CHECK(destinations.size() == sources.size(), op, ": there are ", destinations.size(), " destinations and ",
           sources.size(), " sources");
  if (destinations.empty()) return;
  OpCall call(op, {"destinations", 0}, destinations[0]);
  std::vector<CastRef> casts;
  casts.reserve(destinations.size());
  for (size_t i = 0; i < destinations.size(); ++i) {
    const ArgName to{"destinations", static_cast<int64_t>(i)}, from{"sources", static_cast<int64_t>(i)};
    const Tensor &destination = destinations[i], &source = sources[i];
    for (const auto& [name, tensor] : {std::pair(to, &destination), std::pair(from, &source)}) {
      check_dtype(op, name, *tensor, kNarrowDtypes);
      check_dense(op, name, *tensor);
    }
    AK_CHECK(same_layout(destination, source), op, ": ", to, " has shape ", Ints{destination.sizes()}, " and strides ",
             Ints{destination.strides()}, ", ", from, " has shape ", Ints{source.sizes()}, " and strides ",
             Ints{source.strides()}, "; they must be the same");
    casts.push_back({.destination = call.write(to, destination, false),
                     .source = call.read(from, source),
                     .numel = source.numel(),
                     .to = dtype_of(destination.scalar_type()),
                     .from = dtype_of(source.scalar_type())});
  }
  const float* count = call.scalar({"step"}, step);
  call.launch(cast, casts, seed ? std::optional(static_cast<uint64_t>(*seed)) : std::nullopt, count);
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("cast_", TORCH_BOX(&ak::run_cast)); }
