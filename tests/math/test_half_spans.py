"""The vector forms of fp16's conversions on the CPU give the bits of csrc/base/half.h."""

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def test_every_version_is_the_formula(tmp_path):
    program = tmp_path / "half_spans"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", f"-I{HERE.parents[1] / 'csrc'}"]
    subprocess.run([compiler, *flags, HERE / "half_spans.cpp", "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
