"""Norms over DTensors on a part of a mesh, and over plain parameters of each rank: copies by evidence, experts by declaration."""

import itertools
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels._sharding.agreement import Agreement
from amp_kernels._sharding.evidence import _checksum
from amp_kernels._sharding.local import local
from amp_kernels.optim._options import MASTERS

from ..helpers.ops import Ops
from ..helpers.ranks import on_ranks
from .worlds import everyone, grid

SCALE, REFUSED = 8.0, "refused"
CLIPS = ("clip_grad_norm_", "get_total_norm", "AdamW", "LAMB", "Muon", "torch.SGD")
#: (weights differ between the ep ranks, gradients of the two by step, key, what happens by step: of how many experts the squares
#: count, or that they are refused). 0.0 as a gradient: none of it.
CASES = {
    "copies": (False, [(2.0, 2.0), (3.0, 3.0)], None, [1, 1]),
    "copies, rounded": (False, [(2.0, 2.01)] * 2, None, [1, 1]),
    "copies, decided once": (False, [(2.0, 2.0), (3.0, 3.0), (2.0, 2.0)], None, [1, 1, 1]),
    "experts": (True, [(1.0, 7.0)], None, [REFUSED]),
    "experts, equal norms": (True, [(2.0, 2.0)] * 2, None, [REFUSED] * 2),
    "experts, equal weights": (False, [(1.0, 7.0)], None, [REFUSED]),
    "experts, no gradient at first": (False, [(0.0, 0.0), (2.0, 0.0), (1.0, 7.0)], None, [1, 1, REFUSED]),
    "copies, no gradient at first": (False, [(0.0, 0.0), (2.0, 2.0), (3.0, 3.0)], None, [1, 1, 1]),
    "experts, NaN at first": (False, [(math.nan, 1.0), (1.0, 7.0)], None, [1, REFUSED]),
    "copies, infinite at first": (False, [(math.inf, math.inf), (2.0, 2.0)], None, [1, 1]),
    "group": (True, [(1.0, 7.0), (math.nan, 1.0), (2.0, 0.0)], "ep", [2, 2, 2]),
    "all ranks": (True, [(1.0, 7.0)], "all", [2]),
    "declared copies": (True, [(1.0, 7.0)], "copies", [1]),
    "the own mesh": (True, [(1.0, 7.0)], "edp", [REFUSED]),
}


def placed():
    """Of two ranks, both are ep."""
    return grid(("edp", "ep") if dist.get_world_size() > 2 else ("ep", "edp"))


def declared(key):
    mesh = placed()
    return dist.group.WORLD if key == "all" else mesh[key].get_group() if key in ("ep", "edp") else key


def sharded(value, mesh):
    return nn.Parameter(
        distribute_tensor(value, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1), src_data_rank=None)
    )


class Model:
    """A dense parameter on all ranks and experts on the edp slice, or plain ones under DDP, with gradients of known norms."""

    def __init__(self, name, width, differ, key, kind):
        mesh, self.ep = placed(), dist.get_rank() % 2
        weight = torch.arange(4.0 * width).view(4, width) / 8
        own = weight + 1.0 + self.ep * differ
        self.kind, self.name = kind, name
        self.dense = nn.Parameter(weight) if kind == "plain" else sharded(weight, everyone())
        self.experts = nn.Parameter(own) if kind != "sharded" else sharded(own, mesh["edp"])
        self.groups = [{"params": [self.dense]}, {"params": [self.experts]}]
        if key is not None:
            self.groups[1]["shard_group"] = declared(key)
        self.scaler = ak.GradScaler("cpu", init_scale=SCALE, backoff_factor=0.5, growth_interval=100)
        self.scaler.scale(torch.ones(()))
        make = getattr(torch.optim, name[6:]) if name.startswith("torch.") else getattr(ak.optim, name, None)
        self.optimizer = make(self.groups, lr=1e-3) if make else None

    def norm(self, size):
        """Gives the step its gradients, whose elements have these sizes before scaling. Returns the norm of all ranks, or REFUSED."""
        scale = self.scaler.get_scale() if self.optimizer else 1.0
        self.dense.grad = torch.full_like(self.dense, scale)
        self.experts.grad = torch.full_like(self.experts, size * scale) if size != 0.0 else None
        try:
            if self.optimizer is not None:
                before = [None if p.grad is None else local(p.grad).clone() for p in (self.dense, self.experts)]
                try:
                    self.scaler.step(self.optimizer, max_norm=1.0)
                except ValueError:
                    now = [p.grad if p.grad is None else local(p.grad) for p in (self.dense, self.experts)]
                    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, now, strict=True))
                    raise
                self.scaler.update()
                return self.scaler.last_grad_norm.item()
            if self.name == "get_total_norm":
                groups = [{**g, "params": [p.grad for p in g["params"]]} for g in self.groups]
                if size == 0.0:
                    groups[1]["params"] = [torch.zeros_like(self.experts)]
                return ak.get_total_norm(groups).item()
            return ak.clip_grad_norm_(self.groups, 1.0).item()
        except ValueError as error:
            return REFUSED if '"shard_group": ...}' in str(error) else str(error)


