"""The exponential of the CPU's losses is right to 1.3 u, flushes nothing and keeps NaN."""

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def test_against_double_precision(tmp_path):
    program = tmp_path / "exp_of_logit"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", f"-I{HERE.parents[1] / 'csrc'}"]
    subprocess.run([compiler, *flags, HERE / "exp_of_logit.cpp", "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
