"""An op on the emulator and on the CPU: the same bits, and the kernels that were launched; operands that lie in every way."""

import torch

import amp_kernels as ak

from ..helpers.emulator import launches

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


def integers(*shape, dtype=bf16, seed=0):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another place: transposed, with rows apart, after an odd element, or strided both ways."""
    if how == "transposed":
        return tensor.mT.contiguous().mT
    if how == "transposed apart":
        return laid(tensor.mT, "apart").mT
    if how == "apart":
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 8), torch.nan, dtype=tensor.dtype)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    if how == "odd":
        flat = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    if how == "strided":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def copied(value):
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value if value is None else value.clone()


def assert_same_on_both(call, *inputs):
    """`call(*inputs)` on both, on copies: results, and what became of the inputs. Returns the names of the kernels."""
    outcomes, names = [], []
    for backend in ("emulate", "cpu"):
        copies = [copied(value) for value in inputs]
        with ak.backend(backend), torch.no_grad():
            outcomes.append(tensors([call(*copies), copies]))
        names = names or [launch.name for launch in launches()]
    torch.testing.assert_close(*outcomes, rtol=0, atol=0, equal_nan=True, check_stride=True)
    return names
