"""Benchmarks: training (`train`), and a harness that times the ops against their peers (`run`, `ops/`, `step`)."""

import os

# These must be set before torch is imported, and apply to every provider alike. OpenMP threads that spin at barriers
# cost nothing on an idle machine, and a scheduler slice (milliseconds) per operator on a shared one. The other two keep
# the profiler that counts the CPU's memory from complaining of an absent GPU and of blocks older than itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
