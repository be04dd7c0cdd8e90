"""accumulate_fp32: gradients go into main_grad inside the GEMM, and .grad, hooks, optimizers and scalers do not notice."""

import copy
import gc
import weakref

import pytest
import torch

import amp_kernels as ak
from amp_kernels.nn import MLP, Linear, accumulate_fp32
from amp_kernels.ops import _main_grad

from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.processes import python


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = {*_main_grad._registered}  # of a test that failed: its traceback holds a model
    yield
    assert before.issuperset(_main_grad._registered)


@pytest.fixture
def accumulations(op_calls):
    return op_calls["gemm_accumulate_"]


def betas(accumulations):
    return [kwargs.get("beta", 1.0) for _, kwargs in accumulations]


def layer(dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    return Linear(12, 8, bias=bias, dtype=dtype)


def micro_batches(count, dtype=torch.float32, features=12):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, features, generator=generator).to(dtype) for _ in range(count)]


def backward(module, x, autocast=True):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x)
    out.float().pow(2).sum().backward()
    return out


def is_main(param):
    return param.grad is not None and param.grad.data_ptr() == param.main_grad.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_main_grad(dtype, accumulations):
    module = layer(dtype, bias=True)
    plain, expected = copy.deepcopy(module), None
    with accumulate_fp32(module):
        for i, x in enumerate(micro_batches(3, dtype)):
            out = backward(module, x, autocast=dtype == torch.float32)
            assert is_main(module.weight)
            assert module.weight.main_grad.dtype == module.bias.grad.dtype == torch.float32
            assert betas(accumulations) == [0.0, 1.0, 1.0][: i + 1]
            expected, bound = reference_and_bound(
                2 * out.detach().t(), x.bfloat16(), c=expected, beta=1.0, out_dtype=torch.float32
            )
            assert_within(module.weight.grad, expected, bound * (i + 1))
        if dtype == torch.float32:
            for x in micro_batches(3):
                backward(plain, x)
            torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-6)
            assert torch.equal(module.bias.grad, plain.bias.grad)


def test_a_sum_over_micro_batches_does_not_stand_still():
    """In bf16 256 + 1 is 256, for weight and bias."""
    module = Linear(1, 1, dtype=torch.bfloat16)
    with accumulate_fp32(module):
        one = torch.ones(1, 1, dtype=torch.bfloat16)
        for x in (256 * one, *[one] * 10):
            module(x).sum().backward()
        assert module.weight.grad.item() == 266
        assert module.bias.grad.item() == 11
        module(one.expand(1025, 1)).sum().backward()  # 1025 is no bf16 number either
        assert module.bias.grad.item() == 11 + 1025


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none, accumulations):
    module = layer()
    with accumulate_fp32(module):
        first, second = micro_batches(2)
        address = module.weight.main_grad.data_ptr()
        backward(module, first)
        module.zero_grad(set_to_none=set_to_none)
        if set_to_none:
            module.weight.main_grad.fill_(torch.nan)  # with beta = 0 nobody reads it
        backward(module, second)
        got = module.weight.grad.clone()
        assert betas(accumulations) == [0.0, 0.0 if set_to_none else 1.0]
        assert module.weight.grad.data_ptr() == address
    module.zero_grad()
    backward(module, second)
    assert torch.equal(got, module.weight.grad)


def test_hooks_fire_once_and_see_the_gradient():
    module = layer()
    seen = []
    with accumulate_fp32(module):
        handle = module.weight.register_post_accumulate_grad_hook(lambda p: seen.append((is_main(p), p.grad.clone())))
        node = module.weight.view_as(module.weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: seen.append("node"))  # what DistributedDataParallel waits for
        first, second = micro_batches(2)
        backward(module, first)
        assert seen[0][0]
        assert seen[1:] == ["node"]
        backward(module, second)
        assert len(seen) == 4
        assert seen[2][0]
        assert torch.equal(seen[2][1], module.weight.grad)
        handle.remove()


def test_a_tensor_hook_gets_every_increment(accumulations):
    module = layer()
    increments = []
    first, second = micro_batches(2)
    with accumulate_fp32(module):
        backward(module, first)
        hook = module.weight.register_hook(lambda g: increments.append(g.clone()) or 2 * g)
        before = module.weight.grad.clone()
        backward(module, second)
        assert torch.equal(module.weight.grad, before + 2 * increments[0])
        assert is_main(module.weight)  # autograd added in place
        hook.remove()
        backward(module, first)
        assert betas(accumulations) == [0.0, 1.0]
    plain = layer()
    backward(plain, second)
    assert torch.equal(increments[0], plain.weight.grad)


