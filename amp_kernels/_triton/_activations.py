"""The activations of csrc/math/activation.h for Triton: the same formulas, constants and order of operations, in fp32.

Every fused multiply-add is written out and the kernels that call these functions are compiled with ``enable_fp_fusion=False``, so
that a result has the bits of the CPU and CUDA kernels. Nothing comes from libdevice, which the interpreter does not have.

``tl.map_elementwise`` makes the compiler finish one element before it begins the next. Written over whole tensors, the functions
would keep every intermediate value of every accumulator alive at once, and spill more than a kilobyte a thread.
"""

import triton
import triton.language as tl

#: The interpreter has no tl.map_elementwise.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Beyond these the tails are zero in fp32; the clamps keep inf * 0 away.
_GELU_LIMIT: tl.constexpr = tl.constexpr(14.5)
_GELU_TANH_LIMIT: tl.constexpr = tl.constexpr(11.5)
_SILU_LIMIT: tl.constexpr = tl.constexpr(128.0)

# (1 + tanh y) / 2 = sigmoid(2 y), 2 y = 2 sqrt(2 / pi) (x + 0.044715 x^3) = x (LINEAR + CUBIC x^2).
_LINEAR: tl.constexpr = tl.constexpr(1.5957691216057308)
_CUBIC: tl.constexpr = tl.constexpr(0.07135481627260025)
_INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)


@triton.jit
def _clamp(x, low, high):
    raised = tl.where(x < low, low, x)  # comparisons that NaN fails, so that it passes through
    return tl.where(raised > high, high, raised)


@triton.jit
def _divide(n, d):
    """n / d for d in [1, 6] and n in [0, 1], rounded to nearest as long as n is not subnormal.

    One Newton step on the hardware's approximate reciprocal, one correction of the quotient by its exact remainder (Markstein, IBM
    Journal of Research and Development 34(1), 1990). ``div_rn`` gives the same bits, but branches, for operands that do not occur
    here; in an epilogue that costs hundreds of bytes of spilled registers. The one known exception is 1 / (2 - 2^-23), which is a
    unit in the last place off unless the reciprocal is already right.
    """
    r = 1.0 / d
    r = tl.fma(tl.fma(-d, r, 1.0), r, r)
    q = n * r
    return tl.fma(tl.fma(-d, q, n), r, q)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exp_nonpositive(x):
    """exp(x) for x <= 0: 2^n e^r with |r| <= ln 2 / 2."""
    x = tl.where(x < -105.0, -105.0, x)
    shifted = tl.fma(x, 1.4426950216293335, 12582912.0)  # x / ln 2, rounded to an integer in the low mantissa bits
    n = shifted - 12582912.0
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    q = tl.fma(1.9875691500e-4, r, 1.3981999507e-3)
    q = tl.fma(q, r, 8.3334519073e-3)
    q = tl.fma(q, r, 4.1665795894e-2)
    q = tl.fma(q, r, 1.6666665459e-1)
    q = tl.fma(q, r, 5.0000001201e-1)
    mantissa = tl.fma(q, r * r, r) + 1.0
    # In two factors, because 2^n itself may be too small for a normal number.
    exponent = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    half = exponent >> 1
    return mantissa * _power_of_two(half) * _power_of_two(exponent - half)


