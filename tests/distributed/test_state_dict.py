"""State dicts of optimizers on ranks: no process group in them, which cannot be pickled."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import amp_kernels as ak

from ..helpers.ranks import on_ranks


@on_ranks(1)
def test_no_state_dict_has_a_process_group():
    """Under any key, and what runs keeps its own, also where torch flattens the state."""
    model, group = torch.nn.Linear(3, 1), dist.group.WORLD
    optimizer = ak.optim.SGD([{"params": [*model.parameters()], "mine": group, "shard_group": group}], momentum=0.9)
    model(torch.ones(3)).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    torch.save(saved, io.BytesIO())
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(optimizer)
    optimizer.load_state_dict(saved)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer, options=flat), options=flat)
    for key in ("mine", "shard_group"):
        assert saved["param_groups"][0][key] is None
        assert optimizer.param_groups[0][key] is group
