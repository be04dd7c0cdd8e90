"""The activations of csrc/activation/formula.h for Triton: the same formulas, constants and order of operations, in fp32.

Every fused multiply-add is written out and the kernels that call these functions are compiled with ``enable_fp_fusion=False``, so
that a result has the bits of the CPU and CUDA kernels. Nothing comes from libdevice, which the interpreter does not have.

``tl.map_elementwise`` makes the compiler finish one element before it begins the next. Written over whole tensors, the functions
would keep every intermediate value of every accumulator alive at once, and spill more than a kilobyte a thread.
"""

import triton
import triton.language as tl

#: The interpreter has no tl.map_elementwise.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Upper ends of the tails.
_GELU_LIMIT: tl.constexpr = tl.constexpr(7.0)
_GELU_TANH_LIMIT: tl.constexpr = tl.constexpr(6.0)
_SILU_LIMIT: tl.constexpr = tl.constexpr(87.0)


@triton.jit
def _exp2_of_product(t, v, EXPONENT: tl.constexpr):
    """2^(t v + EXPONENT), with v <= 0 and a result of at least 2^-126."""
    shifted = tl.fma(t, v, 12582912.0 + EXPONENT)  # rounded to an integer in the low mantissa bits
    r = tl.fma(t, v, (12582912.0 + EXPONENT) - shifted)
    m = tl.fma(r, 0.001326472731307149, 0.009671512991189957)
    m = tl.fma(m, r, 0.05550733581185341)
    m = tl.fma(m, r, 0.24022242426872253)
    m = tl.fma(m, r, 0.6931470036506653)
    m = tl.fma(m, r, 1.0)
    return (m.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _gelu_tail(t):
    v = tl.fma(t, -4.142672480611509e-07, 7.716437721683178e-06)
    v = tl.fma(v, t, -2.4372919142479077e-05)
    v = tl.fma(v, t, -0.0005461525870487094)
    v = tl.fma(v, t, 0.007603381294757128)
    v = tl.fma(v, t, -0.05285663902759552)
    v = tl.fma(v, t, -0.4591005742549896)
    v = tl.fma(v, t, -1.1511154174804688)
    return _exp2_of_product(t, v, -1) - 1.279257299049985e-12


@triton.jit
def _gelu_tanh_tail(t):
    v = tl.fma(t, 6.235715659386187e-07, -1.1648214240267407e-05)
    v = tl.fma(v, t, 6.353954086080194e-05)
    v = tl.fma(v, t, 5.229342059465125e-05)
    v = tl.fma(v, t, -0.0013971455628052354)
    v = tl.fma(v, t, 0.0019837047439068556)
    v = tl.fma(v, t, 0.005702981725335121)
    v = tl.fma(v, t, -0.05051494762301445)
    v = tl.fma(v, t, -0.4594357907772064)
    v = tl.fma(v, t, -1.1510889530181885)
    return _exp2_of_product(t, v, -1) - 1.4079069507455522e-11


@triton.jit
def _sigmoid_tail(t):
    """1 / (1 + exp(t)), and one minus it."""
    e = _exp2_of_product(t, -1.4426950216293335, 0)
    guess = tl.fma(e, -0.2218370884656906, 0.6655112504959106)
    guess = tl.fma(guess, e, -0.9428076148033142)
    guess = tl.fma(guess, e, 0.998266875743866)
    error = tl.fma(-e, guess, 1.0 - guess)
    inverse = tl.fma(guess, tl.fma(error, error, error), guess)
    return tl.fma(e, inverse, -1.6458132754423973e-38), inverse


@triton.jit
def _size(x, LIMIT: tl.constexpr):
    return tl.minimum(tl.abs(x), LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _without_tail(x, t, q):
    """relu(x) - t q; -0 keeps the sign of a zero."""
    return tl.fma(-t, q, tl.maximum(x, -0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _slope(x, m, h):
    """1/2 + sign(x) (1/2 - m h), where m h is at most 1/2."""
    from_half = tl.fma(-m, h, 0.5).to(tl.int32, bitcast=True)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return 0.5 + (from_half | sign).to(tl.float32, bitcast=True)


@triton.jit
def _relu(x):
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _gelu(x):
    t = _size(x, _GELU_LIMIT)
    return _without_tail(x, t, _gelu_tail(t))


@triton.jit
def _gelu_tanh(x):
    t = _size(x, _GELU_TANH_LIMIT)
    return _without_tail(x, t, _gelu_tanh_tail(t))


@triton.jit
def _silu(x):
    t = _size(x, _SILU_LIMIT)
    q, _ = _sigmoid_tail(t)
    return _without_tail(x, t, q)


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
    t = _size(x, _GELU_LIMIT)
    v = tl.fma(t, -1.9406512365094386e-05, 0.000347861903719604)
    v = tl.fma(v, t, -0.002854572609066963)
    v = tl.fma(v, t, 0.014679635874927044)
    v = tl.fma(v, t, -0.054757192730903625)
    v = tl.fma(v, t, -0.5606971979141235)
    v = tl.fma(v, t, -0.38318899273872375)
    return grad * _slope(x, tl.fma(t, -1.3301559686660767, 1.0), _exp2_of_product(t, v, -1))


@triton.jit
def _gelu_tanh_backward(grad, x):
    t = _size(x, _GELU_TANH_LIMIT)
    v = tl.fma(t, 4.569595603243215e-06, -8.772955334279686e-05)
    v = tl.fma(v, t, 0.0006572715938091278)
    v = tl.fma(v, t, -0.002318803919479251)
    v = tl.fma(v, t, 0.0037692063488066196)
    v = tl.fma(v, t, -0.005504676606506109)
    v = tl.fma(v, t, 0.018371744081377983)
    v = tl.fma(v, t, -0.05452985689043999)
    v = tl.fma(v, t, -0.5628611445426941)
    v = tl.fma(v, t, -0.38490569591522217)
    return grad * _slope(x, tl.fma(t, -1.3289717435836792, 1.0), _exp2_of_product(t, v, -1))


@triton.jit
def _silu_backward(grad, x):
    t = _size(x, _SILU_LIMIT)
    q, complement = _sigmoid_tail(t)
    return grad * _slope(x, tl.fma(-t, complement, 1.0), q)


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
