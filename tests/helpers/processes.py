"""Programs that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .patience import PATIENCE

ROOT = Path(__file__).parents[2]


def run(*command: object, status: int | None = 0, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """The end of a command, with these variables beside the environment's, and its words. ``status``: what it must end with."""
    words, variables = [*map(str, command)], os.environ | environment
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert status in (None, done.returncode), f"it ended with {done.returncode}: {(done.stdout + done.stderr)[-12000:]}"
    return done


def python(*arguments: object, **options) -> subprocess.CompletedProcess:
    """:func:`run` of this interpreter."""
    return run(sys.executable, *arguments, **options)
