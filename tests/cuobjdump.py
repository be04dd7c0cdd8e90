"""NVIDIA's tool that lists what a CUDA binary holds: the toolkit's, or the one that Triton brings."""

import shutil
import subprocess


def cuobjdump(*arguments, cwd=None) -> str:
    from amp_kernels.testing.patience import PATIENCE  # here, since tests/ptx has a library to put in place before that

    tool = shutil.which("cuobjdump")
    if tool is None:
        import triton

        tool = triton.knobs.nvidia.cuobjdump.path
    run = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout
