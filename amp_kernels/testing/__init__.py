"""Shared by tests and benchmarks: input generators, error bounds, NaN poisoning, the comparison of backends. Installed, so that
``info --check`` can use it."""
