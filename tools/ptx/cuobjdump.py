"""NVIDIA's tool that lists what a CUDA binary holds: the toolkit's, or the one that Triton brings."""

import shutil
import subprocess


def cuobjdump(*arguments, cwd=None) -> str:
    tool = shutil.which("cuobjdump")
    if tool is None:
        import triton

        tool = triton.knobs.nvidia.cuobjdump.path
    run = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout
