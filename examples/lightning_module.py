"""A LightningModule with amp_kernels' modules and optimizer under the Trainer's mixed precision and clipping.

python examples/lightning_module.py      (needs: pip install lightning)
"""

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
fp16 = ak.recommended_dtype(device) == torch.float16
L.seed_everything(0, verbose=False)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(2, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)
        self.model = ak.convert(nn.Sequential(*layers))
        self.criterion = ak.nn.CrossEntropyLoss()

    def loss(self, batch):
        points, label = batch
        return self.criterion(self.model(points), label)

    def training_step(self, batch):
        return self.loss(batch)

    def test_step(self, batch):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        return ak.optim.AdamW(self.parameters(), lr=3e-3, max_grad_norm=1.0 if fp16 else None)


def checkerboard(count):
    points = torch.rand(count, 2)
    return DataLoader(TensorDataset(points, (4 * points).long().sum(1) % 2), batch_size=256)


if fp16:  # the Trainer's plugin uses our scaler; the optimizer unscales and clips in one pass
    precision = {"plugins": [MixedPrecision("16-mixed", device, scaler=ak.GradScaler(device))]}
else:
    precision = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = L.Trainer(max_epochs=10, accelerator=device, devices=1, **precision, **quiet)
classifier, unseen = Classifier(), checkerboard(2000)

(before,) = trainer.test(classifier, unseen, verbose=False)
trainer.fit(classifier, checkerboard(8000))
(after,) = trainer.test(classifier, unseen, verbose=False)
print(f"{trainer.global_step} steps in {trainer.precision}")
print(f"loss {before['loss']:.3f} -> {after['loss']:.3f}")