@pytest.mark.parametrize("fused", [False, True])
def test_a_tensor_hook_on_a_16_bit_weight_gets_fp32_increments(fused):
    """1025 is no bf16 number."""
    module = MLP(1, 1, dtype=torch.bfloat16, activation=None) if fused else Linear(1, 1, dtype=torch.bfloat16)
    ones, seen = torch.ones(1025, 1, dtype=torch.bfloat16), []
    weights = [module.fc1.weight, module.fc2.weight] if fused else [module.weight]
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(float(param.ndim == 2))
    with accumulate_fp32(module):
        for weight in weights:
            weight.register_hook(lambda g: seen.append((g.dtype, g.item())))
        module(ones).sum().backward()
    assert seen == [(torch.float32, 1025.0)] * len(weights)


@pytest.mark.parametrize("uses", ["two calls", "tied embedding", "transposed", "embedding first"])
def test_other_uses_of_the_weight_add_up(uses):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    module = Linear(8, 8, bias=False)
    module.weight = weight
    x = micro_batches(1, features=8)[0]
    ids = torch.tensor([1, 1, 5])

    def loss(w):
        with torch.autocast("cpu", torch.bfloat16):
            y = ak.linear(x, w)
            if uses == "two calls":
                y = ak.linear(y, w)
            elif uses == "transposed":
                y = ak.linear(y, w.t())
        total = y.float().pow(2).sum()
        extra = torch.nn.functional.embedding(ids, w).pow(3).sum()
        if uses == "tied embedding":
            total = total + extra
        elif uses == "embedding first":
            total = extra + total
        return total

    plain = weight.detach().clone().requires_grad_()
    calls = []
    with accumulate_fp32(module):
        weight.register_post_accumulate_grad_hook(lambda p: calls.append(None))
        for count in (1, 2, 3):
            loss(weight).backward()
            loss(plain).backward()
            torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-5, atol=1e-5)
            assert is_main(weight)
            assert len(calls) == count


def test_a_gradient_that_the_user_replaced_counts():
    module = layer()
    x = micro_batches(1)[0]
    plain = layer()
    backward(plain, x)
    with accumulate_fp32(module):
        module.weight.grad = torch.full((8, 12), 3.0)
        backward(module, x)
        torch.testing.assert_close(module.weight.grad, plain.weight.grad + 3)
        module.weight.grad = module.weight.grad.t().contiguous().t()
        backward(module, x)
        torch.testing.assert_close(module.weight.grad, 2 * plain.weight.grad + 3)
        assert is_main(module.weight)


def test_autograd_grad_leaves_main_grad_alone(accumulations):
    module = layer()
    x = micro_batches(1)[0]
    with accumulate_fp32(module):
        backward(module, x)
        before = module.weight.grad.clone()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x).float().pow(2).sum()
        (grad,) = torch.autograd.grad(loss, module.weight)
        assert torch.equal(grad, before)
        assert torch.equal(module.weight.grad, before)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x).float().pow(2).sum()
        loss.backward(inputs=[module.weight])
        assert torch.equal(module.weight.grad, 2 * before)
        assert betas(accumulations) == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_second_derivatives(accumulations):
    """A backward that is recorded is ordinary; the gradient of a gradient adds to what goes into main_grad."""
    module, plain = layer(), layer()
    with accumulate_fp32(module):
        for net in (module, plain):
            x = micro_batches(1)[0].requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = net(x)
            out.float().pow(2).sum().backward(create_graph=True)
            assert len(accumulations) == (net is plain)
            (x.grad.pow(2).sum() + net.weight.grad.pow(2).sum()).backward()
        torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)
        assert len(accumulations) == 1
        module.weight.grad = plain.weight.grad = None  # the graph holds them


