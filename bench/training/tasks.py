"""The scaled-down tasks of the paper's table: a model, a batch's loss, and the metric that counts, the smaller the better.

Every model is made of torch's modules and is trained in 16 bits throughout (parameters, activations and gradients), with norms,
softmax and losses in FP32 inside. Sizes are such that a run takes seconds on one core; learning rates are those that train well in
FP32, and the same in all formats. Each docstring says what the task shows. Language and translation: language.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_kernels as ak


@dataclass(frozen=True)
class Size:
    """Factors over the sizes that take seconds on one core: of the widths of models, of batches and of steps."""

    width: int = 1
    batch: int = 1
    steps: int = 1


SIZES = {"small": Size(), "large": Size(width=8, batch=8, steps=4)}


class Task:
    """A task at one size. Data are drawn on the CPU, so that every device sees the same, and moved to the model's."""

    name: str
    metric_name = "held-out loss"
    small_steps: int
    batch: int
    accumulate = 1  # batches a step
    lr: float
    optimizer = "AdamW"
    options: dict[str, object] = {}  # noqa: RUF012 - of the optimizer

    def __init__(self, size: Size = SIZES["small"]) -> None:
        self.size, self.steps, self.count = size, self.small_steps * size.steps, self.batch * size.batch

    def model(self) -> nn.Module:
        """Drawn from torch's generator."""
        raise NotImplementedError

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        """FP32 ``[]``: the mean over a batch that ``draw`` decides."""
        raise NotImplementedError

    def metric(self, model: nn.Module) -> float:
        """On data that are always the same and are not trained on."""
        raise NotImplementedError


def like(model: nn.Module, data: Tensor) -> Tensor:
    """``data`` on the model's device and, if it is no index, in its format."""
    param = next(model.parameters())
    return data.to(param.device, param.dtype if data.is_floating_point() else None)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """FP32 ``[]``, the mean cross-entropy of ``[..., classes]`` with ``[...]``. Only the gradient of the logits is of 16 bits."""
    with torch.autocast(logits.device.type, logits.dtype, enabled=logits.dtype != torch.float32):
        return ak.cross_entropy(logits.flatten(0, -2), targets.flatten())


def mlp(*widths: int, activation: type[nn.Module]) -> nn.Sequential:
    layers = [nn.Linear(k, n) for k, n in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, activation())), layers[-1])


def held_out_draw() -> torch.Generator:
    return torch.Generator().manual_seed(99)


# ---- images


@cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, ``[n, 64]`` within 0 and 1, and labels: to train on, and one in five held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels, classes = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held_out = torch.arange(len(classes)) % 5 == 0
    return (pixels[~held_out], classes[~held_out]), (pixels[held_out], classes[held_out])


class Classifier(Task):
    """An MLP by momentum SGD in many small steps: from some point on, an update is less than half a unit in the last place of
    a 16-bit weight, and without a master is lost."""

    name = "classifier"
    small_steps, batch, lr = 5000, 64, 3e-4
    optimizer, options = "SGD", {"momentum": 0.9}

    def model(self) -> nn.Module:
        wide = 64 * self.size.width
        return mlp(64, wide, wide, 10, activation=nn.Tanh)

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        (images, labels), _ = digits()
        chosen = torch.randint(len(labels), (self.count,), generator=draw)
        return mean_loss(model(like(model, images[chosen])), like(model, labels[chosen]))

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        _, (images, labels) = digits()
        return mean_loss(model(like(model, images)), like(model, labels)).item()


class Cnn(nn.Module):
    """Convolutions as products over unfolded patches, which every machine computes quickly in every format."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, wide), nn.Linear(9 * wide, 2 * wide)
        self.head = nn.Linear(8 * wide, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 8, 8, 1)
        for layer in (self.first, self.second):
            x = F.relu(layer(patches(x, 3)))
            x = x.unflatten(1, (x.shape[1] // 2, 2)).unflatten(3, (x.shape[2] // 2, 2)).amax((2, 4))
        return self.head(x.flatten(1))


def patches(x: Tensor, side: int) -> Tensor:
    """The ``side`` x ``side`` neighbourhood of each pixel: ``[n, h, w, c]`` -> ``[n, h, w, c side side]``, zeros around."""
    half = side // 2
    return F.pad(x, (0, 0, half, half, half, half)).unfold(1, side, 1).unfold(2, side, 1).flatten(3)


class ConvolutionalClassifier(Classifier):
    """The same digits, with larger steps: parity, as the paper has it for its classifiers."""

    name = "cnn"
    small_steps, lr = 500, 3e-3
    optimizer, options = "AdamW", {}

    def model(self) -> nn.Module:
        return Cnn(16 * self.size.width)


# ---- a single-shot detector


NOTHING = 10  # the class of a place without a digit


class Scenes:
    """Canvases of 48 x 48 pixels with three digits each. A box of 8 x 8 pixels is proposed at every pixel: its class, and by how much
    it must be moved."""

    SIDE, DIGITS = 48, 3

    def __init__(self, images: Tensor, labels: Tensor, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        side = self.SIDE
        self.canvases = torch.zeros(count, side, side)
        self.classes = torch.full((count, side, side), NOTHING)
        for scene in range(count):
            for which in torch.randint(len(labels), (self.DIGITS,), generator=draw).tolist():
                y, x = torch.randint(side - 8, (2,), generator=draw).tolist()
                self.canvases[scene, y : y + 8, x : x + 8] = images[which].view(8, 8)
                self.classes[scene, y + 4, x + 4] = labels[which]


@cache
def scenes(held_out: bool) -> Scenes:
    return Scenes(*digits()[held_out], count=64 if held_out else 512, seed=int(held_out))


class Detector(nn.Module):
    """Classifies each pixel by its neighbourhood."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body = mlp(81, wide, wide, NOTHING + 1, activation=nn.ReLU)
        nn.init.constant_(self.body[-1].bias[NOTHING], 6.0)  # most places are empty: training starts from there

    def forward(self, canvas: Tensor) -> Tensor:
        return self.body(patches(canvas.unsqueeze(-1), 9))


