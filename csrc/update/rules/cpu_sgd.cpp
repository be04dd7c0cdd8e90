// sgd_ on the CPU: one SGD step of a list of parameters.
//
// Whether a momentum buffer holds history is known from the parameter's own step count, not from the optimizer's: a
// step that an overflow skipped leaves the count, and so the next one starts the buffer.
#include "update/rules/sgd.h"

#include "update/cpu.h"

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { ak::register_update<ak::Sgd, ak::take_step<ak::Sgd>>(m); }
