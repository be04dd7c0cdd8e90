"""Muon's matrices: parameters are batches of matrices of any order in memory, and matrices of a shape are batched."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels.optim import Muon, _matrices
from amp_kernels.optim._matrices import Matrices

from .pairs import launches_of
from .test_muon import parameter, parameters, same_bits, set_grads, steps, trained


def test_grouping_does_not_change_bits(monkeypatch):
    """Alone, beside others of their shape, and in chunks."""
    together, _ = trained()
    alone = [steps(Muon([p], lr=0.02), [p], 0)[0] for p in parameters()]
    optimizers = [Muon([p], lr=0.02) for p in alone]
    for seed in range(3):
        set_grads(alone, seed)
        for optimizer in optimizers:
            optimizer.step()
    assert same_bits(together, alone)
    monkeypatch.setattr(_matrices, "CHUNK_ELEMENTS", 7000)
    chunked, optimizer = trained()
    (launch,) = launches_of(optimizer)
    assert len(launch.batch.prepared[-1][1]) == 4
    assert same_bits(together, chunked)


def split(params, parts):
    return [torch.nn.Parameter(part.clone()) for p in params for part in p.detach().chunk(parts)]


@pytest.mark.parametrize(
    ("shape", "options", "parts", "view"),
    [
        ((3, 24, 40), {}, 3, (24, 40)),  # experts
        ((72, 40), {"heads": 3}, 3, (24, 40)),  # a fused projection
        ((2, 48, 40), {"heads": 2}, 4, (24, 40)),
        ((24, 5, 4, 2), {"flatten": True}, 1, (24, 40)),  # a convolution
        ((24, 40), {"flatten": True, "heads": 1}, 1, (24, 40)),
    ],
)
def test_the_matrices_of_a_parameter_move_as_matrices_of_their_own(shape, options, parts, view):
    """The ratio is of their shape, too: with it unscaled, sqrt(24 / 40) instead of sqrt(72 / 40)."""
    whole = parameter(*shape)
    pieces = [torch.nn.Parameter(x.clone()) for x in whole.detach().reshape(parts, *view)]
    a = Muon([whole], lr=0.02, adjust_lr_fn="spectral_unclamped", **options)
    b = Muon(pieces, lr=0.02, adjust_lr_fn="spectral_unclamped")
    for seed in range(3):
        set_grads([whole], seed)
        for p, g in zip(pieces, whole.grad.reshape(parts, *view), strict=True):
            p.grad = g.clone()
        a.step()
        b.step()
    assert torch.equal(whole.reshape(parts, *view), torch.stack([*pieces]))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize(
    ("adjust_lr_fn", "ratio"),
    [
        ("original", lambda rows, columns: max(1.0, rows / columns) ** 0.5),
        ("match_rms_adamw", lambda rows, columns: 0.2 * 40**0.5),
        ("spectral_unclamped", lambda rows, columns: (rows / columns) ** 0.5),
    ],
)
def test_ratios(shape, adjust_lr_fn, ratio):
    """Beside the default: from zero a weight is -lr * ratio * direction, rounded twice."""
    moved = []
    for options in ({"adjust_lr_fn": adjust_lr_fn}, {}):
        p = torch.nn.Parameter(torch.zeros(shape))
        set_grads([p], 0)
        Muon([p], **options).step()
        moved.append(p.detach())
    wanted = ratio(*shape) / max(1.0, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(moved[0], wanted * moved[1], rtol=3 * 2.0**-23, atol=0)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (lambda x: x.flatten(1).t().contiguous().t(), {}),
        (lambda x: x.flatten(1).t().contiguous().t(), {"heads": 4}),
        (lambda x: x.contiguous(memory_format=torch.channels_last), {"flatten": True}),
        (lambda x: x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3), {"flatten": True}),
        (lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), {"flatten": True}),
        (lambda x: x.flatten(2).permute(2, 0, 1).contiguous().permute(1, 2, 0), {}),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_any_order_in_memory(layout, options, compiled):
    """The bits are those of row-major parameters, also where some of each order are in one step."""
    base = torch.randn(24, 5, 4, 2, generator=torch.Generator().manual_seed(7))
    ordered = torch.nn.Parameter(layout(base))
    plain = torch.nn.Parameter(ordered.detach().clone(memory_format=torch.contiguous_format))
    assert plain.stride() != ordered.stride()
    more = [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in (ordered, plain)]
    optimizers = Muon([ordered, *more], lr=0.02, **options), Muon([plain], lr=0.02, **options)
    for seed in range(4):
        set_grads([plain], seed)
        for p in (ordered, *more):
            p.grad = torch.empty_like(p).copy_(plain.grad)
        for optimizer in optimizers:
            if compiled:
                optimizer.step()
            else:
                with ak.backend("reference"):
                    optimizer.step()
    assert all(torch.equal(p, plain) for p in (ordered, *more))


def test_only_other_orders_in_memory_are_copied():
    base = torch.empty(24, 5, 4, 2)
    for tensor, flatten, packed in (
        (base[0, 0], False, True),
        (base[0, 0].t(), False, False),
        (base, True, True),
        (base.contiguous(memory_format=torch.channels_last), True, False),
    ):
        assert Matrices.of(tensor, None, flatten).packed is packed


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((5,), {}, r"params\[0\] has shape \[5\]; Muon updates matrices, .* algorithm='adamw', or in another optimizer"),
        ((), {}, r"params\[0\] has shape \[\]; Muon updates matrices"),
        ((4, 3, 2, 2), {}, "flatten=True takes all dimensions but the first"),
        ((5,), {"flatten": True}, "Muon updates matrices"),
        ((9, 2), {"heads": 2}, r"shape \[9, 2\], and heads is 2; accepted: a divisor of its 9 rows"),
        ((9, 2), {"heads": 0}, "heads is 0; accepted: None, a positive integer"),
        ((9, 2), {"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'; accepted: None, 'original', 'match_rms_adamw'"),
        ((9, 2), {"ns_steps": 100}, "steps is 100; accepted: an integer from 0 to 99"),
        ((9, 2), {"ns_coefficients": (1.0, 2.0)}, "coefficients is"),
    ],
)  # fmt: skip
def test_refusals(shape, options, text):
    with pytest.raises(ValueError, match=text):
        Muon([parameter(*shape)], **options)
    optimizer = Muon([parameter(4, 4)])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [parameter(*shape)], **options})
    assert len(optimizer.param_groups) == 1


def test_empty_parameters_are_left_alone():
    params, _ = trained([(4, 0), (0, 4), (3, 0, 5), (4, 4)])
    assert not torch.equal(params[3], parameters([(1,), (1,), (1,), (4, 4)])[3])


def test_results_are_rounded_once_to_fp16():
    """From zero and with a rate of 1 the weights are the orthogonalized matrices: fp16 numbers, of which few fit bf16."""
    p = torch.nn.Parameter(torch.zeros(24, 40))
    set_grads([p], 0)
    Muon([p], lr=1.0, weight_decay=0.0).step()
    assert torch.equal(p.half().float(), p)
    assert (p.bfloat16().float() == p).float().mean() < 0.5
