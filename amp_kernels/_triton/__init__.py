"""Triton kernels, one file per op: the kernel and ``launch``, which has the op's own signature."""