def check_norms(case, width, kind, names):
    differ, steps, key, _ = CASES[case]
    for name in names:
        model = Model(name, width, differ, key, kind)
        before = [local(p.detach()).clone() for p in (model.dense, model.experts)]
        values = [model.norm(sizes[model.ep]) for sizes in steps]
        if values[0] == REFUSED:
            now = [local(p.detach()) for p in (model.dense, model.experts)]
            assert all(map(torch.equal, before, now)), name
        for value, right in zip(values, expected(case, width), strict=True):
            if REFUSED in (value, right):
                assert value == right, name
            elif math.isnan(right):
                assert not math.isfinite(value), name
            else:
                assert value == pytest.approx(right, rel=1e-6), name


def expected(case, width):
    """The right norms; of a non-finite step ``nan``, of which only that is compared."""
    _, steps, _, counts = CASES[case]
    found = []
    for (first, second), count in zip(steps, counts, strict=True):
        squares = 4 * width * (1.0 + first**2 + (second**2 if count == 2 else 0.0)) if count != REFUSED else 0.0
        bad = not math.isfinite(first + second)
        found.append(REFUSED if count == REFUSED else math.nan if bad else squares**0.5)
    return found


@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_experts_and_copies_on_a_slice(case):
    width = 3 + list(CASES).index(case)  # get_total_norm knows lists by their shapes
    # get_total_norm sees no weights.
    names = [name for name in CLIPS if (case, name) != ("experts, equal norms", "get_total_norm")]
    check_norms(case, width, "sharded", names)


@pytest.mark.parametrize("case", ["copies", "experts", "experts, NaN at first", "group", "declared copies"])
@on_ranks(4)
def test_plain_experts_among_dtensors(case):
    check_norms(case, 40 + list(CASES).index(case), "among", CLIPS)


@pytest.mark.parametrize("case", ["group", "all ranks"])
@on_ranks(2)
def test_plain_experts_beside_ddp(case):
    """On two ranks, with a dense parameter that both have: without a key each has a norm of its own."""
    check_norms(case, 3, "plain", CLIPS)


# ---- other ranks than those of one slice ----


@on_ranks(8)
def test_every_element_of_eight_ranks_counts_once():
    """Counts of each tensor over all ranks, as multiples of its elements on the ranks over which it is distinct."""
    kinds = [
        ("edp", "ep", 2), ("edp", "tp", 2), ("tp", "ep", 2), ("edp, tp", "ep", 2), ("edp, tp", "copies", 1), ("edp", "copies", 1),
        ("edp", "edp", 1), ("edp", "all", 4), (None, "ep", 2), (None, "all", 8), (None, "copies", 1), ("all", "ep", 1),
    ]  # fmt: skip
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("edp", "ep", "tp"))
    of = {"edp": mesh["edp"], "tp": mesh["tp"], "edp, tp": mesh["edp", "tp"], "all": mesh}
    groups = {name: mesh[name].get_group() for name in ("edp", "ep", "tp")}
    groups = {**groups, "copies": "copies", "all": dist.group.WORLD, None: None}
    tensors, keys = [sharded(torch.ones(8), mesh)], [None]
    for placed, key, _ in kinds:
        tensors.append(sharded(torch.ones(8), of[placed]) if placed else nn.Parameter(torch.ones(8)))
        keys.append(groups[key])
    counts = Agreement(tensors, None, keys).counts
    found = torch.tensor([float(local(t).numel() * c) for t, c in zip(tensors, counts, strict=True)])
    dist.all_reduce(found)
    assert (found / 8).tolist() == [1.0, *(float(copies) for *_, copies in kinds)]


@on_ranks(4)
def test_experts_within_stages_of_a_pipeline():
    """Dense parameters of two stages, experts of ep ranks within each: the key replaces the optimizer's group where they overlap."""
    mesh = grid(("pp", "ep"))
    stage, ep, found = *mesh.get_coordinate(), []
    for key in (mesh["ep"].get_group(), dist.group.WORLD, "copies"):
        dense, experts = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        groups = [{"params": [dense]}, {"params": [experts], "shard_group": key}]
        optimizer = ak.optim.AdamW(groups, shard_group=mesh["pp"].get_group())
        scaler = ak.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        dense.grad, experts.grad = torch.full((4,), 1.0 + stage), torch.full((4,), 3.0 + 2.0 * stage + ep)
        scaler.step(optimizer, max_norm=1.0)
        found.append(scaler.last_grad_norm.item() ** 2 / 4)
    both, whole, copies = found
    assert both == whole == pytest.approx(1 + 4 + 9 + 16 + 25 + 36)
    assert copies in (pytest.approx(1 + 4 + 9), pytest.approx(1 + 4 + 16))


