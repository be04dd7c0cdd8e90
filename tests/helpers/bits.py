"""Bitwise comparison, except that all NaNs are equal: their payloads are unspecified."""

import torch

CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    codes = CODES[actual.element_size()]
    same = actual.view(codes) == expected.view(codes)
    if actual.is_floating_point():
        same |= actual.isnan() & expected.isnan()
    wrong = (~same).nonzero()
    assert not len(wrong), (
        f"{what} differs at {len(wrong)} places, first {wrong[0].tolist()}: "
        f"{actual[tuple(wrong[0])].item()!r}, expected {expected[tuple(wrong[0])].item()!r}"
    )
