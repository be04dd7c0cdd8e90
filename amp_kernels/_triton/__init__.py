"""Triton kernels, one file per op: the kernel and ``launch``, which has the op's own signature."""

import triton

if triton.knobs.runtime.interpret:
    from . import _interpreter

    _interpreter.correct()
