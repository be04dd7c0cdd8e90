"""The public functions over tensor lists: what they refuse, with which words, and that nothing is changed before."""

import contextlib

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.unscale import unscale_
from amp_kernels._raw.update_scale import update_scale_
from amp_kernels._updates.op import RULES

ONE = torch.ones(())
META = torch.ones(2, device="meta")

LISTS = [
    ([], ValueError, "grads is an empty list"),
    ([torch.ones(2), 3.0], TypeError, r"grads\[1\] has type float"),
    ([torch.ones(2), torch.ones(2, dtype=torch.int32)], TypeError, r"grads\[1\] is torch.int32; accepted: float16"),
    ([torch.ones(2, dtype=torch.complex64)], TypeError, r"grads\[0\] is torch.complex64"),
    ([torch.ones(2).to_sparse()], ValueError, r"grads\[0\] has layout torch.sparse_coo"),
    ([torch.ones(2), META], ValueError, r"grads\[1\] is on meta and grads\[0\] on cpu"),
    (
        [torch.ones(4, 4)[:, ::2]],
        ValueError,
        r"grads\[0\] is float32\[4, 2\] with strides \(4, 2\) on cpu, which leaves gaps",
    ),
    ([torch.ones(3).expand(2, 3)], ValueError, ".*which leaves gaps in memory or overlaps itself"),
]


@pytest.mark.parametrize(("grads", "error", "text"), LISTS)
def test_lists(grads, error, text):
    with pytest.raises(error, match=f"check_and_norm: {text}"):
        check_and_norm(grads)
    found = torch.zeros(())
    with pytest.raises(error, match=f"unscale_: {text}"):
        unscale_(grads, found, ONE)
    assert found.item() == 0


def test_tensors_that_share_memory_are_not_unscaled_twice():
    """In one launch two blocks would do it at once. Touching is not sharing, and empty tensors share nothing."""
    memory, other = torch.ones(20), torch.ones(3)
    found = torch.zeros(())
    for grads in ([memory, other, memory], [memory[:10], other, memory[9:]], [memory[2:5], other, memory]):
        with pytest.raises(ValueError, match=r"unscale_: grads\[0\] .* and grads\[2\] .* share memory"):
            unscale_(grads, found, torch.tensor(0.5))
        assert torch.equal(memory, torch.ones(20))
    unscale_([memory[10:], memory[:0], memory[:10], memory[:0], torch.ones(0)], found, torch.tensor(0.5))
    assert torch.equal(memory, torch.full((20,), 0.5))
    assert check_and_norm([memory, memory])[0].item() == 10.0  # only reads


@pytest.mark.parametrize("norm_type", [1.0, 0.0, 3, -float("inf"), float("nan")])
def test_other_norms_are_refused(norm_type):
    with pytest.raises(ValueError, match=f"check_and_norm: norm_type is {norm_type}; accepted: 2.0 and math.inf"):
        check_and_norm([torch.ones(2)], norm_type=norm_type)
    with pytest.raises((RuntimeError, ValueError), match="norm_type"):
        torch.ops.amp_kernels.check_and_norm([torch.ones(2)], None, norm_type=norm_type)


def test_a_tensor_is_no_list_and_a_generator_is():
    with pytest.raises(TypeError, match=r"check_and_norm: grads has type torch.Tensor; accepted: a list of tensors"):
        check_and_norm(torch.ones(3))
    with pytest.raises(TypeError, match=r"unscale_: grads has type torch.Tensor; accepted: a list of tensors"):
        unscale_(torch.ones(3), torch.zeros(()), ONE)
    assert check_and_norm(torch.full((2,), 2.0) for _ in range(2))[0].item() == 16.0


