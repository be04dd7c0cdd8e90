// sgd_ on a GPU.
#include "update/rules/sgd.h"

#include "update/glue.h"

AK_OPS(m) { ak::register_update<ak::Sgd, ak::take_step<ak::Sgd>>(m); }
