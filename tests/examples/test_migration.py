"""The recipes of docs/migration for the frameworks of others, run as they stand by a model that learns."""

import copy
import functools
import importlib
import math
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_kernels as ak

PAGES = Path(__file__).parents[2] / "docs" / "migration"
#: Text about a GPU there, and its form for a CPU.
HERE = {'"16-mixed", "cuda", scaler=ak.GradScaler()': '"16-mixed", "cpu", scaler=ak.GradScaler("cpu")'}


#: Options of lightning's Trainer.
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture
def accelerate():
    """The package without the options of earlier Accelerators: it keeps one process's for good, those of a transformers.Trainer, too."""
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate


def blocks(page):
    text = (PAGES / f"{page}.md").read_text()
    for there, here in HERE.items():
        text = text.replace(there, here)
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def run(code, names):
    exec(compile(code, "<recipe>", "exec"), names)
    return names


def rows(count=2048):
    """Points, and whether the sum of their coordinates is positive."""
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))


def loss_of(model):
    points, label = rows().tensors
    return nn.functional.cross_entropy(model(points).float(), label).item()


@pytest.mark.parametrize("precision", ["bf16-mixed with clipping", "16-mixed by the plugin"])
@pytest.mark.needs("lightning")
def test_lightning(precision, tmp_path, monkeypatch):
    """Clipping by the Trainer in BF16; in FP16 our scaler in its plugin and the optimizer's own clipping."""
    import lightning

    monkeypatch.chdir(tmp_path)
    bf16, fp16, _, _ = blocks("lightning")  # the last needs several processes
    norms = []

    class Trainer(lightning.Trainer):
        def __init__(self, **options):
            super().__init__(**options, accelerator="cpu", max_epochs=4, **QUIET)

    class LightningModule(lightning.LightningModule):
        def training_step(self, batch):
            points, label = batch
            return 10 * nn.functional.cross_entropy(self.model(points), label)

        def configure_gradient_clipping(self, *args, **options):
            before = ak.get_total_norm([p.grad for p in self.parameters()])
            super().configure_gradient_clipping(*args, **options)
            norms.append((before, ak.get_total_norm([p.grad for p in self.parameters()])))

    there = types.SimpleNamespace(Trainer=Trainer, LightningModule=LightningModule)
    data = torch.utils.data.DataLoader(rows(), batch_size=16)
    definition, _, fit = bf16.rpartition("\n\n")
    names = run(definition, {"lightning": there, "ak": ak, "build": build, "data": data})
    module = names["Module"]()
    names["Module"] = lambda: module
    by_trainer = precision.startswith("bf16")
    run(fit if by_trainer else fp16, names)
    assert loss_of(module.model) < 0.5 * loss_of(build())
    assert len(norms) == 512
    assert max(before for before, _ in norms) > 2
    assert (max(after for _, after in norms) < 1.001) == by_trainer


@pytest.mark.needs("lightning")
def test_lightning_with_averaged_weights(tmp_path, monkeypatch):
    """Evaluation and further training compute with the weights that the callback swapped in, not with shadows of the others."""
    import lightning

    monkeypatch.chdir(tmp_path)
    gaps = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = ak.convert(build())

        def gap(self, points):
            """A copy of the model has no shadows."""
            with torch.autocast("cpu", torch.bfloat16):
                return (self.model(points) - copy.deepcopy(self.model)(points)).abs().max().item()

        def training_step(self, batch):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch):
            gaps.append(self.gap(batch[0]))

        def configure_optimizers(self):
            return ak.optim.AdamW(self.parameters(), lr=3e-2, shadow_dtype=torch.bfloat16)

    there = types.SimpleNamespace(
        Trainer=functools.partial(lightning.Trainer, accelerator="cpu", max_epochs=2, **QUIET)
    )
    data = torch.utils.data.DataLoader(rows(512), batch_size=64)
    recipe, _, refresh = blocks("lightning")[2].rpartition("\n")[0].rpartition("\n")
    names = run(recipe, {"lightning": there, "ak": ak, "Module": Module, "data": data})
    points = rows(8).tensors[0]
    assert len(gaps) == 2 + 2 * 8  # two batches before the first epoch
    assert max(gaps) == 0
    assert names["module"].gap(points) > 0
    run(refresh, names)
    assert names["module"].gap(points) == 0
    callback = ak.integrations.lightning.Callback()
    run(
        recipe.replace("callbacks=[", "callbacks=[callback, "),
        names | {"callback": callback, "module": names["module"]},
    )
    assert names["module"].gap(points) == 0


