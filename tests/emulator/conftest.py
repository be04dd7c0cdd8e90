import pytest


@pytest.fixture(params=["8.0", "9.0"])
def capability(request, monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", request.param)
    return request.param
