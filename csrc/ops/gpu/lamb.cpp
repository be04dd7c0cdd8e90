// lamb_ on a GPU.
#include "math/lamb.h"

#include "ops/gpu/update.h"

AK_GPU_OPS(m) { ak::register_update<ak::Lamb, ak::take_step<ak::Lamb>>(m); }
