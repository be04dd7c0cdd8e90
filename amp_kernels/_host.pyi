"""The formulas of csrc/math over numpy arrays. 16-bit floats travel as uint16 codes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_Half = Literal["float16", "bfloat16"]
_Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
_Floats = NDArray[np.float32]
_Codes = NDArray[np.uint16]
_Remainders = NDArray[np.int16]

def build_info() -> dict[str, str]: ...
def to_float(codes: _Codes, dtype: _Half) -> _Floats: ...
def round_to(x: _Floats, dtype: _Half) -> _Codes: ...
def round_half_away(x: _Floats, dtype: _Half) -> _Codes: ...
def round_stochastic(x: _Floats, dtype: _Half, seed: int, step: int, param: int) -> _Codes: ...
def split_master(x: _Floats, dtype: _Half) -> tuple[_Codes, _Remainders]: ...
def join_master(weight: _Codes, remainder: _Remainders, dtype: _Half) -> _Floats: ...
def check_split_master(dtype: _Half) -> int: ...
def philox4x32_10(counter: Sequence[int], key: int) -> list[int]: ...
def activate(activation: _Activation, x: _Floats) -> _Floats: ...
def activate_backward(activation: _Activation, grad: _Floats, x: _Floats) -> _Floats: ...
def inverse_scale(scale: float) -> float: ...
def clip_factor(sum_sq: float, max_norm: float) -> float: ...
def adamw(
    p: _Floats,
    m: _Floats,
    v: _Floats,
    grad: _Floats,
    step: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    coupled_decay: bool = False,
    inv_scale: float = 1.0,
    clip: float = 1.0,
) -> None: ...
def sgd(
    p: _Floats,
    buffer: _Floats | None,
    grad: _Floats,
    step: float,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    inv_scale: float = 1.0,
    clip: float = 1.0,
) -> None: ...
def lion(
    p: _Floats,
    m: _Floats,
    grad: _Floats,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    inv_scale: float = 1.0,
    clip: float = 1.0,
) -> None: ...
def update_loss_scale(
    scale: float,
    growth_tracker: int,
    hysteresis_tracker: int,
    overflow: bool,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 0.0,
    max_scale: float = ...,
    hysteresis: int = 1,
) -> tuple[float, int, int]: ...