# ---- a key, every layout of masters and moments, and every way to a norm ----

LAYOUTS = [
    (dtype, {"state_dtype": state, "master_weights": masters})
    for state in (torch.float32, torch.bfloat16, "8bit")
    for dtype, masters in [(torch.float32, "fp32"), *((torch.bfloat16, m) for m in (*MASTERS, "none", "none_rne"))]
]
#: Gradients of the dense parameter and of each rank's experts, and the norm of all: exact, as a quarter of each is.
SIZES = {"group": (1.5, (0.375, 0.5), 104.0), "copies": (1.5, (2.0, 2.0), 160.0)}
WAYS = ("max_norm", "max_grad_norm", "unscale_", "clip_grad_norm_")


class Keyed:
    def __init__(self, dtype, layout, key=None, **options):
        values = torch.linspace(-1.0, 1.0, 4096, dtype=dtype).view(64, 64)
        self.weights = [nn.Parameter(values.clone()) for _ in range(2)]
        groups = [
            {"params": [weight], **of_group} for weight, of_group in zip(self.weights, ({}, key or {}), strict=True)
        ]
        self.optimizer = ak.optim.AdamW(groups, **layout, **options)

    def set_grads(self, sizes, factor):
        for weight, size in zip(self.weights, sizes, strict=True):
            weight.grad = torch.full_like(weight, size * factor)

    def state(self):
        return [*self.weights, *(v for state in self.optimizer.state.values() for v in dict.values(state))]


def steps_with_a_key(key, way, dtype, layout):
    """A step that one rank's value would make bad, skipped by both, and one that is clipped to a quarter of the norm of all: the bits of
    a step without key by a quarter of the gradients. Returns the norm."""
    dense, experts, norm = SIZES[key]
    sizes, at = (dense, experts[dist.get_rank()]), norm / 4
    declared = {"shard_group": dist.group.WORLD if key == "group" else key}
    ours = Keyed(dtype, layout, declared, max_grad_norm=at if way == "max_grad_norm" else None)
    scaler = ak.GradScaler("cpu", init_scale=SCALE, backoff_factor=0.5, growth_interval=100)
    scaler.scale(torch.ones(()))
    before = [weight.detach().clone() for weight in ours.weights]
    for bad in (True, False):
        ours.set_grads(sizes, scaler.get_scale())
        if bad and (key == "copies" or dist.get_rank() == 1):
            ours.weights[1].grad[3, 4] = math.nan
        if way in ("unscale_", "clip_grad_norm_"):
            scaler.unscale_(ours.optimizer)
        total = ak.clip_grad_norm_(ours.optimizer.param_groups, at) if way == "clip_grad_norm_" else None
        scaler.step(ours.optimizer, max_norm=at if way in ("max_norm", "unscale_") else None)
        scaler.update()
        if bad:
            assert all(map(torch.equal, ours.weights, before)), "a bad value of one rank did not skip the step"
    twin = Keyed(dtype, layout)
    twin.set_grads(sizes, 0.25)
    twin.optimizer.step()
    assert not torch.equal(twin.weights[1], before[1])
    assert all(map(torch.equal, ours.state(), twin.state())), "other bits than without key"
    return (scaler.last_grad_norm if total is None else total).item()


@on_ranks(2)
def test_a_key_with_every_layout_and_way_to_a_norm():
    for key, way, layout in itertools.product(SIZES, WAYS, LAYOUTS):
        assert steps_with_a_key(key, way, *layout) == SIZES[key][2], (key, way, layout)


# ---- what evidence costs, and what needs none ----


@pytest.mark.parametrize(
    ("case", "sums"), [("copies", [3, 3, 1]), ("group", [1, 1, 1]), ("declared copies", [1, 1, 1])]
)
@on_ranks(4)
def test_evidence_is_exchanged_until_it_decides(case, sums):
    """One sum over the slice, one maximum over the mesh; the step itself is one sum."""
    differ, _, key, _ = CASES[case]
    found, model = [], Model("AdamW", 70, differ, key, "sharded")
    for sizes in [(math.nan, 2.0), (2.0, 2.0), (2.0, 2.0)]:
        with Ops() as ops:
            model.norm(sizes[model.ep])
        found.append(ops.count("c10d"))
    assert found == sums


