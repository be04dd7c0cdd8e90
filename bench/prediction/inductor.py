"""Inductor's schedule of GPT-2's forward and backward on an H200, read without a GPU: the kernels and the bytes that they move.

python -m bench.prediction.inductor                 # torch.compile(model) and torch.compile(ak.convert(model)), gpt2-124m
python -m bench.prediction.inductor --layers 2 --kernels

The programs are traced on CPU tensors without values, moved to a GPU that is described instead of asked, and scheduled. Nothing is
compiled further or run. Attention is one op, as in `trace.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from functorch.compile import make_boxed_func
from torch._dynamo import device_interface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

import amp_kernels as ak

from ..training import gpt
from .trace import _Attention

GPU = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=140 << 30,
    L2_cache_size=50 << 20,
)


@dataclass(frozen=True)
class Schedule:
    """One program: bytes of Inductor's kernels, and the names and numbers of these and of other ops."""

    bytes: int
    kernels: Counter[str]
    ops: Counter[str]


class _Scheduled(Exception):
    """Ends a compilation."""


def schedules(model: gpt.GPT2Config, layers: int, converted: bool) -> list[Schedule]:
    """The schedules of the forward and the backward of the model with so many layers."""
    return [
        scheduled(*_moved(graph, inputs), options) for graph, inputs, options in _programs(model, layers, converted)
    ]


def _programs(model: gpt.GPT2Config, layers: int, converted: bool) -> list[tuple]:
    """The programs that torch.compile hands to Inductor, of CPU tensors: graph, inputs, options."""
    found = []

    def note(graph, inputs, **options):
        found.append((graph, list(inputs), options))
        return make_boxed_func(graph.forward)

    def attention(q, k, v, is_causal):
        return _Attention.apply(*(t.to(torch.bfloat16) for t in (q, k, v)))

    module, mode = gpt.GPT2(model, layers), FakeTensorMode()
    if converted:
        module = ak.convert(module)
        module.fused_loss = True
    for each in module.modules():
        for name, p in each._parameters.items():
            if p is not None:
                each._parameters[name] = torch.nn.Parameter(mode.from_tensor(p.detach()))
    torch._dynamo.reset()
    with mode, mock.patch.object(F, "scaled_dot_product_attention", attention):
        data = tuple(torch.zeros(model.batch, gpt.CONTEXT, dtype=torch.long) for _ in range(2))
        compiled = torch.compile(
            module, fullgraph=True, backend=lambda *args: compile_fx.compile_fx(*args, inner_compile=note)
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(*data)
        loss.backward()
    return found


def _moved(graph: torch.fx.GraphModule, inputs: list) -> tuple[torch.fx.GraphModule, list]:
    """The program on the GPU."""

    def moved(value):
        if isinstance(value, torch.device):
            return GPU
        if not isinstance(value, FakeTensor):
            return value
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, GPU)

    with mock.patch.object(fake_tensor, "init_gpu_context"):
        for node in graph.graph.nodes:
            if node.target is torch.ops.amp_kernels.column_sums.default:  # torch's where a compiler fuses it
                node.target, node.args = torch.ops.aten.sum.dim_IntList, (*node.args, [0])
                node.kwargs = {"dtype": torch.float32}
            node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, node.kwargs)
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])
        graph.recompile()
        return graph, [moved(value) for value in inputs]


def scheduled(graph: torch.fx.GraphModule, inputs: list, options: dict) -> Schedule:
    found = []

    def note(lowering):
        code = lowering.codegen()[0].value
        _, nodes, _ = lowering.count_bytes()
        extern = scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode
        # It counts elements of four bytes.
        moved = 4 * sum(count for node, count in nodes if not isinstance(node, extern))
        body = code[code.index("def call(") :]
        kernels = (re.sub(r"_\d+$", "", name) for name in re.findall(r"(triton_\w+)\.run\(", body))
        ops = re.findall(r"\b((?:amp_kernels|aten|bench|extern_kernels)\.\w+)(?:\.\w+)?\(", body)
        found.append(Schedule(int(moved), Counter(kernels), Counter(ops)))
        raise _Scheduled

    fake_mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    context = V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode))
    with _described_gpu(), context[0], context[1], mock.patch.object(GraphLowering, "compile_to_module", note):
        try:
            compile_fx.compile_fx_inner(graph, inputs, **options)
        except Exception:  # it wraps what is raised in an error of its own
            if not found:
                raise
    return found[0]


@contextlib.contextmanager
def _described_gpu() -> Iterator[None]:
    """Whoever asks for a GPU is told of an H200."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": H200,
        "get_device_capability": (9, 0),
        "is_initialized": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_lazy_init": None,
        "synchronize": None,
    }
    interface = device_interface.get_interface_for_device("cuda")
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        for owner, name, answer in (
            (interface, "get_device_properties", H200),
            (interface, "current_device", 0),
            (interface, "get_raw_stream", 0),
            (interface.Worker, "get_device_properties", H200),
            (interface.Worker, "current_device", 0),
            (scheduler, "has_triton", True),
            (fake_tensor, "init_gpu_context", None),
        ):
            told = staticmethod(lambda *_, answer=answer: answer)
            stack.enter_context(mock.patch.object(owner, name, told if isinstance(owner, type) else told.__func__))
        driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        yield


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prediction.inductor", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=gpt.GPT2_MODELS, default="gpt2-124m")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--kernels", action="store_true", help="also list the kernels and ops")
    options = parser.parse_args(argv)
    model = gpt.GPT2_MODELS[options.model]
    for name, converted in (("torch.compile", False), ("amp_kernels compile", True)):
        programs = schedules(model, options.layers or model.layers, converted)
        for program, found in zip(("forward", "backward"), programs, strict=True):
            made, called = found.kernels.total(), found.ops.total()
            print(
                f"{name:20} {program:9} {made:4} kernels, {found.bytes / 1e9:6.2f} GB; {called:4} other ops", flush=True
            )
            for each, count in (found.kernels + found.ops).most_common() if options.kernels else ():
                print(f"{count:6} x {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
