"""Rows that the blocks of a cluster share in norm_backward, and their gradients in float64."""

import torch

COLUMNS = {8200: 4, 16_392: 8, 32_776: 8}  # and the blocks of the cluster


def shared_rows(columns: int, dtype: torch.dtype, rows: int = 3):
    """(grad, x, rstd, mean, weight, grad_sum) on the GPU, and the gradients of x and of the weight. Sums over rows are exact: all values
    are small integers, and rstd is a power of two."""
    generator = torch.Generator().manual_seed(columns)
    grad, x, added = (torch.randint(-8, 9, (rows, columns), generator=generator).to(dtype) for _ in range(3))
    weight = torch.randint(-8, 9, (columns,), generator=generator).to(dtype)
    mean, rstd = torch.arange(rows) % 3 - 1.0, 2.0 ** (torch.arange(rows) % 2)
    n = (x.double() - mean[:, None]) * rstd[:, None]
    g = grad.double() * weight.double()
    out = rstd[:, None] * (g - g.mean(1, keepdim=True) - n * (g * n).mean(1, keepdim=True)) + added.double()
    arguments = [t.cuda() for t in (grad, x, rstd.float(), mean.float(), weight, added)]
    return arguments, (out.cuda(), (grad.double() * n).sum(0).cuda())
