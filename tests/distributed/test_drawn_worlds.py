"""Drawn at random: how each parameter is placed, which rank's piece of which gradient is infinite in which step."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from . import worlds
from .worlds import compare, everyone, grid, put

#: where a parameter may lie: a plain tensor, or on a mesh by a placement for each dimension; -1 replicates
PLACES = st.one_of(
    st.none(),
    st.tuples(st.just("everyone"), st.tuples(st.integers(-1, 1))),
    st.tuples(st.just("grid"), st.tuples(st.integers(-1, 1), st.integers(-1, 1))),
    st.tuples(st.sampled_from(["dp", "tp"]), st.tuples(st.integers(-1, 1))),
)
BAD = st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3)
OPTIONS = st.sampled_from(
    [
        ("AdamW", torch.float32, {}),
        ("AdamW", torch.bfloat16, {"master_weights": "split", "ema_decay": 0.9}),
        ("SGD", torch.float32, {"momentum": 0.9}),
        ("LAMB", torch.float32, {"use_nvlamb": True, "ema_decay": 0.9}),
        ("Lion", torch.bfloat16, {"state_dtype": torch.bfloat16}),
    ]
)


def drawn(places, bad, options, max_norm):
    """One of the parameters is on the whole grid, so that this contains all meshes."""

    def place(model):
        placed = []
        for param, at in zip(model.parameters(), [("grid", (0, -1)), *places], strict=True):
            if at is None:
                placed.append(None)
                continue
            name, dims = at
            mesh = everyone() if name == "everyone" else grid() if name == "grid" else grid()[name]
            placed.append((mesh, [Replicate() if d < 0 else Shard(min(d, param.dim() - 1)) for d in dims]))
        return put(model, placed)

    worlds.LAYOUTS["drawn"] = place
    weights, norm = compare("drawn", *options, max_norm, bad, steps=4)
    assert norm <= 4 * 2.0**-24
    assert weights <= (0.0 if max_norm is None else 2.0**-7)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.lists(PLACES, min_size=5, max_size=5), BAD, OPTIONS, st.sampled_from([None, 0.5]))
def test_any_placement_decides_as_one_process(ranks, places, bad, options, max_norm):
    ranks.run(drawn, places, bad, options, max_norm)