@pytest.mark.parametrize("scaler", [ak.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("unscale_grads", [False, True])
@pytest.mark.needs("lightning")
def test_lightning_logs_each_step(scaler, unscale_grads, tmp_path, monkeypatch):
    """The second of three steps overflows; the logged norm is unscaled and not clipped."""
    import lightning

    plugins = importlib.import_module("lightning.pytorch.plugins.precision")
    monkeypatch.chdir(tmp_path)
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def training_step(self, batch, batch_idx):
            return self.weight.sum() * (torch.inf if batch_idx == 2 else 3.0)

        def on_train_batch_end(self, *_):  # after the callbacks
            seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

        def configure_optimizers(self):
            return ak.optim.AdamW(self.parameters(), unscale_grads=unscale_grads)

    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler("cpu", init_scale=8.0))
    options = {"plugins": [plugin], "accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, **QUIET}
    trainer = lightning.Trainer(callbacks=[ak.integrations.lightning.Callback()], limit_train_batches=4, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=16))
    assert [record["grad_norm"] for record in seen] == [6.0, 6.0, torch.inf, 6.0]
    assert [record["skipped_steps"] for record in seen] == [0, 0, 1, 1]
    assert [record["loss_scale"] for record in seen] == [8.0, 8.0, 4.0, 4.0]
    assert all(record["steps_per_second"] > 0 and record["peak_memory_gib"] > 0 for record in seen)


@pytest.mark.parametrize("scaler", [None, ak.GradScaler, torch.amp.GradScaler])
@pytest.mark.needs("transformers", "accelerate")
def test_hf_trainer_logs_figures_to_all_reporters(scaler, tmp_path):
    """The third of four steps overflows."""
    import transformers

    reported = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            reported.append(dict(logs))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.zeros(4)), 0

        def forward(self, input_ids, labels=None):
            self.calls += 1
            return {"loss": self.weight.sum() * (torch.inf if self.calls == 3 else 3.0) + 0 * input_ids.sum()}

    options = {"logging_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no"}
    options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "include_num_input_tokens_seen": "all"}
    options |= {"logging_nan_inf_filter": False, "max_grad_norm": 0.0}
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    trainer = transformers.Trainer(
        Model(),
        transformers.TrainingArguments(str(tmp_path), **options),
        train_dataset=data,
        optimizer_cls_and_kwargs=(ak.optim.AdamW, {}),
        callbacks=[Reporter()],
    )
    if scaler is not None:
        trainer.accelerator.scaler = scaler("cpu", init_scale=8.0)
    assert type(ak.integrations.hf.Callback().attach(trainer)) is ak.integrations.hf.Callback
    trainer.train()
    records = [record for record in trainer.state.log_history if "loss" in record]
    assert [{"step": record["step"], **logs} for record, logs in zip(records, reported, strict=False)] == records
    assert len(records) == 2
    for record in records:
        assert record["samples_per_second"] == pytest.approx(2 * record["steps_per_second"])
        assert record["tokens_per_second"] == pytest.approx(16 * record["steps_per_second"])
        assert record["peak_memory_gib"] > 0
        assert "grad_norm" in record
    figures = [(record.get("loss_scale"), record.get("skipped_steps")) for record in records]
    assert figures == ([(None, None)] * 2 if scaler is None else [(8.0, 0), (4.0, 1)])


