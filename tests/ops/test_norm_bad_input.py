"""layer_norm and rms_norm with arguments that do not fit."""

import pytest
import torch

import amp_kernels as ak


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"normalized_shape is \[5\] and x has shape \[3, 4\]", (torch.ones(3, 4), 5)),
        (ValueError, r"normalized_shape is \[\]", (torch.ones(3, 4), [])),
        (ValueError, r"weight has shape \[5\]; accepted: \[4\]", (torch.ones(3, 4), 4, torch.ones(5))),
        (TypeError, "weight has dtype float64", (torch.ones(3, 4), 4, torch.ones(4).double())),
        (TypeError, "x has dtype int64", (torch.ones(3, 4).long(), 4)),
    ],
)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_errors_name_the_argument(kind, error, message, arguments):
    with pytest.raises(error, match=f"{kind}: {message}"):
        getattr(ak, kind)(*arguments)


def test_a_residual_of_another_shape_is_no_broadcast():
    with pytest.raises(ValueError, match=r"layer_norm: residual has shape \[4\]; accepted: \[3, 4\]"):
        ak.layer_norm(torch.ones(3, 4), 4, residual=torch.ones(4))
