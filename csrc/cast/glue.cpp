// cast_(destinations, sources, seed, step) on a GPU: checks, launch of cast/cast.cu.
#include "cast/cast.h"

#include "base/gpu/call.h"
#include "cast/arguments.h"

namespace ak {
namespace {

constexpr const char* kOp = "cast_";

void run_cast(const TensorList destinations, const TensorList sources, const std::optional<int64_t> seed,
              const std::optional<Tensor> step) {
  check_casts(kOp, destinations, sources);
  if (destinations.empty()) return;
  GpuCall call(kOp, {"destinations", 0}, destinations[0]);
  std::vector<CastRef> casts;
  casts.reserve(destinations.size());
  for (size_t i = 0; i < destinations.size(); ++i) {
    const ArgName to{"destinations", static_cast<int64_t>(i)}, from{"sources", static_cast<int64_t>(i)};
    casts.push_back({call.write(to, destinations[i], false), call.read(from, sources[i]), sources[i].numel(),
                     dtype_of(destinations[i].scalar_type()), dtype_of(sources[i].scalar_type())});
  }
  const float* count = call.scalar({"step"}, step);
  call.launch(cast, casts, seed ? std::optional<uint64_t>(static_cast<uint64_t>(*seed)) : std::nullopt, count);
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("cast_", TORCH_BOX(&ak::run_cast)); }
