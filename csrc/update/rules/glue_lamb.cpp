// lamb_ on a GPU.
#include "update/rules/lamb.h"

#include "update/glue.h"

AK_OPS(m) { ak::register_update<ak::Lamb, ak::take_step<ak::Lamb>>(m); }
