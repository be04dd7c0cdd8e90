"""What a timed call leaves behind must not change what the next one does, and torch's side must be right."""

import pytest
import torch

from bench import updates
from bench.harness import Scope, worst_error
from bench.ops import lamb, linear, lion, unscale, update_scale

SCOPE = Scope(torch.device("cpu"), quick=True)


def test_unscale_repeats_the_same_work():
    case = next(unscale.cases(SCOPE))
    for provider in case.providers.values():
        grads = case.inputs(torch.Generator().manual_seed(0))
        want = [grad * unscale.INVERSE for grad in grads]
        call = provider(grads)
        for _ in range(4):
            call()
        assert all(torch.equal(grad, expected) for grad, expected in zip(grads, want, strict=True))


def test_update_scale_repeats_the_same_work():
    case = next(update_scale.cases(Scope(torch.device("cpu"))))
    for provider in case.providers.values():
        call = provider(case.inputs(torch.Generator()))
        assert [call()["scale"].item() for _ in range(3)] == [1024.0] * 3


@pytest.mark.parametrize("op", [lamb, lion])
def test_the_optimizers_that_torch_lacks_are_written_right(op):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in ((7, 5), (64,), (3, 2, 2))]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    want = [op._reference(param.double(), updates.gradients(param.grad.double())) for param in params]
    step = op._torch(params)
    step()
    torch._foreach_mul_([param.grad for param in params], updates.SECOND)
    step()
    worst_error({"params": params}, {"params": (want, 1e-6)})


def test_a_forward_without_backward_records_nothing():
    forward, both = (
        next(case for case in linear.cases(SCOPE) if case.shape.endswith(kind)) for kind in (" forward", "backward")
    )
    for case in (forward, both):
        got = case.providers["amp_kernels"](case.inputs(torch.Generator().manual_seed(0)))()
        assert not got["out"].requires_grad
        assert list(got) == ["out", "grad 0", "grad 1", "grad 2"][: 1 if case is forward else 4]


def test_the_host_rows_forward_is_one_that_a_backward_can_follow(monkeypatch):
    recorded = []
    forward = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *args: recorded.append(torch.is_grad_enabled()) or forward(*args)
    )
    case = next(case for case in linear.cases(SCOPE) if case.host_time)
    case.providers["torch"](case.inputs(torch.Generator()))()
    assert recorded == [True]


def test_host_rows_are_layers_under_autocast_with_fp32_weights():
    cases = [case for case in linear.cases(SCOPE) if case.host_time]
    assert [case.shape.split(maxsplit=1)[1] for case in cases] == ["autocast forward", "autocast forward + backward"]
    for case in cases:
        for provider in case.providers.values():
            got = provider(case.inputs(torch.Generator().manual_seed(0)))()
            assert got["out"].dtype == torch.bfloat16
            assert got.get("grad 1", torch.empty(0)).dtype == torch.float32
