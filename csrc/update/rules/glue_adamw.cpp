// adamw_ on a GPU.
#include "update/rules/adamw.h"

#include "update/glue.h"

AK_OPS(m) { ak::register_update<ak::AdamW, ak::take_step<ak::AdamW>>(m); }
