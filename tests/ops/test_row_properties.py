"""The ops between the products, over any combination of backend, shape, dtypes, place in memory and options, within the bounds of the
arithmetic. Whatever lies beside an operand is NaN."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_kernels as ak
from amp_kernels._raw._norm import statistics
from amp_kernels._raw.embedding_accumulate import op as embedding_op
from amp_kernels._raw.norm_backward import op as norm_backward_op
from amp_kernels._raw.norm_forward import op as norm_forward_op
from amp_kernels._raw.rotary import forward_op as rotary_op
from amp_kernels.testing.bounds import assert_within, norm_backward_bound, norm_forward_bound
from amp_kernels.testing.poison import embed, poisoned_allocations

from . import test_activation, test_cross_entropy, test_embedding, test_linear_cross_entropy, test_rotary
from .targets import backends_on_cpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
dtypes = st.sampled_from(DTYPES)
rows = st.integers(0, 9)
#: Also around the widths at which kernels change their ways: a vector, what a warp or a tile holds.
columns = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 127, 128, 129, 255, 256, 257, 512, 600, 1032]))
drawn = settings(max_examples=100, deadline=None, derandomize=True)


class Draw:
    """The choices of one example, by name, and tensors of them."""

    def __init__(self, data, op=None):
        self.data = data
        if op is not None:
            self.backend = self.one_of("backend", [name for name in backends_on_cpu(op) if name != "reference"])
        self.generator = torch.Generator().manual_seed(self(st.integers(0, 2**31), "seed"))

    def __call__(self, strategy, label):
        return self.data.draw(strategy, label=label)

    def one_of(self, label, values):
        return self(st.sampled_from(list(values)), label)

    def flag(self, label):
        return self(st.booleans(), label)

    def tensor(self, label, *shape, dtype=None):
        """Normal numbers anywhere in memory."""
        dtype = dtype or self(dtypes, f"dtype of {label}")
        return self.placed(label, torch.randn(shape, generator=self.generator).to(dtype))

    def placed(self, label, t):
        options = {"offset": self(st.integers(0, 9), f"offset of {label}"), "pad": self(st.integers(0, 9), "pad")}
        options["step"] = self(st.integers(1, 2), f"step of {label}")
        if t.ndim < 2:
            return embed(t[None], **options)[0][0]
        return embed(t, transposed=self.flag(f"{label} transposed"), **options)[0]

    def maybe(self, label, *shape):
        return self.tensor(label, *shape) if self.flag(label) else None


@drawn
@given(data=st.data())
def test_norms(data):
    draw = Draw(data, norm_forward_op)
    shape = draw(rows, "rows"), draw(columns, "columns")
    x, weight, bias = draw.tensor("x", *shape), draw.maybe("weight", shape[1]), draw.maybe("bias", shape[1])
    residual = draw.maybe("residual", *shape)
    options = {
        "eps": draw.one_of("eps", [1e-6, 0.1]),
        "centred": draw.flag("centred"),
        "out_dtype": draw(dtypes, "out"),
    }
    with ak.backend(draw.backend), poisoned_allocations():
        y, total, mean, rstd = norm_forward_op(x, weight, bias, residual, **options)
    if residual is None:
        total = x
    else:
        assert torch.equal(total, (x.float() + residual.float()).to(residual.dtype))
    assert_within(y, *norm_forward_bound(total, weight, bias, **options), "y")
    want = statistics(total.float(), options["eps"], options["centred"])
    torch.testing.assert_close(rstd, want[1], rtol=1e-5, atol=0)
    mean = mean if options["centred"] else None

    grad, grad_sum = draw.tensor("grad", *shape), draw.maybe("grad_sum", *shape)
    parameters = draw(st.integers(0, 2), "parameters")
    branch_dtype = draw(dtypes, "branch") if draw.flag("branches") else None
    with ak.backend(draw.backend), poisoned_allocations():
        of_x, sums, of_branch = norm_backward_op(
            grad, total, rstd, mean, weight, grad_sum, parameters=parameters, branch_dtype=branch_dtype
        )
    dx, dx_bound, want_sums, sums_bound = norm_backward_bound(grad, total, rstd, mean, weight, grad_sum)
    assert_within(of_x, dx, dx_bound, "grad_x")
    assert_within(sums, want_sums[:parameters], sums_bound[:parameters], "sums")
    if branch_dtype is not None:
        assert torch.equal(of_branch, of_x.to(branch_dtype))


@drawn
@given(data=st.data())
def test_rotary_embedding(data):
    draw = Draw(data, rotary_op)
    width = 2 * draw(st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 100, 128])), "half of the width")
    turning = 2 * draw(st.integers(1, width // 2), "half of what turns") if draw.flag("partial") else width
    batch, tokens, dtype = draw(st.integers(1, 2), "batch"), draw(st.integers(1, 9), "tokens"), draw(dtypes, "dtype")
    q, k = (draw.tensor(name, batch, draw(st.integers(1, 5), "heads"), tokens, width, dtype=dtype) for name in "qk")
    leading, angles = draw.one_of("leading", [(), (1,), (batch,)]), draw(dtypes, "dtype of angles")
    cos, sin = (draw.tensor(name, *leading, tokens, turning, dtype=angles) for name in ("cos", "sin"))
    of_weights = draw(dtypes, "dtype of weights")
    weights = [draw.tensor(f"{name}_weight", width, dtype=of_weights) for name in "qk"] if draw.flag("normed") else []
    with ak.backend(draw.backend):
        test_rotary.check(q, k, cos, sin, *weights, interleaved=draw.flag("interleaved"))


@drawn
@given(data=st.data())
def test_losses(data):
    draw = Draw(data, test_cross_entropy.op)
    shape, dtype = (draw(st.integers(1, 9), "rows"), draw(columns, "classes")), draw(dtypes, "dtype")
    logits, target, weight = test_cross_entropy.problem(*shape, dtype, ignored=False)
    weight = weight if draw.flag("weighted") else None
    with ak.backend(draw.backend):
        test_cross_entropy.check(draw.placed("logits", logits.detach()), target, weight)


@drawn
@given(data=st.data())
def test_gradient_of_an_embedding(data):
    draw = Draw(data, embedding_op)
    size, entries = draw(st.integers(1, 40), "rows"), draw(st.integers(0, 70), "entries")
    weight = draw.tensor("weight", size, draw(columns, "columns"))
    indices = torch.randint(size, (entries,), generator=draw.generator)
    indices[: draw(st.integers(0, entries), "of one row")] = size // 2
    grad = draw.tensor("grad", entries, weight.shape[1], dtype=weight.dtype)
    padding = draw(st.one_of(st.none(), st.integers(-size, size - 1)), "padding_idx")
    with ak.backend(draw.backend):
        test_embedding.check(weight, indices, grad, padding_idx=padding, scale_grad_by_freq=draw.flag("by frequency"))


@drawn
@given(data=st.data())
def test_activations(data):
    draw = Draw(data, test_activation.forward_op)
    name = draw.one_of("activation", test_activation.FUNCTIONS)
    width = draw(columns, "columns") * (2 if name == "swiglu" else 1)
    with ak.backend(draw.backend):
        test_activation.check(draw.tensor("x", draw(rows, "rows"), width), name)


@drawn
@given(data=st.data())
def test_casts(data):
    draw = Draw(data, ak.ops.cast.op)
    sources, destinations, want = [], [], []
    for i in range(draw(st.integers(1, 5), "tensors")):
        shape = draw(rows, "rows"), draw(columns, "columns")
        t = torch.randn(shape, generator=draw.generator).to(draw(dtypes, "from")) * draw.one_of("scale", [1e-6, 1, 1e6])
        places = [
            torch.empty(t.numel() + 9, dtype=dtype)[(at := draw(st.integers(0, 9), f"offset {i}")) : at + t.numel()]
            for dtype in (t.dtype, draw(dtypes, "to"))
        ]
        turned = draw.flag("transposed")
        source, destination = (p.view(shape[::-1]).t() if turned else p.view(shape) for p in places)
        sources.append(source.copy_(t))
        destinations.append(destination)
        want.append(t.to(destination.dtype))
    with ak.backend(draw.backend):
        ak.cast_(destinations, sources)
    for got, expected in zip(destinations, want, strict=True):
        assert torch.equal(got, expected)


@drawn
@given(data=st.data())
def test_head_and_loss(data):
    draw = Draw(data)
    size, classes = draw(st.integers(2, 30), "rows"), draw(st.integers(2, 70), "classes")
    dtype, reduction = draw(dtypes, "dtype"), draw.one_of("reduction", ["mean", "sum", "none"])
    problem = test_linear_cross_entropy.problem(
        size, draw(st.integers(8, 40), "features"), classes, dtype, draw.flag("bias")
    )
    x, weight, target, bias = problem
    x, weight = (draw.placed(label, t.detach()).requires_grad_() for label, t in (("x", x), ("weight", weight)))
    class_weight = torch.rand(classes, generator=draw.generator) + 0.5 if draw.flag("class weight") else None
    options = {
        "reduction": reduction,
        "label_smoothing": draw.one_of("label_smoothing", [0.0, 0.1]),
        "z_loss": draw.one_of("z_loss", [0.0, 0.01]),
    }
    with ak.backend("cpu"):  # products are slow on the emulator, and have their own tests
        loss = ak.linear_cross_entropy(
            x, weight, target, linear_bias=bias, weight=class_weight,
            chunk_size=draw(st.integers(1, 40), "chunk"), **options,
        )  # fmt: skip
        upstream = torch.ones_like(loss)
        leaves = [t for t in (x, weight, bias) if t is not None]
        grads = torch.autograd.grad(loss, leaves, upstream)
    want, want_grads = test_linear_cross_entropy.reference(
        x, weight, target, bias, upstream.double(), class_weight, **options
    )
    for got, expected in zip((loss.detach(), *grads), (want, *want_grads), strict=True):
        test_linear_cross_entropy.assert_close(got, expected, dtype)
