// lion_ on a GPU.
#include "update/rules/lion.h"

#include "update/glue.h"

AK_OPS(m) { ak::register_update<ak::Lion, ak::take_step<ak::Lion>>(m); }
