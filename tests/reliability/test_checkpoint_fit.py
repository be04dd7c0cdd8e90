"""A checkpoint that does not fit is refused before anything of the running state has changed."""

import pytest
import torch

import amp_kernels as ak

from .loop import Loop, assert_same


def saved(path, loop=None):
    loop = loop or Loop()
    for _ in range(3):
        loop.step()
    ak.checkpoint.save(path, **loop.parts)
    return loop


class Wider(Loop):
    def __init__(self):
        super().__init__(seed=3)
        self.model.append(torch.nn.Linear(1, 1))


class OtherWidth(Loop):
    def __init__(self):
        super().__init__(seed=3)
        self.model[3] = torch.nn.Linear(8, 2)


class Disabled(Loop):
    def __init__(self):
        super().__init__(seed=3)
        self.scaler = ak.GradScaler("cpu", enabled=False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Wider, r"its model lacks 4\.bias, 4\.weight \(2 in all\)"),
        (OtherWidth, r"its model\.3\.weight is torch\.float32 of shape \[1, 8\], and here it is torch\.float32 of shape \[2, 8\]"),
        (lambda: Loop(dtype=torch.bfloat16), r"its model\.0\.weight is torch.float32 .* here it is torch.bfloat16"),
        (lambda: Loop("SGD", options={"momentum": 0.9}), "SGD: a group lacks momentum, dampening; accepted: groups of the same kind"),
        (lambda: Loop(options={"state_dtype": torch.bfloat16}), r"its optimizer\.state\[0\]\.exp_avg is torch.float32 .* torch.bfloat16"),
        (Disabled, "it has the state of an enabled scaler, and this is not"),
    ],
)  # fmt: skip
def test_other_objects(tmp_path, other, message):
    saved(tmp_path / "c.pt")
    loop = other()
    before = loop.state()
    with pytest.raises(ValueError, match=message):
        ak.checkpoint.load(tmp_path / "c.pt", **loop.parts)
    assert_same(loop.state(), before)


def test_groups_and_sections(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = ak.optim.SGD([{"params": [p]} for p in model.parameters()])
    ak.checkpoint.save(tmp_path / "c.pt", model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"has groups of \[1, 1\] parameters, and here they are of \[2\]"):
        ak.checkpoint.load(tmp_path / "c.pt", optimizer=ak.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="it has no scaler; what it has: model, optimizer"):
        ak.checkpoint.load(tmp_path / "c.pt", scaler=ak.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["model"], "optimizer, scaler, scheduler, data"),
        (["model", "optimizer", "data"], "scaler, scheduler"),
        (["model", "optimizer", "scaler", "scheduler", "data"], None),
        ([], None),
    ],
)
def test_what_is_left_in_the_file_is_said(tmp_path, caplog, given, left):
    loop = saved(tmp_path / "c.pt")
    ak.checkpoint.load(tmp_path / "c.pt", **{name: loop.parts[name] for name in given})
    expected = (
        [f"checkpoint.load: {tmp_path / 'c.pt'} also has {left}, not restored: not given to load"] if left else []
    )
    assert [record.message for record in caplog.records] == expected


@pytest.mark.parametrize("which", ["scheduler", "data"])
def test_a_part_that_refuses_after_all_leaves_the_others_as_they_were(tmp_path, which):
    saved(tmp_path / "c.pt")
    loop = Loop("AdamW", seed=5)
    loop.step()

    class Refuses:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise RuntimeError("not mine")

    before = loop.state()
    with pytest.raises(RuntimeError, match="not mine"):
        ak.checkpoint.load(tmp_path / "c.pt", **{**loop.parts, which: Refuses()})
    assert_same(loop.state(), before)


def test_a_model_alone_leaves_the_generators_alone(tmp_path):
    loop = saved(tmp_path / "c.pt")
    model = Loop(seed=9).model
    before = torch.get_rng_state()
    ak.checkpoint.load(tmp_path / "c.pt", model=model, rng=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, model.state_dict().values(), loop.model.state_dict().values()))


def test_random_states_of_devices_that_are_not_here(tmp_path, monkeypatch):
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [state, state])
        ak.checkpoint.save(tmp_path / "c.pt")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ValueError, match=r"random states of 2 CUDA devices, and there are 1 here; accepted: .*rng=False"
    ):
        ak.checkpoint.load(tmp_path / "c.pt")
    ak.checkpoint.load(tmp_path / "c.pt", rng=False)
    given = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.extend)
    ak.checkpoint.load(tmp_path / "c.pt")
    assert len(given) == 2
