"""Lists of shadows that an optimizer renews before a step and stamps after it."""

import pytest
import torch

from amp_kernels.ops._shadows import ShadowList, fresh_shadow

BF16 = torch.bfloat16


@pytest.fixture(params=["as loaded", "Python"], autouse=True)
def _walks(request):
    if request.param == "Python":
        request.getfixturevalue("python_walks")


def make(count):
    params = [torch.full((3,), float(i)) for i in range(count)]
    return params, [torch.zeros(3, dtype=BF16) for _ in params]


def step(shadows, params, views):
    """As a step: weights and shadows change, and autograd hears of the weights alone."""
    shadows.renew()
    with torch.no_grad():
        for param, view in zip(params, views, strict=True):
            param += 1
            view.data.copy_(param)
    shadows.stamp()


def assert_fresh(params, views):
    for param, view in zip(params, views, strict=True):
        assert fresh_shadow(param, BF16) is view
        assert torch.equal(view, param.to(BF16))


def test_a_parameter_of_two_lists_follows_both():
    """As after a change of the groups: the parameters that have gradients are batched anew."""
    params, views = make(3)
    pairs = list(zip(params, views, strict=True))
    both, second = ShadowList(pairs), ShadowList(pairs[1:])
    for _ in range(2):
        step(both, params, views)
        assert_fresh(params, views)
        step(second, params[1:], views[1:])
        assert_fresh(params, views)
    step(both, params, views)
    second.renew()  # before a step that is skipped
    step(both, params, views)
    assert_fresh(params, views)


def test_another_copy_takes_the_place_of_the_first():
    params, views = make(1)
    step(ShadowList([(params[0], views[0])]), params, views)
    others = [torch.zeros(3, dtype=BF16)]
    step(ShadowList([(params[0], others[0])]), params, others)
    assert_fresh(params, others)
