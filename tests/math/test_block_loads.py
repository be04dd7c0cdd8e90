"""csrc/base/tensor_list.h: how the elements of a list are shared out among the blocks of a launch."""

import random

import pytest

from amp_kernels import _host
from bench.ops.lists import LISTS, numel

SM_COUNTS = [132, 114, 108, 78, 148]  # H100 SXM and H200, H100 PCIe, A100, H20, B200
BLOCKS_PER_SM = [1, 2, 3, 4]


@pytest.mark.parametrize("blocks_per_sm", BLOCKS_PER_SM)
@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("name", LISTS)
def test_blocks_have_equal_loads(name, sm_count, blocks_per_sm):
    numels = [numel([shape]) for shape in LISTS[name]()]
    launches = _host.block_loads(numels, sm_count * blocks_per_sm)
    assert sum(elements for launch in launches for _, elements in launch) == sum(numels)
    for launch in launches:
        assert len(launch) <= sm_count * blocks_per_sm
        units, elements = zip(*launch, strict=True)
        assert sum(units) / len(units) >= 0.97 * max(units)
        assert max(units) - min(units) <= 1
        if sum(numels) > 10_000_000:  # in shorter lists small tensors fill a good part of the units
            assert sum(elements) / len(elements) >= 0.97 * max(elements)


def test_every_element_belongs_to_one_block():
    """Random lists, with empty tensors, tensors of many runs and more tensors than a launch takes."""
    draw = random.Random(0)
    for _ in range(60):
        count = draw.choice([0, 1, 2, 5, 40, 528, 529, 1100])
        numels = [draw.choice([0, 1, 1023, 1024, 1025, draw.randrange(200_000)]) for _ in range(count)]
        launches = _host.block_loads(numels, draw.choice([1, 2, 7, 264, 592]))
        assert len(launches) == -(-sum(n > 0 for n in numels) // 528)
        assert sum(elements for launch in launches for _, elements in launch) == sum(numels)
        units = sum(units for launch in launches for units, _ in launch)
        assert units == sum(-(-n // 1024) for n in numels)