@pytest.mark.needs("torchao")
def test_torchao_quantizes_a_converted_model():
    quantization = importlib.import_module("torchao.quantization")
    theirs = build().bfloat16()
    ours = ak.convert(copy.deepcopy(theirs))
    for model in (theirs, ours):
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    points = rows(8).tensors[0].bfloat16()
    assert type(ours[0]) is ak.nn.Linear
    assert type(ours[0].weight) is type(theirs[0].weight) is not nn.Parameter
    torch.testing.assert_close(ours(points), theirs(points))


@pytest.mark.parametrize("unscale_grads", [False, True])
@pytest.mark.needs("lightning")
def test_lightning_with_manual_optimization(unscale_grads, tmp_path, monkeypatch):
    """``self.clip_gradients`` clips, in BF16 too, only if the optimizer cannot unscale inside its step."""
    import lightning

    monkeypatch.chdir(tmp_path)
    norms = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.automatic_optimization = ak.convert(build()), False

        def training_step(self, batch):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(100 * self.model(batch[0]).float().square().sum())
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            norms.append(ak.get_total_norm([p.grad for p in self.parameters()]))
            optimizer.step()

        def configure_optimizers(self):
            return ak.optim.AdamW(self.parameters(), unscale_grads=unscale_grads)

    trainer = lightning.Trainer(accelerator="cpu", precision="bf16-mixed", max_steps=2, **QUIET)
    data = torch.utils.data.DataLoader(rows(), batch_size=16)
    if unscale_grads:
        trainer.fit(Module(), data)
        assert [round(norm.item(), 3) for norm in norms] == [0.5, 0.5]
    else:
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer.fit(Module(), data)


@pytest.mark.needs("lightning")
def test_lightning_clips_what_unscale_grads_left(tmp_path, monkeypatch):
    """And refuses to clip where the optimizer unscales inside its step."""
    import lightning

    plugins = importlib.import_module("lightning.pytorch.plugins.precision")
    monkeypatch.chdir(tmp_path)
    norms = []

    class Module(lightning.LightningModule):
        def __init__(self, options):
            super().__init__()
            self.model, self.options = ak.convert(build()), options

        def training_step(self, batch):
            return 100 * self.model(batch[0]).float().square().sum()

        def configure_optimizers(self):
            return ak.optim.AdamW(self.parameters(), **self.options)

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            norms.append(ak.get_total_norm([p.grad for p in self.parameters()]))

    def fit(**options):
        plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=ak.GradScaler("cpu", init_scale=4.0))
        trainer = lightning.Trainer(plugins=[plugin], accelerator="cpu", max_steps=3, gradient_clip_val=1.0, **QUIET)
        trainer.fit(Module(options), torch.utils.data.DataLoader(rows(), batch_size=16))

    fit(unscale_grads=True)
    assert torch.stack(norms).tolist() == pytest.approx([1.0] * 3, rel=1e-4)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit()


