"""The machine code of symmetric products on Hopper: the main loop of every instance, and stores of both triangles. Needs nvcc, no GPU."""

from __future__ import annotations

import re

import pytest

from tools.ptx.cuobjdump import cuobjdump
from tools.sass.listing import parse
from tools.sass.main_loop import faults

from .machine_code import cubin_of

TILE = re.compile(r"TileILi(\d+)ELi(\d+)ELi\d+ELi1ELi(\d)ELb(\d)E")  # rows, columns, consumers, pingpong


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_instance(tmp_path, dtype):
    kernels = parse(cuobjdump("-sass", cubin_of(f"gemm/sm90/symmetric_{dtype}.cu", tmp_path)))
    assert len(kernels) == 6 + 2  # every tile with k-major operands, two with the other layout
    for name, code in kernels.items():
        rows, columns, consumers, pingpong = map(int, TILE.search(name).groups())
        slices = rows // (1 if pingpong else consumers) // 64
        boxes = slices * (columns // 64 + columns % 64 // 16)
        instructions = list(code.values())
        assert not faults(instructions, columns, slices)
        names = [".".join((instruction.name, *instruction.modifiers)) for instruction in instructions]
        # A box is staged twice, by one store of four 8 x 8 blocks for each 16 columns, and nothing is spilled. Across the
        # diagonal the threads store it.
        assert names.count("STSM.16.M88.4") == names.count("STSM.16.MT88.4") == slices * columns // 16
        assert sum(name.startswith("UTMASTG") for name in names) == 2 * boxes
        assert names.count("STG.E.128") == 2 * boxes
        assert not any(name.startswith(("STL", "LDL")) for name in names)
