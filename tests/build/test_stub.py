"""The stub of the compiled module says what is in it: names, arguments, defaults."""

import subprocess
import sys


def test_the_stub_is_that_of_the_module():
    run = subprocess.run([sys.executable, "-m", "mypy.stubtest", "amp_kernels._host"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
