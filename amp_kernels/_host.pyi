"""The formulas of csrc over numpy arrays. 16-bit floats travel as uint16 codes."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_Half = Literal["float16", "bfloat16"]
_Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu", "swiglu"]
_Floats = NDArray[np.float32]
_Codes = NDArray[np.uint16]
_Remainders = NDArray[np.int16]
_Bytes = NDArray[np.uint8]

def build_info() -> dict[str, str]: ...
def gemm_candidates() -> dict[str, list[dict[str, Any]]]: ...
def gemm_repack_pitch(length: int) -> int: ...
def gemm_rates() -> dict[str, float]: ...
def gemm_plans(m: int, n: int, k: int, **request: Any) -> list[dict[str, Any]]: ...  # keywords of plan_gemm
def plan_gemm(
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    m_major_a: bool = False,
    n_major_b: bool = False,
    tma_a: bool = True,
    tma_b: bool = True,
    tma_output: bool = True,
    row_output: bool = True,
    odd_operands: bool = False,
    out_bytes: int = 2,
    side_bytes: int = 0,
    activation: _Activation = "none",
    backward: bool = False,
    keeps_z: bool = False,
    column_sums: bool = False,
    plain: bool = True,
    in_registers: bool = True,
    tma_epilogue: bool = True,
    batch_invariant: bool = False,
    symmetric: bool = False,
    sm_count: int = 132,
    capability: int = 90,
    sm90: bool = True,
    sm80: bool = True,
    **rates: float,  # by the names of gemm_rates
) -> dict[str, Any]: ...

# `request` are the keywords of plan_gemm.
def gemm_sm90_microseconds(
    tile: dict[str, Any], splits: int, swapped: bool, m: int, n: int, k: int, **request: Any
) -> float: ...
def gemm_sm90_grouped_microseconds(sizes: list[int], n: int, k: int, **request: Any) -> float: ...
def gemm_epilogue(tile: dict[str, Any], m: int, n: int, k: int, **request: Any) -> dict[str, float]: ...
def to_float(codes: _Codes, dtype: _Half) -> _Floats: ...
def round_to(x: _Floats, dtype: _Half) -> _Codes: ...
def round_half_away(x: _Floats, dtype: _Half) -> _Codes: ...
def round_stochastic(x: _Floats, dtype: _Half, seed: int, step: int, param: int) -> _Codes: ...
def random_groups(groups: NDArray[np.uint64], first: int, width: int, pitch: int) -> NDArray[np.uint64]: ...
def split_master(x: _Floats, dtype: _Half) -> tuple[_Codes, _Remainders]: ...
def split_master24(x: _Floats, dtype: _Half, random8: int) -> tuple[_Codes, NDArray[np.int8]]: ...
def join_master(weight: _Codes, remainder: _Remainders, dtype: _Half) -> _Floats: ...
def check_split_master(dtype: _Half) -> int: ...
def encode_block8(x: _Floats, is_signed: bool, random16: NDArray[np.uint32]) -> tuple[_Bytes, _Bytes]: ...
def decode_block8(codes: _Bytes, exponents: _Bytes, is_signed: bool) -> _Floats: ...
def philox4x32_10(counter: Sequence[int], key: int) -> list[int]: ...
def activate(activation: _Activation, x: _Floats) -> _Floats: ...
def activate_backward(activation: _Activation, grad: _Floats, x: _Floats) -> _Floats: ...
def swiglu(gate: _Floats, up: _Floats) -> _Floats: ...
def swiglu_backward(grad: _Floats, gate: _Floats, up: _Floats) -> tuple[_Floats, _Floats]: ...
def block_loads(numels: list[int], resident_blocks: int) -> list[list[tuple[int, int]]]: ...
def inverse_scale(scale: float) -> float: ...
def clip_factor(sum_sq: float, max_norm: float) -> float: ...
def update(
    op: str,
    p: _Floats,
    moments: list[_Floats],
    grad: _Floats,
    options: Sequence[float],
    flags: int = 0,
    step: float = 1.0,
    inv_scale: float = 1.0,
    clip: float = 1.0,
) -> float | None: ...
def ema(average: _Floats, weight: _Floats, decay: float) -> None: ...
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
    consecutive: bool = False,
) -> tuple[float, int, int]: ...
