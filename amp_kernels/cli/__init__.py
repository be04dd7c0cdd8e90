"""The commands of ``python -m amp_kernels``."""
