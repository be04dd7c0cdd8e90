"""Bugs in the Lion kernel, and in the shared step with one moment that is always there.

The formula itself is tested against another one written down in tests/math: here kernel and test share it.
"""

from . import Mutant

TEST = "test_lion"
STEP = "update/step.cuh"
ARGS = "update/arguments.cuh"
UPDATE = "Rule::update(weight[j], of_element, kOptionalMoments, g, row.scalars);"

MUTANTS = [
    # ---- the rule
    Mutant(STEP, UPDATE, "", "nothing is updated"),
    Mutant(STEP, UPDATE, "float w = weight[j]; " + UPDATE.replace("weight[j]", "w"), "the weight never changes"),
    Mutant(STEP, UPDATE, "float w = weight[j]; " + UPDATE + " weight[j] = 2 * weight[j] - w;", "steps twice as long"),
    Mutant(STEP, UPDATE, UPDATE.replace(" g,", " -g,"), "ascends"),
    Mutant(STEP, "= args.options[i];", "= args.options[0];", "all have the options of the first"),
    # ---- the step
    Mutant(STEP, "args.lr[i] = group.lr;", "args.lr[i] = nullptr;", "the device's learning rate is not read"),
    Mutant(STEP, "args.options[i] = group.options;", "args.options[i] = groups[0].options;", "all are of one group"),
    Mutant(STEP, "args.maximize[i] = group.maximize;", "args.maximize[i] = false;", "maximize is ignored"),
    Mutant(STEP, "m < kThere; m++) store_moment", "m < kThere && row.clip > 0.0f; m++) store_moment", "the moment is not stored when maximizing"),
    Mutant(STEP, "if (skipped(decisions)) return;", "", "a skipped step updates"),
    Mutant(STEP, "rows + args.row[tensor]", "rows + tensor", "later launches read the rows of the first one"),
    Mutant(ARGS, "aligned[place] = aligned[place] && vector_aligned(p.moments[m]);", "", "unaligned moments take the vector path"),
]  # fmt: skip
