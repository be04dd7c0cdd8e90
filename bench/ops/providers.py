"""Cases that compare amp_kernels with other providers: by the backend its policy picks and, on a GPU, also by Triton."""

from collections.abc import Callable

import torch

import amp_kernels as ak
from amp_kernels._dispatch import policy
from amp_kernels._dispatch.library import REGISTRY

from ..harness.case import Call, Case, Prepare, Tensors, WithFacts

Function = Callable[..., torch.Tensor]


def compared(
    kernel: str,
    device: torch.device,
    own: Prepare,
    providers: dict[str, Prepare],
    last: dict[str, Prepare] | None = None,
    **case,
) -> Case:
    """A case of `providers`, then amp_kernels, whose call `own` prepares, then `last`; the raw op `kernel` decides its backends, and
    is the case's `op` if that has no other name."""
    ours = {"amp_kernels": own}
    chosen = backends(kernel, device)
    if device.type == "cuda" and REGISTRY[kernel].built.triton and chosen.get("amp_kernels") != "triton":
        ours["amp_kernels:triton"] = lambda inputs: _under("triton", own, inputs)
    return Case(**{"op": kernel, **case}, providers={**providers, **ours, **(last or {})}, backends=chosen)


def backends(kernel: str, device: torch.device) -> dict[str, str]:
    """The backend the policy picks for a raw op: recorded in the rows. Empty for a GPU that is not here."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return {}
    return {"amp_kernels": policy.select(REGISTRY[kernel], torch.empty(0, device=device))}


def _under(backend: str, prepare: Prepare, inputs) -> Call:
    with ak.backend(backend):
        call = prepare(inputs)

    def forced():
        with ak.backend(backend):
            return call()

    return WithFacts(forced, call.facts) if isinstance(call, WithFacts) else forced


def differentiable(
    kernel: str,
    device: torch.device,
    own: Function,
    functions: dict[str, Function],
    *,
    leaves: int = 1,
    bound: float,
    backward: bool = True,
    autocast: bool = False,
    reference: Function | None = None,
    **case,
) -> Case:
    """A case of functions of tensors.

    `inputs` draws the first arguments, which get gradients (`leaves` of them), the other arguments, and last the
    gradient of the result, None for that of a loss. `autocast` runs the functions under autocast to bf16. The
    reference is torch's function, or another, in float64; `bound` is the largest relative error of all results.
    """

    def prepared(function: Function) -> Prepare:
        return lambda tensors: timed_call(function, tensors, leaves, backward, device.type if autocast else None)

    def in_double(tensors: Tensors) -> dict:
        double = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
        want = timed_call(reference or functions["torch"], double, leaves, backward)()
        return {name: (value, bound) for name, value in want.items()}

    providers = {name: prepared(function) for name, function in functions.items()}
    return compared(kernel, device, prepared(own), providers, reference=in_double, **case)


def timed_call(
    function: Function, tensors: Tensors, leaves: int, backward: bool = True, autocast: str | None = None
) -> Call:
    """The result and, with `backward`, the gradients of the first `leaves` tensors. The last tensor is the result's gradient."""
    *arguments, grad = tensors
    arguments[:leaves] = [leaf.detach().requires_grad_() for leaf in arguments[:leaves]]

    def forward() -> torch.Tensor:
        if autocast is None:
            return function(*arguments)
        with torch.autocast(autocast, torch.bfloat16):
            return function(*arguments)

    def without() -> dict:
        with torch.no_grad():
            return {"out": forward()}

    def both() -> dict:
        out = forward()
        of_out = None if grad is None else grad.to(out.dtype)
        grads = torch.autograd.grad(out, arguments[:leaves], of_out)
        return {"out": out.detach(), **{f"grad {i}": grad for i, grad in enumerate(grads)}}

    return both if backward else without


def compiled(functions: dict[str, Function], when: bool) -> dict[str, Function]:
    """With torch's function compiled, too, where that is worth its seconds."""
    return functions | ({"torch.compile": torch.compile(functions["torch"])} if when else {})