@on_ranks(4)
def test_a_step_without_a_norm_needs_no_evidence():
    """A step that only checks is taken; the norm of it is unknown. Undecided tensors are asked for in norms 1 to 32 and 64."""
    model, lines = Model("AdamW", 71, True, None, "sharded"), []
    before = local(model.experts.detach()).clone()
    model.dense.grad, model.experts.grad = torch.ones_like(model.dense), torch.ones_like(model.experts)
    model.scaler.step(model.optimizer)
    assert not torch.equal(before, local(model.experts.detach()))
    undecided = Model("clip_grad_norm_", 72, False, None, "sharded")
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(lambda record: "counts as copies" in record.msg)
    logger = logging.getLogger("amp_kernels")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        for _ in range(70):
            undecided.norm(0.0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert ak.clip_grad_norm_(model.groups, 1e9, norm_type=math.inf).item() == 1.0
    assert model.scaler.last_grad_norm is None
    assert len(lines) == 33
    assert "DeviceMesh((edp=2)" in lines[0]


@pytest.mark.parametrize("name", ["LAMB", "Muon"])
@on_ranks(4)
def test_updates_of_whole_tensors_are_of_each_expert_alone(name):
    """Distinct experts under Muon and LAMB, which need whole tensors: each as in one process."""
    ep = dist.get_rank() % 2
    model = Model(name, 32, True, "ep", "sharded")
    alone = [nn.Parameter(p.detach().full_tensor().clone()) for p in (model.dense, model.experts)]
    other = getattr(ak.optim, name)(alone, lr=1e-3)
    grads = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        for p, q, grad in zip((model.dense, model.experts), alone, (grads[0], grads[ep]), strict=True):
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            q.grad = grad.clone()
        model.optimizer.step()
        other.step()
    for p, q in zip((model.dense, model.experts), alone, strict=True):
        assert (p.detach().full_tensor() - q.detach()).abs().max() <= 2.0**-20


@on_ranks(4)
def test_graph_step_asks_in_its_first_warm_up():
    found = []
    for differ, key, sizes in [(False, None, (2.0, 2.0)), (False, None, (1.0, 7.0)), (False, "ep", (1.0, 7.0))]:
        model = Model("AdamW", 73, differ, key, "sharded")
        module = nn.Module()
        module.dense, module.experts = model.dense, model.experts

        calls = []

        def train(x, model=model, size=sizes[model.ep], calls=calls):
            calls.append(x)
            model.optimizer.zero_grad()
            model.dense.grad, model.experts.grad = (
                x * torch.ones_like(model.dense),
                size * x * torch.ones_like(model.experts),
            )
            model.scaler.step(model.optimizer, max_norm=1.0)
            model.scaler.update()
            return x * 1.0

        step = ak.graph_step(train, model=module, optimizer=model.optimizer, scaler=model.scaler)
        try:
            step(torch.full((), SCALE))
            found.append(model.scaler.last_grad_norm.item())
        except ValueError as error:
            found.append((REFUSED, len(calls)) if "shard_group" in str(error) else str(error))
    copies, refused, experts = found
    assert copies == pytest.approx((4 * 73 * (1 + 4)) ** 0.5)
    assert refused == (REFUSED, 1)
    assert experts == pytest.approx((4 * 73 * (1 + 1 + 49)) ** 0.5)


@on_ranks(4)
def test_the_key_of_a_group():
    """Declared later, kept by load_state_dict, checked."""
    model = Model("AdamW", 74, True, None, "sharded")
    first = model.norm(2.0)
    model.optimizer.param_groups[1]["shard_group"] = declared("ep")
    then = [model.norm(2.0) for _ in range(3)]
    state = model.optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("shard_group", None)
    model.optimizer.load_state_dict(state)
    then.append(model.norm(2.0))
    model.optimizer.param_groups[1]["shard_group"] = "copies"
    then.append(model.norm(2.0))
    for value, error in (("copy", ValueError), (3, TypeError)):
        with pytest.raises(error, match="shard_group of a group is"):
            ak.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "shard_group": value}])
        with pytest.raises(error, match="shard_group of a group is"):
            ak.clip_grad_norm_([{"params": [model.dense], "shard_group": value}], 1.0)
    with pytest.raises(ValueError, match="norm_type is 3, and a shard_group is given"):
        ak.clip_grad_norm_(
            [*model.groups[:1], {"params": [model.experts], "shard_group": declared("ep")}], 1.0, norm_type=3
        )
    with pytest.raises(ValueError, match="accepted: 'params' and 'shard_group'"):
        ak.get_total_norm([{"shard_group": "copies"}])
    assert first == REFUSED
    assert [value**2 / (4 * 74) for value in then] == pytest.approx([9, 9, 9, 9, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_tells_places_apart(dtype):
    """Experts that are each other's permutation are no copies."""
    weight = torch.arange(1, 13).view(3, 4).to(dtype)
    others = [weight.flip(0), weight.flip(1), weight[:, [1, 0, 2, 3]], weight[[0, 2, 1]], weight + (weight == 5)]
    found = {_checksum(each.contiguous()).item() for each in (weight, *others)}
    assert len(found) == 1 + len(others)
