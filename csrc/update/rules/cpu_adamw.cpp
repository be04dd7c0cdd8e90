// adamw_ on the CPU: one AdamW (or Adam) step of a list of parameters.
#include "update/rules/adamw.h"

#include "update/cpu.h"

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { ak::register_update<ak::AdamW, ak::take_step<ak::AdamW>>(m); }
