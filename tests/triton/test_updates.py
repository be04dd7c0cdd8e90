"""unscale_, update_scale_ and the update ops in Triton, compiled for GPUs that are not there: wide accesses, registers,
exact arithmetic."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import _tables, _update, lamb, unscale, update_scale
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind

from ..helpers.updates import Update
from ..ops.update_rules import BF16, F16, F32
from . import aot

ARCHS = [80, 90, 100]
WIDE_LOAD, WIDE_STORE = r"ld\.global\.cg\.v4\.b32", r"st\.global\.cs\.v4\.b32"
REGISTERS = 65_536


def check_fits(kernel, programs_per_sm):
    used = aot.usage(kernel)
    assert used.stack <= 16, f"{used}: spilled registers"  # a word or two outside of the loops
    assert used.registers * 128 * programs_per_sm <= REGISTERS, used
    assert used.shared * programs_per_sm <= 64 * 1024, used


def check_rounding(kernel):
    """Nothing is approximated, flushed to zero or fused behind the formula's back."""
    assert aot.count(r"\.ftz|\.approx|\.full", kernel) == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tensors", [1, _tables.TENSORS_PER_TABLE])
def test_unscale(arch, tensors):
    with aot.compiling_for(arch) as kernels:
        unscale.unscale_([torch.zeros(1)] * tensors, torch.zeros(()), torch.ones(()))
    (kernel,) = kernels
    # Two 16-byte accesses a thread for each of fp16, bf16 and fp32, and two for fp64.
    assert (aot.count(WIDE_LOAD, kernel), aot.count(WIDE_STORE, kernel)) == (6, 6)
    assert (aot.count(r"ld\.global\.cg\.v2\.b64", kernel), aot.count(r"st\.global\.cs\.v2\.b64", kernel)) == (2, 2)
    check_fits(kernel, unscale.PROGRAMS_PER_SM)
    check_rounding(kernel)


@pytest.mark.parametrize("arch", ARCHS)
def test_update_scale(arch):
    trackers = (torch.zeros((), dtype=torch.int32) for _ in range(2))
    counters = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    with aot.compiling_for(arch) as kernels:
        update_scale.update_scale_(
            torch.ones(()), *trackers, [torch.zeros(())], 2.0, 0.5, 2000, 0.0, 1e9, 1, False, *counters
        )
    check_fits(kernels[0], 1)
    check_rounding(kernels[0])


def compile_update(arch, op, kind, *, grad=None, moment=F32, amsgrad=False, before=False, tensors=1, skew=0, **call):
    """The kernels of a step of parameters of one kind, by the launcher."""
    shapes, optional = ((8,),) * tensors, amsgrad or before or op == "sgd_"
    update = Update(op, [kind], shapes, grad_dtype=grad, moment_dtype=moment, optional=optional)
    update.grads = [torch.zeros(8 + skew, dtype=g.dtype)[skew:] for g in update.grads]
    for tensors in (update.params, update.grads, *update.moments, update.masters, update.shadows, update.emas):
        for t in tensors:
            assert t.data_ptr() % 16 == (skew * t.element_size() if tensors is update.grads else 0)
    call = call or {"grad_scale": 2.0, "found_inf": 0.0, "sum_sq": 1.0, "max_norm": 1.0}
    with aot.compiling_for(arch) as kernels:
        update.step(REGISTRY[op].triton, **call)
    return kernels


#: kind -> 16-byte loads and stores of a thread's eight elements: one for a 16-bit operand, two for fp32
KINDS = {
    "split_bf16": (Kind(BF16, master=torch.int16), 3, 2),
    "split_fp16": (Kind(F16, master=torch.int16), 3, 2),
    "master": (Kind(BF16, master=F32), 3, 3),
    "shadow": (Kind(F32, shadow=F16), 3, 3),
    "plain_bf16": (Kind(BF16), 2, 1),
}
CASES = [
    *[(arch, "adamw_", "split_bf16", BF16, F32) for arch in ARCHS],
    (80, "adamw_", "shadow", F16, F32),
    (90, "adamw_", "split_fp16", F16, F32),
    (90, "adamw_", "master", BF16, F32),
    (100, "adamw_", "plain_bf16", BF16, BF16),
    (80, "sgd_", "split_bf16", BF16, F32),
    (90, "sgd_", "master", BF16, BF16),
    (100, "sgd_", "shadow", BF16, F32),
    (80, "lion_", "split_bf16", BF16, F32),
    (90, "lion_", "split_fp16", F16, BF16),
    (100, "lion_", "shadow", BF16, F32),
]