@pytest.mark.parametrize(
    ("scalar", "error", "text"),
    [
        (2.0, TypeError, "has type float; accepted: a tensor of one element"),
        (torch.ones(2), TypeError, r"is float32\[2\].*accepted: one element of float32"),
        (torch.ones((), dtype=torch.float64), TypeError, "accepted: one element of float32"),
        (torch.ones((), device="meta"), ValueError, "is on meta and the tensors on cpu"),
    ],
)
def test_scalars(scalar, error, text):
    grads = [torch.ones(2)]
    for call in (
        lambda: check_and_norm(grads, scalar),
        lambda: unscale_(grads, scalar, ONE),
        lambda: unscale_(grads, torch.zeros(()), scalar),
        lambda: update_scale_(ONE.clone(), torch.tensor(0).int(), torch.tensor(1).int(), [scalar]),
        lambda: RULES["adamw_"](**changed("adamw_", grad_scale=scalar)),
        lambda: RULES["sgd_"](**changed("sgd_", found_inf=scalar)),
        lambda: RULES["lamb_"](**changed("lamb_", sum_sq=scalar)),
    ):
        with pytest.raises(error, match=text):
            call()
    assert torch.equal(grads[0], torch.ones(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"growth_factor": 0.5}, "growth_factor is 0.5"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0"),
        ({"backoff_factor": 1.5}, "backoff_factor is 1.5"),
        ({"growth_interval": -1}, "growth_interval is -1"),
        ({"min_scale": -1.0}, "min_scale is -1.0"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "max_scale is 1.0; accepted: a number from 2.0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        *(
            ({key: float("nan")}, f"{key} is nan")
            for key in ("growth_factor", "backoff_factor", "min_scale", "max_scale")
        ),
    ],
)
def test_update_scale_numbers(options, text):
    scale, tracker, left = torch.tensor(4.0), torch.tensor(0).int(), torch.tensor(1).int()
    with pytest.raises(ValueError, match=f"update_scale_: {text}"):
        update_scale_(scale, tracker, left, [torch.ones(())], **options)
    assert (scale.item(), tracker.item(), left.item()) == (4.0, 0, 1)


def test_update_scale_tensors():
    scale, tracker, left = torch.tensor(4.0), torch.tensor(0).int(), torch.tensor(1).int()
    with pytest.raises(ValueError, match="found_infs is an empty list"):
        update_scale_(scale, tracker, left, [])
    with pytest.raises(TypeError, match="growth_tracker is int64"):
        update_scale_(scale, tracker.long(), left, [ONE])
    with pytest.raises(TypeError, match="hysteresis_tracker is float32"):
        update_scale_(scale, tracker, scale, [ONE])


NAN = float("nan")


def changed(rule, index=0, **changes):
    """The arguments of a sample with some replaced; a callable makes the new value from the old one. An option by its name."""
    op, options = RULES[rule].op, list(RULES[rule].declared.options)
    call = dict(zip([a.name for a in op.schema.arguments], list(op.samples("cpu"))[index][0], strict=True))
    for key, value in changes.items():
        if key in options:
            call["options"][options.index(key)] = value
        else:
            call[key] = value(call[key]) if callable(value) else value
    return call


def longer(tensors):
    return [*tensors, tensors[0]]


