"""Groups for the tests of grouped products, and these products by loops over the groups."""

import itertools

import torch

from amp_kernels._checks.activations import ACTIVATIONS


def ends(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def partitions(most_rows, most_groups):
    """``(total, ends)``: all ascending ends of up to ``most_groups`` groups within up to ``most_rows`` rows."""
    for total in range(most_rows + 1):
        for groups in range(most_groups + 1):
            for found in itertools.combinations_with_replacement(range(total + 1), groups):
                yield total, found


def ranges(offs):
    found = offs.tolist()
    return list(itertools.starmap(slice, zip([0, *found], found, strict=False)))


def by_rows(product, a, b, offs, columns=None):
    """``product(rows of a, b[g], g)`` in float64, zeros past the last end."""
    out = torch.zeros(a.shape[0], b.shape[-1] if columns is None else columns, dtype=torch.float64, device=a.device)
    for g, rows in enumerate(ranges(offs)):
        out[rows] = product(a[rows], b[g], g)
    return out


def rows_in_float64(a, b, offs, bias=None, activation="none"):
    def product(a, b, g):
        z = a.double() @ b.double()
        z = z if bias is None else z + (bias if bias.ndim == 1 else bias[g]).double()
        return ACTIVATIONS[activation](z)

    return by_rows(product, a, b, offs, b.shape[-1] // 2 if activation == "swiglu" else None)


def sums_in_float64(a, b, offs):
    found = [a[:, terms].double() @ b[terms].double() for terms in ranges(offs)]
    return torch.stack(found) if found else torch.zeros(0, a.shape[0], b.shape[1], dtype=torch.float64)


def poison_behind(tensor, offs, dim):
    """NaN in all rows, terms or columns past the last end."""
    end = offs[-1].item() if len(offs) else 0
    tensor.narrow(dim, end, tensor.shape[dim] - end).fill_(torch.nan)
    return tensor
