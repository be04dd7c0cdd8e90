import functools

import pytest

from .gemm_instance import compile_instance


@pytest.fixture(scope="session")
def gemm_instance(tmp_path_factory):
    """(tile, fp32 output) -> the compiled instance; each is compiled once."""

    @functools.cache
    def compiled(tile, as_float=False):
        return compile_instance(tmp_path_factory.mktemp("gemm"), tile, as_float)

    return compiled
