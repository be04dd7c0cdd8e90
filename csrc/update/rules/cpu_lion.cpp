// lion_ on the CPU: one Lion step of a list of parameters.
#include "update/rules/lion.h"

#include "update/cpu.h"

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { ak::register_update<ak::Lion, ak::take_step<ak::Lion>>(m); }