@pytest.mark.parametrize(("arch", "op", "name", "grad", "moment"), CASES, ids=str)
def test_updates(arch, op, name, grad, moment):
    kind, loads, stores = KINDS[name]
    prepare, update = compile_update(arch, op, kind, grad=grad, moment=moment, tensors=161)
    of_moments = (2 if op == "adamw_" else 1) * (2 if moment == F32 else 1)
    assert aot.count(WIDE_LOAD, update) == loads + of_moments
    assert aot.count(WIDE_STORE, update) == stores + of_moments
    for kernel in (prepare, update):
        check_fits(kernel, _update.PROGRAMS_PER_SM)
        check_rounding(kernel)
    assert aot.count(r"fma\.rn", prepare) == 0
    assert aot.count(r"min\.f32", prepare) == 0, "the minimum of NaN and 1 is 1: a NaN norm must give a NaN factor"
    # The formula's four (of Lion three), for eight elements, in the main loop and in the tail; sm_100 has one instruction for two.
    assert (
        aot.count(r"fma\.rn\.f32", update) + aot.count(r"fma\.rn\.f32x2", update) == (3 if op == "lion_" else 4) * 8 * 2
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_muon(arch):
    """The pass before the matrix products does not read the iterate that it writes; the one after them has no momentum."""
    for before, kind, grad, loads, stores, fmas in (
        (True, Kind(BF16), BF16, 1 + 2, 1 + 2, 4),
        (False, Kind(BF16, master=torch.int16), BF16, 1 + 2, 2, 1),
        (False, Kind(F32, shadow=BF16), BF16, 1 + 2, 3, 1),
    ):
        prepare, update = compile_update(arch, "muon_", kind, grad=grad, before=before, tensors=161)
        assert (aot.count(WIDE_LOAD, update), aot.count(WIDE_STORE, update)) == (loads, stores)
        assert aot.count(r"fma\.rn\.f32", update) + aot.count(r"fma\.rn\.f32x2", update) == fmas * 8 * 2
        for kernel in (prepare, update):
            check_fits(kernel, _update.PROGRAMS_PER_SM)
            check_rounding(kernel)


LAMB_CASES = [
    *[(arch, "split_bf16", BF16, BF16) for arch in ARCHS],
    *[(arch, "shadow", F32, F32) for arch in ARCHS],
    (80, "master", BF16, F32),
    (90, "split_fp16", F16, F32),
    (100, "plain_bf16", BF16, F32),
]


@pytest.mark.parametrize(("arch", "name", "grad", "moment"), LAMB_CASES, ids=str)
def test_lamb(arch, name, grad, moment):
    kind, loads, stores = KINDS[name]
    prepare, moments, rates, update = compile_update(arch, "lamb_", kind, grad=grad, moment=moment, tensors=161)
    of_grad, of_moments = (2 if grad == F32 else 1), 2 * (2 if moment == F32 else 1)
    of_weight = loads - 1  # KINDS counts a 16-bit gradient
    assert aot.count(WIDE_LOAD, moments) == of_grad + of_moments + of_weight
    assert aot.count(WIDE_STORE, moments) == of_moments
    assert aot.count(WIDE_LOAD, update) == of_moments + of_weight
    assert aot.count(WIDE_STORE, update) == stores
    for kernel in (prepare, rates, update):
        check_fits(kernel, _update.PROGRAMS_PER_SM)
    check_fits(moments, lamb.PROGRAMS_PER_SM)
    for kernel in (prepare, moments, rates, update):
        check_rounding(kernel)
    for kernel in (prepare, rates):
        assert aot.count(r"fma\.rn", kernel) == 0

    def fused(kernel):  # sm_100 has one instruction for two
        return aot.count(r"fma\.rn\.f32", kernel) + aot.count(r"fma\.rn\.f32x2", kernel)

    # The formula's: two of the moments and one of the decay; one of the decay and one of the step.
    assert fused(moments) == 3 * 8 * 2
    assert fused(update) == 2 * 8 * 2
    # Squares are added in double, and only by lanes: no sum is made of fp32 numbers.
    assert aot.count(r"cvt\.f64\.", moments) == 2 * 8 * 2


@pytest.mark.parametrize(("second", "count"), [(False, 3), (True, 3)])
def test_halves_of_a_lamb_step(second, count):
    """Counts, moments, sums; counts, lengths, weights. Either half is without the walk of the other."""
    update = Update("lamb_", [Kind(BF16, master=torch.int16)], ((8,),) * 3)
    squares = torch.zeros(3, 2, dtype=torch.float64)
    with aot.compiling_for(90) as kernels:
        arguments = update.arguments(found_inf=0.0)._replace(squares=squares, second=second)
        REGISTRY["lamb_half_"].triton(*arguments)
    assert len(kernels) == count
    for kernel in kernels:
        check_fits(kernel, lamb.PROGRAMS_PER_SM)
        check_rounding(kernel)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_second_pass_of_lamb_with_an_average_and_stochastic_rounding(arch):
    kernels = compile_update(arch, "lamb_", Kind(BF16, stochastic=True, ema=True), tensors=161)
    check_fits(kernels[1], lamb.PROGRAMS_PER_SM)
    check_fits(kernels[3], _update.PROGRAMS_PER_SM)
    assert (aot.count(WIDE_LOAD, kernels[3]), aot.count(WIDE_STORE, kernels[3])) == (1 + 4 + 2, 1 + 2)


def test_unaligned_gradients_make_only_the_first_pass_of_lamb_narrow():
    _, moments, _, update = compile_update(90, "lamb_", KINDS["master"][0], skew=1)
    assert aot.count(r"(ld|st)\.global\.c.\.v", moments) == 0
    assert aot.count(WIDE_LOAD, update) > 0


#: kind, whether with AMSGrad -> 16-byte loads and stores of a thread's eight elements without the two first moments
EXTRAS = {
    "split_ema": (Kind(BF16, master=torch.int16, ema=True), False, 5, 4),
    "split_amsgrad": (Kind(BF16, master=torch.int16), True, 5, 4),
    "master_all": (Kind(BF16, master=F32, ema=True), True, 7, 7),
    "stochastic": (Kind(BF16, stochastic=True), False, 2, 1),
    "stochastic_fp16_all": (Kind(F16, stochastic=True, ema=True), True, 6, 5),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EXTRAS)
def test_extras(arch, name):
    kind, amsgrad, loads, stores = EXTRAS[name]
    update = compile_update(arch, "adamw_", kind, amsgrad=amsgrad, tensors=161)[1]
    assert aot.count(WIDE_LOAD, update) == loads + 4
    assert aot.count(WIDE_STORE, update) == stores + 4
    check_fits(update, _update.PROGRAMS_PER_SM - (kind.ema and amsgrad))
    check_rounding(update)
    assert update.src.signature["seed"] == "i64"
    # The generator's twenty products, one call for a thread's eight elements, in the main loop and in the tail; the first
    # one is of the index and the same everywhere. One more divides by the width of a piece's rows.
    products = aot.count(r"mul\.hi\.u32", update)
    assert 2 * 20 <= products <= 2 * 21 if kind.stochastic else products == 0


@pytest.mark.parametrize("op", RULES)
def test_the_largest_table_and_other_arguments(op):
    """Learning rates and weight decays on the device; never skipped, scaled or clipped."""
    for kernel in compile_update(
        90, op, KINDS["master"][0], tensors=_tables.TENSORS_PER_TABLE, lrs=[0.1], weight_decays=[0.1]
    ):
        first_pass = kernel.metadata.name == "moments_kernel"
        check_fits(kernel, lamb.PROGRAMS_PER_SM if first_pass else _update.PROGRAMS_PER_SM)


def test_unaligned_gradients_are_never_read_wide():
    """A wide access to them would fault."""
    update = compile_update(90, "adamw_", KINDS["master"][0], skew=1)[1]
    assert aot.count(r"(ld|st)\.global\.c.\.v", update) == 0
    check_fits(update, _update.PROGRAMS_PER_SM)