@triton.jit
def _normal_tail(t):
    """For t >= 0 the upper tail Q(t) of the standard normal distribution, and exp(-t^2 / 2)."""
    square = t * t
    square_error = tl.fma(t, t, -square)  # for t = 10 the rounding of t^2 alone would cost 25 units in the last place
    e = _exp_nonpositive(-0.5 * square)
    e = tl.fma(e, -0.5 * square_error, e)
    k = _divide(1.0, tl.fma(t, 0.3, 1.0))
    p = tl.fma(k, -0.020623449236154556, 0.11243549734354019)
    p = tl.fma(p, k, -0.22821329534053802)
    p = tl.fma(p, k, 0.1917840987443924)
    p = tl.fma(p, k, -0.07942315191030502)
    p = tl.fma(p, k, 0.09615664929151535)
    p = tl.fma(p, k, 0.0783897116780281)
    p = tl.fma(p, k, 0.11023541539907455)
    p = tl.fma(p, k, 0.11957181990146637)
    p = tl.fma(p, k, 0.11968669295310974)
    return k * p * e, e


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)) and its complement, both without cancellation. Choosing the numerators saves two divisions."""
    e = _exp_nonpositive(-tl.abs(z))
    s = _divide(tl.where(z < 0.0, e, 1.0), 1.0 + e)
    complement = _divide(tl.where(z < 0.0, 1.0, e), 1.0 + e)
    return s, complement


@triton.jit
def _tanh_argument(c):
    return c * tl.fma(c * c, _CUBIC, _LINEAR)


@triton.jit
def _relu(x):
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _gelu(x):
    t = _clamp(tl.abs(x), 0.0, _GELU_LIMIT)
    q, _ = _normal_tail(t)
    return tl.fma(-t, q, _relu(x))


@triton.jit
def _gelu_tanh(x):
    c = _clamp(x, -_GELU_TANH_LIMIT, _GELU_TANH_LIMIT)
    s, _ = _sigmoid(_tanh_argument(c))
    return tl.where(x < 0.0, c, x) * s


@triton.jit
def _silu(x):
    c = _clamp(x, -_SILU_LIMIT, _SILU_LIMIT)
    s, _ = _sigmoid(c)
    return tl.where(x < 0.0, c, x) * s


@triton.jit
def _swiglu(gate, up):
    return _silu(gate) * up


@triton.jit
def swiglu(gate, up):
    return _swiglu(gate, up) if _INTERPRETED else tl.map_elementwise(_swiglu, gate, up)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """``ACTIVATION`` of the fp32 tensor ``x``, by the names of the op schemas; those of two values have functions of their own."""
    tl.static_assert(x.dtype == tl.float32)
    if ACTIVATION == "relu":
        return _relu(x)
    elif ACTIVATION == "gelu":
        return _gelu(x) if _INTERPRETED else tl.map_elementwise(_gelu, x)
    elif ACTIVATION == "gelu_tanh":
        return _gelu_tanh(x) if _INTERPRETED else tl.map_elementwise(_gelu_tanh, x)
    elif ACTIVATION == "silu":
        return _silu(x) if _INTERPRETED else tl.map_elementwise(_silu, x)
    else:
        tl.static_assert(ACTIVATION == "none")
        return x


@triton.jit
def _gelu_backward(grad, x):
    t = _clamp(tl.abs(x), 0.0, _GELU_LIMIT)
    q, e = _normal_tail(t)
    cdf = tl.where(x < 0.0, q, 1.0 - q)
    return grad * tl.fma(tl.where(x < 0.0, -t, t) * _INV_SQRT_2PI, e, cdf)


@triton.jit
def _gelu_tanh_backward(grad, x):
    c = _clamp(x, -_GELU_TANH_LIMIT, _GELU_TANH_LIMIT)
    s, complement = _sigmoid(_tanh_argument(c))
    slope = tl.fma(c * c, 3.0 * _CUBIC, _LINEAR)
    return grad * tl.fma(c * slope, s * complement, s)


@triton.jit
def _silu_backward(grad, x):
    c = _clamp(x, -_SILU_LIMIT, _SILU_LIMIT)
    s, complement = _sigmoid(c)
    return grad * tl.fma(c * s, complement, s)


@triton.jit
def _swiglu_backward(grad, gate, up):
    return _silu_backward(grad * up, gate), grad * _silu(gate)


@triton.jit
def swiglu_backward(grad, gate, up):
    """The gradients of ``gate`` and ``up``, given the gradient of ``swiglu(gate, up)``, in fp32."""
    if _INTERPRETED:
        return _swiglu_backward(grad, gate, up)
    else:
        return tl.map_elementwise(_swiglu_backward, grad, gate, up)


@triton.jit
def activate_backward(grad, x, ACTIVATION: tl.constexpr):
    """The gradient of ``x``, given the gradient of ``activate(x)``, in fp32.

    relu chooses instead of multiplying, so that an infinite gradient does not turn into NaN where the activation is off.
    """
    tl.static_assert(grad.dtype == tl.float32)
    tl.static_assert(x.dtype == tl.float32)
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, grad)
    elif ACTIVATION == "gelu":
        return _gelu_backward(grad, x) if _INTERPRETED else tl.map_elementwise(_gelu_backward, grad, x)
    elif ACTIVATION == "gelu_tanh":
        return _gelu_tanh_backward(grad, x) if _INTERPRETED else tl.map_elementwise(_gelu_tanh_backward, grad, x)
    elif ACTIVATION == "silu":
        return _silu_backward(grad, x) if _INTERPRETED else tl.map_elementwise(_silu_backward, grad, x)
    else:
        tl.static_assert(ACTIVATION == "none")
        return grad
