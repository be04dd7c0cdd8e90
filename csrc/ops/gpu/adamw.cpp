// adamw_ on a GPU.
#include "math/adamw.h"

#include "ops/gpu/update.h"

AK_GPU_OPS(m) { ak::register_update<ak::AdamW, ak::take_step<ak::AdamW>>(m); }