def test_checkpointing_reentrant_or_not(accumulations):
    for reentrant in (True, False):
        module, plain = MLP(12, 16), MLP(12, 16)
        plain.load_state_dict(module.state_dict())
        with accumulate_fp32(module):
            for net in (module, plain):
                for x in micro_batches(2):
                    with torch.autocast("cpu", torch.bfloat16):
                        y = net(x.requires_grad_())
                        y = torch.utils.checkpoint.checkpoint(net, y, use_reentrant=reentrant)
                    y.float().pow(2).sum().backward()
            for a, b in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
    assert len(accumulations) == 2 * 2 * 2 * 2  # ways, micro-batches, uses, weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp_weights_too(activation, bias, accumulations):
    torch.manual_seed(0)
    module = torch.nn.Sequential(MLP(12, 16, bias=bias, activation=activation), torch.nn.LayerNorm(12))
    plain = copy.deepcopy(module)
    with accumulate_fp32(module):
        for net in (module, plain):
            for x in micro_batches(2):
                backward(net, x)
        for (name, a), b in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
            assert hasattr(a, "main_grad") == (name in ("0.fc1.weight", "0.fc2.weight"))
    assert betas(accumulations) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_our_optimizer_scaler_and_clipping_read_it(dtype, clip):
    """Two micro-batches a step, a loss scale: the update is that of the plain model, whose sums are fp32 for fp32."""
    torch.manual_seed(0)
    module = MLP(12, 16, dtype=dtype)
    plain = copy.deepcopy(module).float() if dtype == torch.bfloat16 else copy.deepcopy(module)
    with accumulate_fp32(module):
        for net in (module, plain):
            optimizer = ak.optim.SGD(net.parameters(), lr=0.1)
            scaler = ak.GradScaler(device="cpu", init_scale=1024.0)
            for _ in range(2):
                optimizer.zero_grad()
                for x in micro_batches(2, net.fc1.weight.dtype):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = net(x).float().pow(2).sum()
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if clip is not None:
                    ak.clip_grad_norm_(net.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
        for a, b in zip(module.parameters(), plain.parameters(), strict=True):
            tolerance = 1e-6 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)
        assert is_main(module.fc1.weight)


def test_remove_and_the_handle():
    module = layer(torch.bfloat16, bias=True)
    x = micro_batches(1, torch.bfloat16)[0]
    handle = accumulate_fp32(module)
    with pytest.raises(ValueError, match=r"weight has a main_grad already"):
        accumulate_fp32(module)
    module(x).sum().backward()
    grad = module.weight.grad.clone()
    handle.remove()
    handle.remove()
    assert not hasattr(module.weight, "main_grad")
    assert module.weight.grad.dtype == module.bias.grad.dtype == torch.bfloat16
    assert torch.equal(module.weight.grad, grad.bfloat16())
    module(x).sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16
    accumulate_fp32(module).remove()


def test_the_weight_is_not_kept_alive():
    module = layer()
    handle = accumulate_fp32(module)
    weight = weakref.ref(module.weight)
    del module, handle
    gc.collect()
    assert weight() is None


def test_a_weight_may_outlive_the_modules_of_the_package():
    """While the interpreter exits, if what was imported before holds it."""
    script = """
import torch, amp_kernels as ak
module = ak.nn.Linear(4, 4)
torch.kept = module.weight
ak.nn.accumulate_fp32(module)
"""
    assert python("-c", script).stderr == ""


def test_frozen_weights_other_modules_and_copies_are_left_alone():
    module = torch.nn.ModuleList([Linear(3, 3), torch.nn.Linear(3, 3), Linear(3, 3, dtype=torch.float64)])
    module[0].weight.requires_grad_(False)
    with accumulate_fp32(module):
        assert not any(hasattr(m.weight, "main_grad") for m in module)
    live = layer()
    with accumulate_fp32(live):
        other = copy.deepcopy(live)
        backward(other, micro_batches(1)[0])
        assert not hasattr(other.weight, "main_grad")
        assert live.weight.grad is None


def test_a_model_that_changes_its_dtype_afterwards():
    module = layer()
    with accumulate_fp32(module):
        module.bfloat16()
        for x in micro_batches(2, torch.bfloat16):
            module(x).sum().backward()
        assert is_main(module.weight)
        assert module.weight.grad.dtype == torch.float32


def test_bad_input():
    with pytest.raises(TypeError, match=r"model has type list; accepted: a torch.nn.Module"):
        accumulate_fp32([])
    module = layer()
    module.weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="weight has a tensor hook"):
        accumulate_fp32(module)
    assert not hasattr(module.weight, "main_grad")


def test_a_sharded_or_wrapped_weight_is_refused_before_anything_changes():
    from torch.testing._internal.two_tensor import TwoTensor

    module = torch.nn.ModuleList([layer(), layer()])
    parts = torch.ones(8, 12), torch.ones(8, 12)
    module[1].weight = torch.nn.Parameter(TwoTensor(*parts))
    with pytest.raises(TypeError, match=r"1.weight has type .*TwoTensor; accepted: plain parameters"):
        accumulate_fp32(module)
    assert not hasattr(module[0].weight, "main_grad")