@pytest.mark.parametrize(
    ("scaler", "options", "aware", "told", "rates"),
    [
        (torch.amp.GradScaler, {}, False, [False, False, False], [0.5, 0.25, 0.125]),
        (torch.amp.GradScaler, {"unscale_grads": True}, False, [False, True, False], [0.5, 0.5, 0.25]),
        (ak.GradScaler, {}, False, [False, False, False], [0.5, 0.25, 0.125]),
        (ak.GradScaler, {}, True, [False, False, False], [0.5, 0.5, 0.25]),
    ],
)
@pytest.mark.needs("accelerate")
def test_accelerate_and_a_skipped_step(scaler, options, aware, told, rates, accelerate):
    """Its report of the second step, which overflows, and the scheduler's reaction; our scaler answers in each case."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")  # it has FP16 on a GPU alone
    accelerator.scaler = scaler("cpu")
    model = ak.convert(nn.Linear(4, 2))
    optimizer = ak.optim.AdamW(model.parameters(), lr=1.0, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = ak.amp.SkipAwareScheduler(scheduler, accelerator.scaler) if aware else accelerator.prepare(scheduler)
    found, skipped = [], []
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(2, 4)).float().sum() * factor)
        optimizer.step()
        scheduler.step()
        skipped.append(torch.equal(model.weight, before))
        if scaler is ak.GradScaler:
            assert accelerator.scaler.last_step_skipped == skipped[-1]
        found.append((optimizer.step_was_skipped, scheduler.get_last_lr()[0]))
    assert skipped == [False, True, False]
    assert found == list(zip(told, rates, strict=True))


@pytest.mark.needs("accelerate")
def test_accelerate(accelerate):
    (recipe,) = blocks("accelerate")
    data = torch.utils.data.DataLoader(rows(), batch_size=16)
    names = {"Accelerator": lambda **options: accelerate.Accelerator(cpu=True, **options), "ak": ak, "model": build()}
    names |= {"data": data, "criterion": nn.CrossEntropyLoss()}
    run(recipe, names)
    assert loss_of(names["model"]) < 0.7 * loss_of(build())


@pytest.mark.needs("transformers", "accelerate")
def test_hf_trainer_builds_our_optimizer_with_its_groups_and_numbers(tmp_path):
    """Each number of the TrainingArguments reaches the optimizer; biases and norms have no decay."""
    import transformers

    (recipe,) = blocks("hf-trainer")
    (options,) = re.findall(r"^options = .*", recipe, re.M)
    assert f"+ {options}\n" in (PAGES / "hf-trainer.md").read_text()
    made, numbers = [], {"learning_rate": 2.0**-9, "adam_beta1": 0.75, "adam_beta2": 0.875, "adam_epsilon": 2.0**-20}
    defaults = {
        "learning_rate": 5e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
    }

    class Trainer(transformers.Trainer):
        def train(self):
            made.append((self.model, self.create_optimizer()))

    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    for change in ({name: value} for name, value in {**numbers, "weight_decay": 0.125}.items()):
        wanted = {**defaults, **change}
        arguments = transformers.TrainingArguments(str(tmp_path), **wanted, report_to=[], use_cpu=True)
        names = {"TrainingArguments": lambda *_, there=arguments, **__: there, "Trainer": Trainer, "ak": ak}
        names |= {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "config": config, "data": []}
        run(recipe, names)
        model, optimizer = made.pop()
        assert type(optimizer) is ak.optim.AdamW
        for group in optimizer.param_groups:
            assert group["lr"] == wanted["learning_rate"]
            assert group["betas"] == (wanted["adam_beta1"], wanted["adam_beta2"])
            assert group["eps"] == wanted["adam_epsilon"]
        decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        plain = [p for name, p in model.named_parameters() if "ln_" in name or name.endswith("bias")]
        assert decays == {
            p: 0.0 if any(p is one for one in plain) else wanted["weight_decay"] for p in model.parameters()
        }


@pytest.mark.parametrize("fuse_loss", [False, True])
@pytest.mark.needs("transformers", "accelerate")
def test_hf_trainer(fuse_loss, tmp_path):
    """With the Trainer's own BF16 and clipping."""
    import transformers

    (recipe,) = blocks("hf-trainer")
    if fuse_loss:
        recipe = recipe.replace("from_config(config))", "from_config(config), fuse_loss=True)")
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    tokens = [torch.arange(i, i + 8) % 16 for i in range(16)] * 32
    made = []

    def trainer(*args, **options):
        made.append(transformers.Trainer(*args, **options))
        return made[-1]

    def arguments(folder, **options):
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "learning_rate": 3e-4}
        return transformers.TrainingArguments(str(tmp_path / folder), **options, **quiet)

    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "TrainingArguments": arguments}
    names |= {"Trainer": trainer, "ak": ak, "config": config}
    names["train_dataset"] = names["data"] = [{"input_ids": t, "labels": t} for t in tokens]
    torch.manual_seed(0)
    run(recipe, names)
    (done,) = made
    names["model"].eval()
    batch = torch.stack(tokens[:16])
    with torch.no_grad():
        after = names["model"](input_ids=batch, labels=batch).loss.item()
    assert done.state.global_step == 192
    assert (type(names["model"]).__module__ == "amp_kernels.nn.head_loss") == fuse_loss
    assert after < 0.75 * math.log(16)  # of one who knows nothing
