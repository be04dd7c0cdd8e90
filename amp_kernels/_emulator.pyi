"""CUDA kernels on CPU memory (csrc/bind/emulator.cpp). Addresses are integers, 0 is null; dtypes are codes of DType."""

_Piece = tuple[str, int, int, bool]  # name in errors, address, bytes, whether it holds values already
_Grad = tuple[int, int, int]  # address, numel, dtype
_Decisions = tuple[int, int, int, float]  # addresses of grad_scale, found_inf and sum_sq; max_norm

class Param:
    def __init__(
        self, param: int, param_dtype: int, grad: int, grad_dtype: int, numel: int, step: int, group: int
    ) -> None: ...
    def set_moment(self, which: int, data: int, dtype: int) -> None: ...
    def set_master(self, data: int, split: bool) -> None: ...
    def set_shadow(self, data: int, dtype: int) -> None: ...
    def set_ema(self, data: int) -> None: ...
    def set_stochastic(self, index: int) -> None: ...

class AdamWGroup:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        coupled_decay: bool,
        lr_at: int,
        maximize: bool,
        ema_decay: float,
    ) -> None: ...

class SgdGroup:
    def __init__(
        self,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        lr_at: int,
        maximize: bool,
        ema_decay: float,
    ) -> None: ...

class LionGroup:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        lr_at: int,
        maximize: bool,
        ema_decay: float,
    ) -> None: ...

class LambGroup:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        adapt_all: bool,
        lr_at: int,
        maximize: bool,
        ema_decay: float,
    ) -> None: ...

def set_options(seed: int = 0, sm_count: int = 2, truncate_mma: bool = False) -> None: ...
def check_and_norm(
    memory: list[_Piece],
    grads: list[_Grad],
    grad_scale: int,
    norms: int,
    found_infs: int,
    largest: bool,
    per_tensor: bool,
) -> None: ...
def unscale(memory: list[_Piece], grads: list[_Grad], found_inf: int, inv_scale: int) -> None: ...
def update_scale(
    memory: list[_Piece],
    scale: int,
    growth_tracker: int,
    hysteresis_tracker: int,
    found_infs: list[int],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
) -> None: ...
def adamw(
    memory: list[_Piece], params: list[Param], groups: list[AdamWGroup], decisions: _Decisions, seed: int
) -> None: ...
def sgd(
    memory: list[_Piece], params: list[Param], groups: list[SgdGroup], decisions: _Decisions, seed: int
) -> None: ...
def lion(
    memory: list[_Piece], params: list[Param], groups: list[LionGroup], decisions: _Decisions, seed: int
) -> None: ...
def lamb(
    memory: list[_Piece], params: list[Param], groups: list[LambGroup], decisions: _Decisions, seed: int
) -> None: ...