UPDATES = [
    (
        {"params": lambda p: [t.double() for t in p]},
        TypeError,
        "params.0. is torch.float64; accepted: float16, bfloat16, float32",
    ),
    ({"grads": lambda g: [t.double() for t in g]}, TypeError, "grads.0. is torch.float64"),
    ({"grads": lambda g: g[:-1]}, ValueError, "3 params and 2 grads"),
    ({"grads": lambda g: [g[0].contiguous(), *g[1:]]}, ValueError, "shape, strides and device must be the same"),
    ({"grads": lambda g: [g[0].t(), *g[1:]]}, ValueError, "shape, strides and device must be the same"),
    ({"steps": longer}, ValueError, "entries and steps 2"),
    ({"steps": lambda s: [s[0].double()]}, TypeError, "steps.0. is torch.float64"),
    ({"masters": lambda m: [torch.zeros(512)]}, TypeError, "block 0 has masters; accepted: float16, bfloat16"),
    ({"masters": lambda m: [torch.zeros(512, dtype=torch.int32)]}, TypeError, "masters.0. is torch.int32"),
    ({"shadows": lambda s: [torch.zeros(512)]}, TypeError, "shadows.0. is torch.float32"),
    ({"shadows": lambda s: [torch.zeros(16, dtype=torch.float16)]}, ValueError, "shadows.0. has 16 elements"),
    ({"layout": lambda x: x[:2]}, ValueError, r"layout is int64\[2, 5\].*accepted: int64\[3, 5\]"),
    ({"layout": lambda x: x.int()}, ValueError, "layout is int32"),
    ({"layout": lambda x: x + torch.tensor([1, 0, 0, 0, 0])}, ValueError, "there are 1 blocks"),
    ({"layout": lambda x: x + torch.tensor([0, 400, 0, 0, 0])}, ValueError, "has 512 elements"),
    ({"layout": lambda x: x - torch.tensor([0, 1, 0, 0, 0])}, ValueError, "has 512 elements"),
    ({"layout": lambda x: x + torch.tensor([0, 0, 1, 0, 0])}, ValueError, "has 3 slots"),
    ({"layout": lambda x: x + torch.tensor([0, 0, 0, 1, 0])}, ValueError, "there are 1 param groups"),
    ({"layout": lambda x: x - torch.tensor([0, 0, 0, 0, 1])}, ValueError, "an index is from 0 to 9223372036854775807"),
    ({"emas": lambda e: [torch.zeros(512, dtype=torch.bfloat16)]}, TypeError, "emas.0. is torch.bfloat16"),
    ({"emas": lambda e: [torch.zeros(16)]}, ValueError, "emas.0. has 16 elements"),
    ({"ema_decay": [1.0]}, ValueError, "ema_decay.0. is 1.0; accepted: a number from 0 to below 1"),
    ({"ema_decay": [0.5, 0.5]}, ValueError, "ema_decay has 2 entries and flags 1"),
    ({"seed": -1}, ValueError, "seed is -1"),
    ({"seed": 2**63}, ValueError, "seed is 9223372036854775808"),
    ({"lrs": [torch.ones(()), torch.ones(())]}, ValueError, "lrs has 2 entries"),
    ({"lrs": [torch.ones((), dtype=torch.float64)]}, TypeError, "lrs.0. is float64"),
    ({"weight_decays": [torch.ones(()).double()] * 2}, ValueError, "weight_decays has 2 entries"),
    ({"weight_decays": [torch.ones(())]}, TypeError, "weight_decays.0. is float32.*one element of float64"),
    ({"lr": NAN}, ValueError, "lr.0. is nan"),
    ({"lr": -1.0}, ValueError, "lr.0. is -1.0"),
    ({"weight_decay": NAN}, ValueError, "weight_decay.0. is nan"),
    ({"options": lambda x: x[:-1]}, ValueError, "options has . entries and flags 1; accepted: lr, .*, weight_decay of"),
    ({"flags": [0, 0]}, ValueError, "options has . entries and flags 2"),
    ({"flags": [128]}, ValueError, "flags.0. is 128; accepted: a sum of bits out of 1, "),
    ({"sum_sq": torch.ones(()), "max_norm": NAN}, ValueError, "max_norm is nan"),
    ({"moments": lambda m: m[1:]}, ValueError, "moments has . entries and steps 1; accepted: .* of each block"),
    ({"moments": lambda m: [m[0].half(), *m[1:]]}, TypeError, r"\[0\] is torch.float16; accepted: float32, bfloat16"),
    ({"moments": lambda m: [m[0][:16], *m[1:]]}, ValueError, r"\[0\] has 16 elements"),
]
OWN = {
    "adamw_": [
        ({"beta1": 1.0}, ValueError, "beta1.0. is 1.0; accepted: a number from 0 to below 1"),
        ({"beta2": NAN}, ValueError, "beta2.0. is nan"),
        ({"eps": -1.0}, ValueError, "eps.0. is -1.0"),
        ({"flags": [2]}, ValueError, "flags.0. is 2; accepted: a sum of bits out of 1, 4, 8"),
        (
            {"moments": lambda m: [m[0], m[1].view(16, 32), m[2]]},
            ValueError,
            "exp_avg_sq.0. .*accepted: a flat, contig",
        ),
        ({"moments": lambda m: [m[0][:0], *m[1:]]}, ValueError, "exp_avg.0. has 0 elements"),
        ({"moments": lambda m: [*m[:2], torch.zeros(16)]}, ValueError, "max_exp_avg_sq.0. has 16 elements"),
    ],
    "sgd_": [
        ({"momentum": NAN}, ValueError, "momentum.0. is nan"),
        ({"dampening": NAN}, ValueError, "dampening.0. is nan"),
    ],
    "lion_": [
        ({"beta2": 1.0}, ValueError, "beta2.0. is 1.0; accepted: a number from 0 to below 1"),
        ({"moments": lambda m: [t[:0] for t in m]}, ValueError, "exp_avg.0. has 0 elements"),
    ],
    "muon_": [
        ({"momentum": NAN}, ValueError, "momentum.0. is nan"),
        ({"ratio": -1.0}, ValueError, "ratio.0. is -1.0"),
        ({"flags": [16]}, ValueError, "flags.0. is 16; accepted: a sum of bits out of 1, 2, 8, 64"),
    ],
    "lamb_": [({"beta1": NAN}, ValueError, "beta1.0. is nan"), ({"eps": -1e-8}, ValueError, "eps.0. is -1e-08")],
}


