"""pytest -p tests.ptx.plugin: the tests of the whole package meet a GPU, which is the interpreter."""

from .preloaded import set_chip

set_chip(90, 2)
