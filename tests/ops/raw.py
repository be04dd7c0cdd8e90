"""Raw ops with the arguments and results that tests want."""

from amp_kernels._dispatch.policy import requested_backend
from amp_kernels._raw._product import output_shape
from amp_kernels._raw.activation_backward import op as activation_backward_op
from amp_kernels._raw.gemm import gemm_accumulate_op, gemm_op
from amp_kernels._raw.gemm import gemm_dact_op as gemm_dact  # noqa: F401


def gemm(a, b, bias=None, residual=None, *, activation=None, preact=False, **options):
    """``residual`` broadcasts; ``preact``: a pair with the pre-activation."""
    activation = activation or "none"
    if residual is not None:
        residual = residual.expand(output_shape(a, b, activation))
    out, z = gemm_op(a, b, bias, residual, activation=activation, preact=preact, **options)
    return (out, z) if preact else out


def gemm_accumulate_(c, a, b, **options):
    gemm_accumulate_op(c, a, b, **options)
    return c


def activation_backward(grad, preact, *, activation, bias_grad=False):
    """``bias_grad``: a pair with the sums."""
    dz, sums = activation_backward_op(grad, preact, activation=activation, bias_grad=bias_grad)
    return (dz, sums) if bias_grad else dz


def as_torch_op(op):
    """The op as ``torch.ops`` reaches it in an install without C++ kernels, where the backend in force is written in Python."""
    return op._without_cpp_kernel if requested_backend() in ("reference", "triton", "aten") else op