@pytest.mark.parametrize(
    ("rule", "changes", "error", "text"), [(rule, *case) for rule in RULES for case in UPDATES + OWN[rule]]
)
def test_updates(rule, changes, error, text):
    call = changed(rule, **changes)
    lists = [
        value for value in call.values() if isinstance(value, list) and value and isinstance(value[0], torch.Tensor)
    ]
    before = [[t.clone() for t in value] for value in lists]
    with pytest.raises(error, match=f"{rule}: .*{text}"):
        RULES[rule](**call)
    for old, value in zip(before, lists, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, value, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_the_second_group_and_block_are_named(rule):
    """Options and moments are packed: a message says which one it is."""
    declared, index = RULES[rule].declared, 1  # a sample with three groups and blocks
    for k, name in enumerate(declared.options):
        call = changed(rule, index)
        call["options"][2 * len(declared.options) + k] = NAN
        with pytest.raises(ValueError, match=rf"{rule}: {name}\[2\] is nan"):
            RULES[rule](**call)
    for k, name in enumerate(declared.moments):
        call = changed(rule, index)
        call["moments"][3 * k + 1] = torch.zeros(512, dtype=torch.float16)
        with pytest.raises(TypeError, match=rf"{rule}: {name}\[1\] is torch.float16"):
            RULES[rule](**call)


@pytest.mark.parametrize("rule", RULES)
def test_every_sample_passes_the_checks(rule):
    for index in range(len(list(RULES[rule].op.samples("cpu")))):
        RULES[rule](**changed(rule, index))


# ---- addresses


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["cpu", "reference", "emulate"])
def test_no_public_update_takes_addresses(rule, backend):
    """The rows that the private op of optimizers would follow, in the place of the layout: with lists and without."""
    op, victim, grad = RULES[rule].op, torch.ones(35), torch.ones(35)
    table = torch.tensor([[victim.data_ptr(), grad.data_ptr(), 35, 6, 6, 0, 0, 0, 0, 0, 7, 5]])
    call = changed(rule, layout=table.expand(3, -1).contiguous())
    with pytest.raises((RuntimeError, ValueError), match=r"layout|unpack"):
        ak.backend(backend)(op)(*call.values())
    with contextlib.suppress(RuntimeError, ValueError):  # no parameters: refused, or no step at all
        ak.backend(backend)(op)(*changed(rule, params=[], grads=[], layout=table).values())
    assert torch.equal(victim, torch.ones(35))


def test_no_public_op_has_a_table():
    for name, op in REGISTRY.items():
        assert not name.startswith("_")
        assert not {"table", "address", "addresses"} & {argument.name for argument in op.schema.arguments}
