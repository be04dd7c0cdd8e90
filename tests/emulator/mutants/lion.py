"""Bugs in the Lion kernel, and in the shared step with one moment that is always there.

The formula itself is tested against another one written down in tests/math: here kernel and test share it.
"""

from . import Mutant

TEST = "test_lion"
KERNEL = "kernels/lion.cu"
STEP = "kernels/update_step.cuh"

MUTANTS = [
    # ---- the rule
    Mutant(KERNEL, "lion(weight, moments[0], grad, scalars);", "", "nothing is updated"),
    Mutant(
        KERNEL,
        "lion(weight, moments[0], grad, scalars);",
        "float m = moments[0]; lion(weight, m, grad, scalars);",
        "the moment never changes",
    ),
    Mutant(
        KERNEL,
        "lion(weight, moments[0], grad, scalars);",
        "float w = weight; lion(w, moments[0], grad, scalars);",
        "the weight never changes",
    ),
    Mutant(
        KERNEL,
        "lion(weight, moments[0], grad, scalars);",
        "lion(moments[0], weight, grad, scalars);",
        "weight and moment are mixed up",
    ),
    Mutant(KERNEL, "lion(weight, moments[0], grad, scalars);", "lion(weight, moments[0], -grad, scalars);", "ascends"),
    Mutant(
        KERNEL,
        "return lion_scalars(options);",
        "return lion_scalars({options.lr, options.beta2, options.beta1, options.weight_decay});",
        "the betas are mixed up",
    ),
    # ---- the step
    Mutant(STEP, "args.lr[i] = group.lr;", "args.lr[i] = nullptr;", "the device's learning rate is not read"),
    Mutant(STEP, "args.options[i] = group.options;", "args.options[i] = groups[0].options;", "all are of one group"),
    Mutant(STEP, "args.maximize[i] = group.maximize;", "args.maximize[i] = false;", "maximize is ignored"),
    Mutant(
        STEP,
        "m < kThere; m++) store_moment",
        "m < kThere && row.clip > 0.0f; m++) store_moment",
        "the moment is not stored when maximizing",
    ),
    Mutant(
        STEP,
        "if (skipped(decisions)) return;",
        "",
        "a skipped step updates",
    ),
    Mutant(STEP, "rows + args.row[tensor]", "rows + tensor", "later launches read the rows of the first one"),
    Mutant(
        STEP,
        "aligned[place] = aligned[place] && is_aligned(p.moments[m]);",
        "",
        "unaligned moments take the vector path",
    ),
]
