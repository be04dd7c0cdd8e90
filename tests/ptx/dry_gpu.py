"""python -m tests.ptx.dry_gpu MODULE ...: python -m MODULE ... on a GPU that computes nothing (tools/ptx/dry.py).

The processes that bench.gpu starts run so, too; pytest runs on the interpreter.
"""

import importlib
import os
import sys

import torch

from tools.ptx import dry, triton_driver

from .preloaded import machine, set_chip

H200 = 90, 132
PATIENCE = 10  # times the seconds of a part
# The cases stay, or most of them; there are fewer layers, rows and turns.
SMALLER = {
    "bench.run": ["--quick"],
    "bench.gpt2": ["--layers", "1", "--batch", "1", "--steps", "1", "--rounds", "1"],
    "bench.resnet": ["--batch", "2", "--size", "32", "--steps", "1", "--rounds", "1"],
    "pytest": ["-k", "column_sums and cuda"],
}


def main(module: str, *arguments: str) -> int:
    if module == "pytest":
        import pytest

        return pytest.main(["-p", "tests.ptx.plugin", *arguments])
    install()
    status = importlib.import_module(module).main(list(arguments))
    print(f"launches that may overlap: {sum(launch.may_overlap for launch in machine().prepared)}", flush=True)
    return status


def install() -> None:
    it = machine()
    dry.install(it)
    triton_driver.install(it)
    set_chip(*H200)
    torch.compile = lambda function: function  # Inductor compiles in processes of its own, with Triton's driver
    torch.backends.cudnn.enabled = False  # its batch norms have no kernel for shapes alone
    from bench import gpt2, gpu, resnet, run
    from bench.harness import check, timer

    # Zeros are no results, and no profiler listens to the interpreter.
    check._row_error = lambda got, want: 0.0
    gpt2.exact_loss = lambda model, data: 1.0
    gpt2.LOSS_BOUND = 1.0
    resnet.STAGES = tuple((width, 1) for width, _ in resnet.STAGES)
    launched = it.launched

    def kernels(call, device):
        before = len(launched)
        call()
        return [(name, 1, 1.0) for name in launched[before:]]

    timer.Effort.of = classmethod(lambda cls, device, quick: cls(0.02, 0.0, 0.0, rounds=2))
    timer.kernel_times = gpt2.kernel_times = kernels
    start, measure = gpu.run, run.measure

    def until_the_end(case, *rest):
        if case.name == os.environ.get("DRY_ENDS_IN"):  # as when a machine goes away
            os.kill(os.getppid(), 9)
            os._exit(1)
        return measure(case, *rest)

    run.measure = until_the_end

    def smaller(name, command, *rest, **options):
        python, _, started, *words = command
        return start(name, [python, "-m", "tests.ptx.dry_gpu", started, *words, *SMALLER[started]], *rest, **options)

    gpu.run = smaller
    gpu.FIRST = tuple((name, PATIENCE * seconds, *how) for name, seconds, *how in gpu.FIRST)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
