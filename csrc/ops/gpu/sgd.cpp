// sgd_ on a GPU.
#include "math/sgd.h"

#include "ops/gpu/update.h"

AK_GPU_OPS(m) { ak::register_update<ak::Sgd, ak::take_step<ak::Sgd>>(m); }
