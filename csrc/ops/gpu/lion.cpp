// lion_ on a GPU.
#include "math/lion.h"

#include "ops/gpu/update.h"

AK_GPU_OPS(m) { ak::register_update<ak::Lion, ak::take_step<ak::Lion>>(m); }
