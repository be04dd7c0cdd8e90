"""Triton kernels, a file for each family of ops: the kernels and, for each op, a function of its name and signature."""

import triton

if triton.knobs.runtime.interpret:
    from . import _interpreter

    _interpreter.correct()
