"""The public API for a type checker. Never run: `make lint` reads it with mypy, strictly, and a ``type: ignore``
that is not needed is an error, too."""

from typing import assert_type

import torch.amp.grad_scaler
from torch import Tensor, nn

import amp_kernels as ak

x, weight, target = torch.ones(4, 8), torch.ones(3, 8), torch.zeros(4, dtype=torch.int64)
model = nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3))

# Functions.
assert_type(ak.matmul(x, weight.t(), out_dtype=torch.float32), Tensor)
assert_type(ak.linear(x, weight, None, activation="gelu"), Tensor)
assert_type(ak.baddbmm(x, x, x, beta=0.5), Tensor)
assert_type(ak.addmm(x, x, x), Tensor)
assert_type(ak.mlp(x, weight, None, weight, None), Tensor)
assert_type(ak.layer_norm(x, 8), Tensor)
assert_type(ak.layer_norm(x, [8], residual=x), tuple[Tensor, Tensor])
assert_type(ak.rms_norm(x, 8, eps=1e-6), Tensor)
assert_type(ak.rms_norm(x, 8, residual=x), tuple[Tensor, Tensor])
assert_type(ak.rotary(x, x, x, x, q_weight=x, k_weight=x, interleaved=True), tuple[Tensor, Tensor])
assert_type(ak.cross_entropy(x, target, label_smoothing=0.1, z_loss=1e-4), Tensor)
assert_type(ak.linear_cross_entropy(x, weight, target), Tensor)
assert_type(ak.linear_log_probs(x, weight, target), Tensor)
assert_type(ak.linear_log_probs(x, weight, target, entropy=True), tuple[Tensor, Tensor])
assert_type(ak.nn.functional.layer_norm(x, 8), Tensor)
assert_type(ak.nn.functional.rms_norm(x, 8), Tensor)
ak.nn.functional.linear(x, weight, activaton="gelu")  # type: ignore[call-arg]
assert_type(ak.gelu(x, approximate="tanh"), Tensor)
assert_type(ak.nn.functional.silu(ak.swiglu(x)), Tensor)
assert_type(ak.embedding(target, weight, padding_idx=0), Tensor)
ak.cast_([x], [weight], seed=1)
assert_type(ak.clip_grad_norm_(model.parameters(), 1.0), Tensor)
assert_type(ak.get_total_norm([x, x]), Tensor)
assert_type(ak.recommended_dtype("cpu"), torch.dtype)
ak.linear("x", weight)  # type: ignore[call-overload]
ak.linear(x, weight, activation=3)  # type: ignore[call-overload]
assert_type(ak.linear(x, weight), Tensor)
assert_type(ak.linear(x, weight, split=[1, 2]), tuple[Tensor, ...])

# Modules keep the type of the model.
assert_type(ak.convert(model, skip=["0", nn.LayerNorm], report=True), nn.Sequential)
assert_type(ak.revert(model), nn.Sequential)
assert_type(ak.convert(model, fuse_rotary=True, recompute_mlp=True), nn.Sequential)
ak.nn.Linear(8, 3, activation="relu")
ak.nn.MLP(8, 32, activation="swiglu")
ak.convert(x)  # type: ignore[type-var]

# Optimizers are torch's, with options that are checked by name and value.
optimizer: torch.optim.AdamW = ak.optim.AdamW(
    model.parameters(), lr=1e-3, betas=(0.9, 0.95), master_weights="split", state_dtype=torch.bfloat16, ema_decay=0.999
)
ak.optim.SGD(model.parameters(), momentum=0.9, max_grad_norm=1.0)
ak.optim.Adam(model.parameters(), amsgrad=True, zero_grads=True)
ak.optim.Lion([{"params": model.parameters(), "lr": 1e-4}], shadow_dtype=torch.float16)
ak.optim.LAMB(model.parameters(), use_nvlamb=True, seed=3)
muon: torch.optim.Muon = ak.optim.Muon(
    [{"params": model.parameters(), "algorithm": "adamw"}],
    adjust_lr_fn="match_rms_adamw",
    heads=4,
    master_weights="split",
)
ak.optim.Lion(model.parameters(), master_weights="split24", state_dtype="8bit", cautious=True, decouple_lr=True)
ak.optim.AdamW(model.parameters(), state_dtype="4bit")  # type: ignore[arg-type]
ak.optim.AdamW(model.parameters(), master_weights="fp16")  # type: ignore[arg-type]
ak.optim.AdamW(model.parameters(), master_weight="fp32")  # type: ignore[call-arg]
optimizer.step()
ak.fp32_state_dict(model, ak.optim.AdamW(model.parameters()), ema=True)

# The scaler is torch's.
scaler: torch.amp.grad_scaler.GradScaler = ak.GradScaler("cpu", init_scale=2.0**10, hysteresis=2, min_scale=1.0)
ours = ak.GradScaler()
assert_type(ours.scale(x), Tensor)
assert_type(ours.last_grad_norm, Tensor | None)
assert_type(ours.last_step_skipped, bool | None)
assert_type(ours.skipped_steps, Tensor)
ours.step(optimizer, max_norm=1.0)
ours.update()
schedule = ak.amp.SkipAwareScheduler(torch.optim.lr_scheduler.ConstantLR(optimizer), ours)
schedule.step()

# Blocks.
with ak.backend("reference"), ak.batch_invariant(), ak.override_matmul(), ak.nn.accumulate_fp32(model):
    pass

# Checkpoints.
path = ak.checkpoint.latest("runs")
if path is not None:
    ak.checkpoint.save(path, model=model, optimizer=optimizer, extra={"step": 1}, keep=3, background=True)
    step = ak.checkpoint.load(path, model=model, optimizer=optimizer)["step"]
ak.checkpoint.save(path)  # type: ignore[arg-type]
