"""The recipes of docs/guide/sharding.md, as they stand there, on ranks; only devices and the size of a node are others here."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import amp_kernels as ak

from ..helpers.ranks import on_ranks
from .worlds import whole

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "sharding.md"
HERE = {
    '"cuda"': '"cpu"',
    ", 8)": ", 2)",
    "use_orig_params=True": 'use_orig_params=True, device_id=torch.device("cpu")',
}
WRAPPERS = ("DDP", "FSDP2", "HSDP", "TP under FSDP2", "FSDP1", "ZeRO")  # in the page's order


def blocks(heading):
    """The blocks of Python of a section, each in the parts that empty lines make."""
    section = f"\n{PAGE.read_text()}".partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    for there, here in HERE.items():
        section = section.replace(there, here)
    return [code.split("\n\n") for code in re.findall(r"^```python\n(.*?)\n```", section, re.M | re.S)]


def wrapper(name):
    *_, parts = blocks("## Wrappers")
    assert len(parts) == len(WRAPPERS)
    return parts[WRAPPERS.index(name)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp_in, self.mlp_out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.mlp_out(self.mlp_in(x).relu())


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(6, 8), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 6)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(12) % 6
TARGETS = (TOKENS + 1) % 6


def reader(**more):
    """The page's imports, and the reader's own code."""
    imports, _ = blocks("## Wrappers")
    names = {"model": Model(), "scaler": ak.GradScaler("cpu", init_scale=2.0**8), "nodes": 2, **more}
    names["data"] = dist.get_world_size() // 2
    return run("\n\n".join(imports), names)


def run(code, names):
    exec(compile(code, PAGE.name, "exec"), names)
    return names


def learn(names, steps=3):
    """The page's loop, over batches that all ranks share: the losses are those of one process."""
    ((loop,),) = blocks("# Distributed training")
    losses = []
    for _ in range(steps):
        names["optimizer"].zero_grad()
        names["loss"] = nn.functional.cross_entropy(names["model"](TOKENS), TARGETS)
        run(loop, names)
        losses.append(names["loss"].item())
    return torch.tensor([*losses, names["scaler"].last_grad_norm.item()])


@pytest.mark.parametrize("name", WRAPPERS)
@on_ranks(4)
def test_a_wrapper(name):
    alone = reader()
    alone["optimizer"] = ak.optim.AdamW(alone["model"].parameters(), lr=3e-4 if name == "ZeRO" else 1e-3)
    found, expected = learn(run(wrapper(name), reader())), learn(alone)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found[2] < found[1] < found[0]


@on_ranks(2)
def test_the_vocabulary():
    ((code, *more),) = blocks("## Vocabulary-parallel loss")
    assert not more
    names = reader(tokens=TOKENS, targets=TARGETS)
    names["mesh"] = names["init_device_mesh"]("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    run(code, names)["loss"].backward()
    alone = Model()
    loss = nn.functional.cross_entropy(alone(TOKENS), TARGETS)
    loss.backward()
    weight = names["model"].head.weight
    assert isinstance(weight, DTensor)
    torch.testing.assert_close(names["loss"].detach(), loss.detach())
    torch.testing.assert_close(weight.grad.full_tensor(), alone.head.weight.grad)


class Loss(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.model = ak.convert(Model(dtype))

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.model(tokens).float(), TARGETS)


def sums():
    ((code, *more),) = blocks("## FP32 sums of 16-bit gradients")
    assert not more
    names = run(code, reader(model=Loss(torch.bfloat16), micro_batches=[TOKENS] * 3))
    names["reducer"].remove()
    return [p.grad for p in names["model"].parameters()]


def test_fp32_sums(ranks):
    """3 micro-batches, and the average over 2 ranks that have the same: exactly the sums of one."""
    found = ranks.run(sums, world=2)
    alone = Loss(torch.bfloat16)
    with ak.nn.accumulate_fp32(alone):
        for _ in range(3):
            alone(TOKENS).backward()
        expected = [p.grad.clone() for p in alone.parameters()]
    for gradients in found:
        for grad, wanted in zip(gradients, expected, strict=True):
            assert wanted.dtype == torch.float32
            torch.testing.assert_close(grad, wanted, rtol=2.0**-20, atol=1e-7)


def saved_and_resumed(name, folder, save):
    """On each rank: losses of the steps after the checkpoint."""
    ((state, to_disk, from_disk),) = blocks("## Resuming with another number of processes")
    names = run(wrapper(name), reader(folder=folder, step=3, newest=f"{folder}/3"))
    if save:
        learn(names)
        run(state, names)
        run(to_disk, names)
    else:
        run(state, names)
        run(from_disk, names)
    return learn(names), names["scaler"].get_scale(), [whole(p.detach()) for p in names["model"].parameters()]


def test_resuming_with_another_number_of_processes_and_another_wrapper(ranks, tmp_path):
    losses, scale, weights = ranks.run(saved_and_resumed, "FSDP2", str(tmp_path), True, world=2)[0]
    for name, world in (("FSDP2", 4), ("TP under FSDP2", 4), ("DDP", 2)):
        for found, of_scaler, other in ranks.run(saved_and_resumed, name, str(tmp_path), False, world=world):
            torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other, weights, rtol=1e-4, atol=1e-5)
            assert of_scaler == scale


# ---- docs/guide/mixture-of-experts.md ----


@on_ranks(4)
def test_the_block_about_experts():
    """The page's block over a model whose experts differ, and gradients of ones."""
    page = PAGE.with_name("mixture-of-experts.md").read_text()
    (code,) = re.findall(
        r"```python\n(.*?)\n```", page.partition("\n## Several ranks\n")[2].partition("\n## ")[0], re.S
    )
    model, ep = nn.Module(), dist.get_rank() % 2
    model.blocks, model.head = nn.ModuleList([nn.Module(), nn.Module()]), nn.Linear(4, 6)
    for block in model.blocks:
        block.experts = nn.Linear(4, 8)
        nn.init.constant_(block.experts.weight, 1.0 + ep)
    names = {"model": model, "replicas": 2, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "ak": ak}
    exec(code.replace('"cuda"', '"cpu"').replace(", 8)", ", 2)"), names)
    scaler = ak.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for group, value in zip(names["optimizer"].param_groups, (1.0, 2.0 + ep), strict=True):
        for param in group["params"]:
            param.grad = torch.full_like(param, value)
    scaler.step(names["optimizer"])
    assert scaler.last_grad_norm.item() ** 2 == pytest.approx(30 + 2 * 40 * (4 + 9))
