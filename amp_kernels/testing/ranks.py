"""Several processes of torch.distributed, for tests: a file starts itself once per rank, over gloo on the CPU.

Not torch.multiprocessing, whose children import the test module by name and so depend on the folder pytest runs in.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(script: str, world: int, folder: Path, timeout: float = 240.0) -> list[Any]:
    """Run ``script``, which calls :func:`be_a_rank`, as ``world`` processes; what each returned, by rank.

    Args:
        script: path of a Python file.
        world: number of processes.
        folder: an empty folder for the processes to meet in.
        timeout: seconds.

    Raises:
        AssertionError: a process failed; the message is its output.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"rank {rank}:\n{output}"
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def be_a_rank(work: Callable[[], Any]) -> None:
    """What the started file does: join the group, work, leave the result for :func:`run_ranks`."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    result = work()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()  # a thread of gloo that outlives the group ends the process with an error
    dist.destroy_process_group()
