"""pytest -p tests.ptx.plugin: tests meet a GPU, which is the interpreter, from the first import of the package on."""

from .preloaded import set_chip

set_chip(90, 2)
