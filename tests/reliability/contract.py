"""The contract of scaler and optimizers, in plain Python floats: no tensors, no torch."""

import math
from dataclasses import dataclass, field


class Refused(Exception):
    """The call that the contract refuses; nothing has changed."""


@dataclass
class Rules:
    """Rules of the scale, as the constructor of the scaler takes them."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 3
    min_scale: float = 0.0
    max_scale: float = math.inf
    hysteresis: int = 1
    consecutive_hysteresis: bool = False


@dataclass
class Optimizer:
    """SGD with momentum, or AdamW, over a flat list of weights; ``grads`` as they stand in ``.grad``."""

    adam: bool
    weights: list[float]
    lr: float = 0.125
    weight_decay: float = 0.0
    grads: list[float] | None = None
    first: list[float] | None = None
    second: list[float] | None = None
    steps: int = 0
    stage: str = "ready"
    found: bool | None = None  # what the check of this iteration found, if there was one
    mixed: bool = False  # a new loss was added to unscaled gradients

    BETAS, EPS, MOMENTUM = (0.5, 0.75), 1e-2, 0.5

    def update(self, grads):
        self.steps += 1
        if self.first is None:
            self.first, self.second = [0.0] * len(grads), [0.0] * len(grads)
        for i, grad in enumerate(grads):
            self.weights[i] -= self.lr * (self._adam(i, grad) if self.adam else self._sgd(i, grad))

    def _sgd(self, i, grad):
        grad += self.weight_decay * self.weights[i]
        self.first[i] = grad + (self.MOMENTUM * self.first[i] if self.steps > 1 else 0.0)
        return self.first[i]

    def _adam(self, i, grad):
        decay = self.weight_decay * self.weights[i]
        one, two = self.BETAS
        self.first[i] = one * self.first[i] + (1 - one) * grad
        self.second[i] = two * self.second[i] + (1 - two) * grad * grad
        root = math.sqrt(self.second[i] / (1 - two**self.steps))
        return decay + self.first[i] / (1 - one**self.steps) / (root + self.EPS)

    def clip(self, grads, max_norm):
        factor = max_norm / (math.sqrt(sum(grad * grad for grad in grads)) + 1e-6)
        return grads if factor > 1.0 else [grad * factor for grad in grads]


@dataclass
class Scaler:
    rules: Rules
    optimizers: list[Optimizer]
    scale: float = 2.0**6
    growth_tracker: int = 0
    skipped: int = 0
    consecutive: int = 0
    hysteresis_tracker: int = field(init=False)

    def __post_init__(self):
        self.hysteresis_tracker = self.rules.hysteresis

    def backward(self, grads):
        """Add the gradients (a list, or ``None``, for each optimizer), scaled."""
        for optimizer, new in zip(self.optimizers, grads, strict=True):
            if optimizer.stage == "unscaled":
                if optimizer.grads is None:
                    optimizer.stage, optimizer.found, optimizer.mixed = "ready", None, False
                elif new is not None:
                    optimizer.mixed = True
            if new is not None:
                before = optimizer.grads or [0.0] * len(new)
                optimizer.grads = [a + self.scale * b for a, b in zip(before, new, strict=True)]

    def unscale(self, optimizer):
        if optimizer.mixed or optimizer.stage != "ready":
            raise Refused
        if optimizer.grads is not None:
            optimizer.grads = [grad / self.scale for grad in optimizer.grads]
            optimizer.found = not all(map(math.isfinite, optimizer.grads))
        optimizer.stage = "unscaled"

    def step(self, optimizer, max_norm):
        if optimizer.mixed or optimizer.stage == "stepped":
            raise Refused
        grads = optimizer.grads
        if optimizer.stage == "ready":
            grads = grads and [grad / self.scale for grad in grads]
            optimizer.found = not all(map(math.isfinite, grads or ()))
        optimizer.stage = "stepped"
        if grads is not None and not optimizer.found:
            optimizer.update(grads if max_norm is None else optimizer.clip(grads, max_norm))

    def update(self, new_scale):
        found = [optimizer.found for optimizer in self.optimizers if optimizer.found is not None]
        if new_scale is None and not found:
            raise Refused
        if found:
            self.skipped += any(found)
            self.consecutive = self.consecutive + 1 if any(found) else 0
        if new_scale is not None:
            self.scale = new_scale
        elif any(found):
            self._back_off()
        else:
            self._grow()
        for optimizer in self.optimizers:
            optimizer.stage, optimizer.found, optimizer.mixed = "ready", None, False

    def _back_off(self):
        self.growth_tracker = 0
        self.hysteresis_tracker -= 1
        if self.hysteresis_tracker <= 0:
            self.scale = max(self.scale * self.rules.backoff_factor, self.rules.min_scale)

    def _grow(self):
        if self.rules.consecutive_hysteresis:
            self.hysteresis_tracker = self.rules.hysteresis
        self.growth_tracker += 1
        if self.growth_tracker == self.rules.growth_interval:
            self.growth_tracker = 0
            self.scale = min(self.scale * self.rules.growth_factor, self.rules.max_scale)
            self.hysteresis_tracker = self.rules.hysteresis
