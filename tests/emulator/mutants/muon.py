"""Bugs in the Muon kernel, whose formula depends on whether a parameter has the momentum.

The formula itself is tested against another one written down in tests/math: here kernel and test share it, except where a
model says more.
"""

from . import Mutant

TEST = "test_muon"
ARGS = "update/arguments.cuh"
STEP, RULE = "update/step.cuh", "update/rules/muon.h"
UPDATE = "Rule::update(weight[j], of_element, kOptionalMoments, g, row.scalars);"

MUTANTS = [
    # ---- the rule
    Mutant(STEP, "kOptionalMoments, g, row.scalars", "true, g, row.scalars", "weights become iterates"),
    Mutant(STEP, "kOptionalMoments, g, row.scalars", "false, g, row.scalars", "iterates take the step of weights"),
    Mutant(STEP, UPDATE, UPDATE.replace(" g,", " -g,"), "ascends"),
    Mutant(RULE, "p = s.nesterov ? ahead : m;", "p = (s.nesterov ? ahead : m) + 0.0f * p;", "reads the old iterate"),
    Mutant(RULE, "kRequiredMoments = 0", "kRequiredMoments = 1", "a missing momentum is read"),
    # ---- the step
    Mutant(STEP, "args.options[i] = group.options;", "args.options[i] = groups[0].options;", "all are of one group"),
    Mutant(STEP, "args.lr[i] = group.lr;", "args.lr[i] = nullptr;", "the device's learning rate is not read"),
    Mutant(STEP, "t.moments[Rule::kRequiredMoments] != nullptr", "t.moments[Rule::kRequiredMoments] == nullptr", "the passes are exchanged"),
    Mutant(STEP, "if (skipped(decisions)) return;", "", "a skipped step moves the momentum"),
    Mutant(ARGS, "aligned[place] = aligned[place] && vector_aligned(p.moments[m]);", "", "unaligned momentum takes the vector path"),
]  # fmt: skip
