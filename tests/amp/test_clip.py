"""get_total_norm and clip_grad_norm_ against torch.nn.utils': signatures, values, errors, and what is left to torch."""

import inspect
import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels.amp import clip

from ..helpers.ops import Ops

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
UNIT = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24}  # relative error of one rounding
SHAPES = [(33,), (7, 11), (), (0, 3), (40_000,)]
LISTS = {"fp32": (F32,), "fp16": (F16,), "bf16": (BF16,), "mixed": (F32, F16, BF16)}


def weights(dtypes=(F32,), seed=0):
    """Parameters with gradients; one more has none."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for dtype in dtypes:
        for shape in SHAPES:
            param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            param.grad = torch.randn(shape, generator=generator).to(dtype)
            params.append(param)
    return [*params, torch.nn.Parameter(torch.zeros(3))]


def grads(params):
    return [p.grad.clone(memory_format=torch.preserve_format) for p in params if p.grad is not None]


def norm_in_float64(tensors):
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()


@pytest.mark.parametrize("name", ["get_total_norm", "clip_grad_norm_"])
def test_signature_is_torchs(name):
    ours = inspect.signature(getattr(ak, name)).parameters
    theirs = inspect.signature(getattr(torch.nn.utils, name)).parameters
    *ours, own = ((p.name, p.kind, p.default) for p in ours.values())
    assert ours == [(p.name, p.kind, p.default) for p in theirs.values()]
    assert own == ("shard_group", inspect.Parameter.KEYWORD_ONLY, None)


@pytest.mark.parametrize("dtypes", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_values(dtypes, max_norm):
    """The factor carries a few roundings of float32, every gradient one of its own dtype (its subnormals included)."""
    params = weights(dtypes)
    before = grads(params)
    norm = ak.clip_grad_norm_(params, max_norm)
    exact = norm_in_float64(before)
    assert norm.shape == ()
    assert norm.dtype == F32
    assert not norm.requires_grad
    torch.testing.assert_close(norm.double(), exact, rtol=4 * UNIT[F32], atol=0)
    assert torch.equal(ak.get_total_norm(before), norm)
    factor = min(1.0, max_norm / (exact.item() + 1e-6))
    for old, new in zip(before, grads(params), strict=True):
        assert new.dtype == old.dtype
        wanted = old.double() * factor
        assert ((new.double() - wanted).abs() <= wanted.abs() * (UNIT[old.dtype] + 8 * UNIT[F32]) + 2.0**-25).all()
        assert factor < 1 or torch.equal(new, old)  # exactly: a factor of 1 rounds nothing


@pytest.mark.parametrize("dtypes", [(F64,), (F32, F64, F16)])
def test_float64_is_torchs(dtypes):
    """A sum in float32 would cost it its precision."""
    ours, theirs = weights(dtypes), weights(dtypes)
    norm = ak.clip_grad_norm_(ours, 0.5)
    assert norm.dtype == F64
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    assert all(torch.equal(a, b) for a, b in zip(grads(ours), grads(theirs), strict=True))


@pytest.mark.parametrize("norm_type", [1, 1.0, 3.0, 0.0, -math.inf])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_other_norms_are_torchs(norm_type, foreach):
    ours, theirs = weights((F32, BF16)), weights((F32, BF16))
    ours[3].grad = theirs[3].grad = ours[8].grad = theirs[8].grad = None  # the inf-norm of nothing is an error
    one = ak.clip_grad_norm_(ours, 0.5, norm_type, foreach=foreach)
    two = torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type, foreach=foreach)
    assert torch.equal(one, two)
    assert all(torch.equal(a, b) for a, b in zip(grads(ours), grads(theirs), strict=True))
    again = ak.get_total_norm(grads(theirs), norm_type, foreach=foreach)
    assert torch.equal(again, torch.nn.utils.get_total_norm(grads(theirs), norm_type, foreach=foreach))


@pytest.mark.parametrize("norm_type", [math.inf, "inf"])
@pytest.mark.parametrize("dtypes", LISTS.values(), ids=LISTS.keys())
def test_infinity_norm(norm_type, dtypes):
    ours, theirs = weights(dtypes), weights(dtypes)
    for params in (ours, theirs):
        for i in range(3, len(params), len(SHAPES)):
            params[i].grad = None  # torch refuses the infinity norm of nothing
    one, two = ak.clip_grad_norm_(ours, 0.5, norm_type), torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    assert one.dtype == F32
    assert one.item() == two.item()
    for a, b in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=4 * UNIT[a.dtype], atol=2.0**-24)
    again = ak.get_total_norm(grads(theirs), norm_type)
    assert again.item() == torch.nn.utils.get_total_norm(grads(theirs), norm_type).item()
    assert ak.get_total_norm([torch.empty(0)], norm_type).item() == 0.0
    with pytest.raises(RuntimeError, match="The total norm of order inf for gradients"):
        ak.get_total_norm([torch.tensor([1.0, math.nan])], norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("norm_type", [2, 2.0, "2", math.inf])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_the_norm_is_one_read_and_one_write_of_all_dtypes_without_a_host_sync(norm_type, foreach):
    params = weights((F32, F16, BF16))
    with Ops() as ops:
        ak.clip_grad_norm_(params, 1.0, norm_type, foreach=foreach)
    assert ops.count("check_and_norm") == ops.count("unscale_") == 1
    assert not ops.host_reads()
    assert len(ops.names) <= 8, ops.names  # none of them per tensor


def test_error_if_nonfinite_alone_reads_on_the_host():
    params = weights()
    with Ops() as ops:
        ak.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert ops.host_reads()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_nonfinite(bad, dtype):
    ours, theirs = weights((dtype,)), weights((dtype,))
    for params in (ours, theirs):
        params[1].grad[2, 3] = bad
    before = grads(ours)
    messages = []
    for function, params in ((ak.clip_grad_norm_, ours), (torch.nn.utils.clip_grad_norm_, theirs)):
        with pytest.raises(RuntimeError) as error:
            function(params, 1.0, error_if_nonfinite=True)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    with pytest.raises(RuntimeError, match="non-finite"):
        ak.get_total_norm(before, error_if_nonfinite=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, grads(ours), strict=True))
    one, two = ak.clip_grad_norm_(ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(one.isnan(), two.isnan())
    assert torch.equal(one.isinf(), two.isinf())
    for a, b in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # all NaN, or zeros and one NaN


def test_float16_gradients_longer_than_float16_goes():
    """torch's norm of them is infinite, so that it makes all of them 0."""
    param = torch.nn.Parameter(torch.zeros(4, dtype=F16))
    param.grad = torch.full((4,), 60_000.0, dtype=F16)
    assert ak.clip_grad_norm_(param, 12.0).item() == 120_000.0
    assert param.grad.tolist() == [6.0] * 4


