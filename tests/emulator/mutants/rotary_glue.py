"""Bugs in the host code of the rotary embedding: strides, angles, weights, checks."""

from . import Mutant

TEST = "emulator/test_rotary_glue.py"
ROTARY = "rotary/glue.cpp"

MUTANTS = [
    Mutant(
        ROTARY,
        "return t.stride(3) == 1 ? t : torch::stable::contiguous(t);",
        "return t;",
        "columns with gaps are read as if there were none",
    ),
    Mutant(ROTARY, "of.in[side].size(2)", "of.in[0].size(2)", "there are as many keys as queries"),
    Mutant(ROTARY, "cos.dim() == 3 && cos.size(0) > 1 ?", "cos.dim() == 3 ?", "one batch of angles is taken for many"),
    Mutant(ROTARY, "? cos.size(1) * cos.size(2) : 0", "? 0 : 0", "all batches have the angles of the first"),
    Mutant(ROTARY, 'call.read({"sin"}, of.sin)', 'call.read({"sin"}, of.cos)', "cosines in place of sines"),
    Mutant(
        ROTARY,
        "p.sides[1].out = k.mutable_data_ptr()",
        "p.sides[1].out = q.mutable_data_ptr()",
        "keys are written to the place of queries",
    ),
    Mutant(ROTARY, 'check_angles(op, {"sin"}, sin, cos, q);', "", "sines have any shape"),
    Mutant(ROTARY, "t.scalar_type() == first.scalar_type() &&", "", "keys are read in the type of queries"),
    Mutant(
        ROTARY,
        "AK_CHECK(q_weight.has_value() == q.has_value() && q.has_value() == k.has_value(), op,",
        "AK_CHECK(true, op,",
        "heads without weights are accepted",
    ),
    Mutant(ROTARY, ".interleaved = interleaved", ".interleaved = false", "pairs are never neighbours"),
    Mutant(
        ROTARY,
        "if (p.rows() == 0) call.zero",
        "if (false) call.zero",
        "gradients of weights without tokens are not written",
    ),
    Mutant(
        ROTARY,
        "rotary_backward_slots(p.rows(), p.width)",
        "rotary_backward_slots(1, p.width)",
        "scratch for the sums of one block",
    ),
    Mutant(
        ROTARY,
        "heads.x = head_rows(call, {kSides[side]}, *of.x[side])",
        "heads.x = head_rows(call, {kSides[side]}, of.in[side])",
        "a norm's gradient reads gradients as heads",
    ),
]
