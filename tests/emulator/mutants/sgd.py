"""Bugs in the SGD kernel, and in the shared step where a parameter may come without moments."""

from . import Mutant

TEST = "test_sgd"
STEP = "update/step.cuh"
ARGS = "update/arguments.cuh"

MUTANTS = [
    # ---- the rule
    Mutant(STEP, "kOptionalMoments, g, row.scalars", "true, g, row.scalars", "momentum without a buffer"),
    Mutant(STEP, "kOptionalMoments, g, row.scalars", "row.scalars.nesterov, g, row.scalars", "momentum only with nesterov"),
    Mutant(STEP, "kOptionalMoments, g, row.scalars", "false, g, row.scalars", "momentum is left out"),
    Mutant(STEP, "Rule::scalars(options, step)", "Rule::scalars(options, step + 1.0f)", "the first step takes the buffer for history"),
    Mutant(STEP, "Rule::scalars(options, step)", "Rule::scalars(options, 1.0f)", "every step is the first"),
    Mutant("update/rules/sgd.h", "kRequiredMoments = 0", "kRequiredMoments = 1", "a missing buffer is read"),
    Mutant(ARGS, "kCommonMoments = Rule::kMoments", "kCommonMoments = 0", "without extras there is no momentum either"),
    # ---- the step
    Mutant(STEP, "t.moments[Rule::kRequiredMoments] != nullptr", "t.moments[Rule::kRequiredMoments] == nullptr", "buffers are used where there are none"),
    Mutant(STEP, "m < kThere; m++) raw_moments[m] = fetch", "m < kThere && row.scalars.first; m++) raw_moments[m] = fetch", "the buffer is read in the first step only"),
    Mutant(STEP, "m < kThere; m++) store_moment", "m < kThere && i != 0; m++) store_moment", "the first elements of the buffer are not stored"),
    Mutant(STEP, "moments[m][j] = of_element[m];", "moments[m][j] = moments[m][j];", "the buffer never changes"),
    Mutant(STEP, "decode(raw_moments[m], t.moment_dtypes[m], moments[m]);", "decode(raw_moments[m], t.grad_dtype, moments[m]);",
           "the buffer is taken for the gradient's dtype"),
    Mutant(ARGS, "aligned[place] = aligned[place] && vector_aligned(p.moments[m]);", "", "unaligned buffers take the vector path"),
    Mutant(ARGS, "moment_dtypes[m][place] = p.moment_dtypes[m];", "moment_dtypes[m][place] = DType::kFloat32;", "a bf16 buffer is taken for fp32"),
    Mutant(STEP, "if (i >= args.tensors || skipped(decisions)) return;", "if (i >= args.tensors) return;",
           "a skipped step counts, and the next one takes the buffer for history"),
    Mutant(STEP, "store(args.step[i], step);", "", "the count is not stored: every step is the first"),
    Mutant(STEP, "if (args.maximize[i]) row.clip = -row.clip;", "", "maximize is ignored"),
]  # fmt: skip