def test_small_norms():
    """The factor is max_norm / (norm + 1e-6), as in torch; gradients that are all 0 stay 0."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([1e-6])
    ak.clip_grad_norm_([param], 0.5e-6)
    assert param.grad.item() == pytest.approx(0.25e-6)
    param.grad.zero_()
    ak.clip_grad_norm_([param], 0.5)
    assert param.grad.item() == 0.0


def test_nothing_to_clip():
    for parameters in ([], [torch.nn.Parameter(torch.ones(3))], ()):
        norm = ak.clip_grad_norm_(parameters, 1.0)
        assert (norm.item(), norm.shape, norm.device.type) == (0.0, (), "cpu")
    assert ak.get_total_norm([]).item() == 0.0
    empty = torch.nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    assert ak.clip_grad_norm_([empty], 1.0).item() == 0.0


def test_torchs_functions_may_be_replaced_by_these(monkeypatch):
    """Calls that these leave to torch must not come back."""
    for name in ("get_total_norm", "clip_grad_norm_"):
        monkeypatch.setattr(torch.nn.utils, name, getattr(ak, name))
    params = weights((F64,))
    assert torch.nn.utils.clip_grad_norm_(params, 0.5, 3.0) == torch.nn.utils.get_total_norm(
        grads(weights((F64,))), 3.0
    )
    assert torch.nn.utils.clip_grad_norm_([], 0.5) == 0.0


def test_generators_and_single_tensors():
    params = weights()
    wanted = norm_in_float64(grads(params)).float()
    torch.testing.assert_close(ak.clip_grad_norm_((p for p in params), 1.0), wanted)
    torch.testing.assert_close(ak.get_total_norm(g for g in grads(params)), torch.tensor(1.0), rtol=1e-5, atol=0)
    assert ak.clip_grad_norm_(params[0], 1e9).item() == ak.get_total_norm(params[0].grad).item()
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        ak.clip_grad_norm_((p for p in ()), 1.0)
    assert [w.filename for w in caught] == [__file__]


def test_a_parameter_that_comes_twice_is_scaled_twice_as_in_torch():
    """Not by one launch, in which two blocks would scale it at once. So are gradients that overlap in memory."""
    ours, theirs = weights()[0], weights()[0]
    with Ops() as ops:
        ak.clip_grad_norm_([ours, ours], 0.5)
    assert not ops.count("unscale_")
    torch.nn.utils.clip_grad_norm_([theirs, theirs], 0.5)
    assert torch.equal(ours.grad, theirs.grad)
    memories = [torch.ones(10), torch.ones(10)]
    for module, memory in zip((ak, torch.nn.utils), memories, strict=True):
        pair = [torch.nn.Parameter(torch.zeros(6)) for _ in range(2)]
        pair[0].grad, pair[1].grad = memory[:6], memory[4:]
        module.clip_grad_norm_(pair, 0.5)
    assert torch.equal(*memories)


def test_gradients_with_gaps_in_memory_are_torchs():
    param, storage = torch.nn.Parameter(torch.zeros(4, 3)), torch.ones(4, 6)
    param.grad = storage[:, ::2]
    assert ak.clip_grad_norm_([param], 1.0).item() == pytest.approx(12**0.5)
    assert torch.equal(storage[:, 1::2], torch.ones(4, 3))
    assert param.grad.norm().item() == pytest.approx(1.0)


def test_tensor_subclasses_are_torchs():
    seen = []

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs)

    grad = torch.tensor([3.0, 4.0]).as_subclass(Loud)
    assert ak.get_total_norm([grad]).item() == 5.0
    assert {"_foreach_norm", "vector_norm", "linalg_vector_norm"} & set(seen)


def test_other_devices_are_torchs():
    assert ak.get_total_norm([torch.ones(3, device="meta")]).is_meta
    with pytest.raises(RuntimeError, match="can't use the foreach API on meta tensors"):
        ak.get_total_norm([torch.ones(3, device="meta")], foreach=True)


def test_norms_of_several_devices_are_summed_and_the_factor_goes_to_each(monkeypatch):
    """The lists of a device are told apart by its name alone, so two names for the CPU stand for two devices."""
    params = weights((F32, F16))
    before = grads(params)
    halves = {torch.device("cpu"): [], torch.device("cpu", 0): []}
    monkeypatch.setattr(clip, "by_device", lambda tensors: {d: list(tensors)[i::2] for i, d in enumerate(halves)})
    norm = ak.clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(norm.double(), norm_in_float64(before), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm_in_float64(grads(params)).item(), 0.5, rtol=1e-3, atol=0)


def test_the_infinity_norm_of_several_devices_is_the_largest(monkeypatch):
    params = weights((F32, F16))
    halves = {torch.device("cpu"): [], torch.device("cpu", 0): []}
    monkeypatch.setattr(clip, "by_device", lambda tensors: {d: list(tensors)[i::2] for i, d in enumerate(halves)})
    for tensor in grads(params):
        if tensor.numel():
            tensor.view(-1)[-1] = -77.0
            assert ak.get_total_norm([*grads(params), tensor], math.inf).item() == 77.0


def test_compiles():
    def clipped(params):
        return ak.clip_grad_norm_(params, 0.5)

    ours, theirs = weights((F32, F16)), weights((F32, F16))
    norm = torch.compile(clipped, backend="aot_eager", fullgraph=True)(ours)
    assert torch.equal(norm, clipped(theirs))
    assert all(torch.equal(a, b) for a, b in zip(grads(ours), grads(theirs), strict=True))