class Detection(Task):
    """A loss averaged over 73,728 boxes, all but one in 800 of them of nothing, as in the detector that diverged unscaled in the paper.
    The gradients that push a class down where nothing is, probability / 73,728, fall below FP16's range."""

    name, metric_name = "detector", "held-out loss a digit"
    small_steps, batch, lr = 150, 32, 8.0
    optimizer, options = "SGD", {"momentum": 0.9}

    def model(self) -> nn.Module:
        return Detector(24 * self.size.width)

    def _loss(self, model: nn.Module, scenes: Scenes, chosen: Tensor) -> Tensor:
        return mean_loss(model(like(model, scenes.canvases[chosen])), like(model, scenes.classes[chosen]))

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        seen = scenes(held_out=False)
        return self._loss(model, seen, torch.randint(len(seen.classes), (self.count,), generator=draw))

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        unseen = scenes(held_out=True)
        return self._loss(model, unseen, torch.arange(len(unseen.classes))).item() * Scenes.SIDE**2 / Scenes.DIGITS


# ---- points


class Gan(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.generator = mlp(2, wide, wide, 2, activation=nn.ReLU)
        self.critic = mlp(2, wide, wide, 1, activation=nn.ReLU)


def _ring(count: int, draw: torch.Generator) -> Tensor:
    """Points around a circle."""
    angle = torch.rand(count, generator=draw) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2, generator=draw)


class Adversarial(Task):
    """Generator and critic of a distribution in the plane: parity, as for the paper's DCGAN."""

    name, metric_name = "gan", "energy distance"
    small_steps, batch, lr = 1000, 128, 3e-4
    options = {"betas": (0.0, 0.9)}  # noqa: RUF012
    noise = 0.5  # on what the critic sees, real or not, so that the two overlap from the start

    def model(self) -> nn.Module:
        return Gan(64 * self.size.width)

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        """Both players at once: the critic's gradient goes to the critic, the generator's to the generator alone."""
        assert isinstance(model, Gan)
        source, of_real, of_fake = (torch.randn(self.count, 2, generator=draw) for _ in range(3))
        real = model.critic(like(model, _ring(self.count, draw) + self.noise * of_real)).float()
        fake = model.generator(like(model, source)) + like(model, self.noise * of_fake)
        of_critic = F.softplus(-real).mean() + F.softplus(model.critic(fake.detach()).float()).mean()
        model.critic.requires_grad_(False)
        of_generator = F.softplus(-model.critic(fake).float()).mean()
        model.critic.requires_grad_(True)
        return of_critic + of_generator

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        """The energy distance between what is generated and what is real."""
        assert isinstance(model, Gan)
        draw = held_out_draw()
        real = _ring(1024, draw)
        fake = model.generator(like(model, torch.randn(1024, 2, generator=draw))).float().cpu()
        return (
            2 * torch.cdist(real, fake).mean() - torch.cdist(real, real).mean() - torch.cdist(fake, fake).mean()
        ).item()


class Regression(Task):
    """A smooth function of eight numbers."""

    name, metric_name = "regression", "held-out squared error"
    small_steps, batch, lr = 1000, 128, 4e-3

    def model(self) -> nn.Module:
        wide = 128 * self.size.width
        return mlp(8, wide, wide, 1, activation=nn.SiLU)

    def _error(self, model: nn.Module, count: int, draw: torch.Generator) -> Tensor:
        x = torch.rand(count, 8, generator=draw) * 2 - 1
        y = (x[:, 0] * 3).sin() + x[:, 1] * x[:, 2] - x[:, 3:].square().mean(1)
        return F.mse_loss(model(like(model, x)).flatten().float(), y.to(next(model.parameters()).device))

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        return self._error(model, self.count, draw)

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        return self._error(model, 1024, held_out_draw()).item()
