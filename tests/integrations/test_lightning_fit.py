"""The callback for Lightning: gradients before clipping, of whole updates, and a fit that does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from subjects import LR, batch, model, norm, sentences, token_loss
from torch import nn
from torch.utils.data import DataLoader

import stabilitylab as sl
from stabilitylab.alarm import Alarm, AlarmRule, Alert, RuleSet, calibrate
from stabilitylab.errors import UsageError

lightning = pytest.importorskip("lightning.pytorch")

from stabilitylab.integrations.lightning import StabilityCallback  # noqa: E402

CLIP = 1e-3
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Module(lightning.LightningModule):
    def __init__(self, subject: nn.Module, breaks_at: int = -1) -> None:
        super().__init__()
        self.model, self.breaks_at, self.norms = subject, breaks_at, []

    def forward(self, **content: Any) -> Any:
        return self.model(**content)

    def training_step(self, content: Any, index: int) -> torch.Tensor:
        if index == self.breaks_at:
            raise RuntimeError("the loop broke")
        return self.model(**content).loss

    def validation_step(self, content: Any, index: int) -> None:
        self.model(**content)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(norm([p.grad for p in self.parameters() if p.grad is not None]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.5)


def fit(
    subject: nn.Module, folder: Path, callback: StabilityCallback | None, breaks_at: int = -1, **changes: Any
) -> Module:
    path, lines = changes.pop("path", None), changes.pop("lines", 16)
    module = Module(subject, breaks_at)
    settings = {
        "accelerator": "cpu", "devices": 1, "max_steps": 4, "accumulate_grad_batches": 2, "gradient_clip_val": CLIP,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, "callbacks": [callback] if callback else [], "num_sanity_val_steps": 0,
    } | changes  # fmt: skip
    torch.manual_seed(5)
    loader = DataLoader(sentences(lines), batch_size=2)
    validation = DataLoader(sentences(4), batch_size=2) if "val_check_interval" in changes else None
    lightning.Trainer(**settings).fit(module, loader, validation, ckpt_path=path)
    return module


def first_update() -> tuple[float, float]:
    """(loss, gradient norm) of four sentences in two batches, each batch's loss the mean over its tokens."""
    subject, losses = model().train(), []
    for numbers in (range(2), range(2, 4)):
        total, _ = token_loss(subject, numbers)
        losses.append(total / int((batch(numbers)["labels"][:, 1:] != -100).sum()))
    loss = torch.stack(losses).mean()
    return loss.item(), norm(torch.autograd.grad(loss, list(subject.parameters())))


def test_gradients_are_those_before_clipping_and_of_all_micro_batches(tmp_path: Path) -> None:
    fit(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1))
    run, (loss, total) = sl.Run.open(tmp_path / "run"), first_update()
    assert run.status.state == "finished"
    assert list(run.metrics["step"]) == [0, 1, 2, 3]
    assert run.metrics["loss"][0] == pytest.approx(loss, rel=1e-6)
    assert run.metrics["grad_norm_total"][0] == pytest.approx(total, rel=1e-6)
    assert total > 100 * CLIP
    assert set(run.metrics["lr"]) == {LR}


def test_gradients_and_the_loss_under_a_scaler_are_unscaled(tmp_path: Path) -> None:
    precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
    rows = []
    for name, changes in (("plain", {}), ("scaled", {"plugins": [precision]})):
        fit(model(dtype=torch.float32), tmp_path, StabilityCallback(tmp_path / name, every=1), max_steps=1, **changes)
        metrics = sl.Run.open(tmp_path / name).metrics
        rows.append([metrics[column][0] for column in ("grad_norm_total", "loss")])
    assert rows[1] == pytest.approx(rows[0], rel=0.02)  # half precision


def test_means_are_over_real_tokens_as_the_batch_says(tmp_path: Path) -> None:
    fit(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1, probes="ln_input"), max_steps=1)
    subject, norms = model(), []
    subject.transformer.h[0].ln_1.register_forward_pre_hook(lambda m, args: norms.append(args[0].norm(dim=-1)))
    content: Any = batch(range(4))
    subject(**content)
    frame = sl.Run.open(tmp_path / "run").frame("ln_input")
    recorded = frame[frame["site"] == "model.transformer.h.0.ln_1"]["value"].item()
    assert recorded == pytest.approx(norms[0][content["attention_mask"].bool()].mean().item(), rel=1e-6)


def test_training_does_not_notice(tmp_path: Path) -> None:
    changes = {"val_check_interval": 2, "gradient_clip_val": 0.5}
    plain = fit(model(dropout=0.1), tmp_path, None, **changes)
    callback = StabilityCallback(tmp_path / "run", every=1, probes="all", reference=batch([20]))
    watched = fit(model(dropout=0.1), tmp_path, callback, **changes)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    run = sl.Run.open(tmp_path / "run")
    assert list(run.metrics["step"]) == [0, 1, 2, 3, 4]
    assert {"model_update", "cosine_similarity", "update_ratio"} <= set(run.tables)


def test_validation_is_not_recorded(tmp_path: Path) -> None:
    tables = []
    for number, changes in enumerate(({}, {"val_check_interval": 2})):
        out = tmp_path / f"run-{number}"
        fit(model(), tmp_path, StabilityCallback(out, every=1), **changes)
        tables.append(sl.Run.open(out).frame("ln_input"))
    assert tables[0].equals(tables[1])


def test_a_fit_from_a_checkpoint_goes_on_in_the_same_run(tmp_path: Path) -> None:
    def saving(name: str) -> dict[str, Any]:
        save = lightning.callbacks.ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1
        )
        watch = StabilityCallback(tmp_path / f"{name}-run", every=1, reference=batch([20]))
        return {"callbacks": [watch, save], "enable_checkpointing": True, "lines": 8}

    fit(model(), tmp_path, None, **saving("halves"), max_steps=3)
    then = fit(model(seed=9), tmp_path, None, **saving("halves"), path=tmp_path / "halves" / "step=2.ckpt")
    run = sl.Run.open(tmp_path / "halves-run")
    assert (run.status.state, run.status.step) == ("finished", 4)
    assert len(run.manifest["attempts"]) == 2
    assert list(run.metrics["step"]) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(run.metrics["grad_norm_total"][2:4], then.norms, rtol=1e-12)
    held_out: Any = {key: value for key, value in batch([20]).items() if key != "labels"}
    with torch.no_grad():  # the start that the update is measured from is that of the first fit
        start, end = (m.transformer.eval()(**held_out).last_hidden_state for m in (model(), then.model))
    moved = (end - start).norm(dim=-1)[held_out["attention_mask"].bool()].mean().item()
    recorded = run.frame("model_update").query("step == 4 and stack_name == 'model.transformer'")["cumulative"].item()
    assert recorded == pytest.approx(moved, rel=1e-12)


def test_an_error_keeps_the_rows_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the loop broke"):
        fit(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1), breaks_at=5)
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.reason) == ("failed", "RuntimeError: the loop broke")
    assert list(run.metrics["step"]) == [0, 1]


def test_an_alarm_comes_with_its_place(tmp_path: Path) -> None:
    heard: list[Alert] = []
    rules = RuleSet((AlarmRule("always", {"update.level": 1.0}, -20.0),))
    callback = StabilityCallback(out=tmp_path / "run", every=1, alarm=Alarm(rules, on_alarm=heard.append))
    fit(model(), tmp_path, callback, max_steps=22, lines=88)
    assert [(alert.step, alert.place is not None) for alert in heard] == [(20, True)]
    assert sl.Run.open(tmp_path / "run").manifest["alarms"][0]["sentence"] == heard[0].sentence


@pytest.mark.slow
def test_the_file_of_a_calibrated_alarm_is_taken(tmp_path: Path) -> None:
    """The run that calibrated it, again, has no alarm; one from weights a tenth as large, whose updates are larger in
    relation, has one."""
    probes = ["grad_norm", "update_ratio"]
    fit(model(), tmp_path, StabilityCallback(out=tmp_path / "run", every=1, probes=probes), max_steps=23, lines=92)
    rules = RuleSet((AlarmRule("update", {"update.level": 1.0}, 0.0),))
    calibrate([tmp_path / "run"], rules).save(tmp_path / "mine.json")
    for name, size, bounds in (("again", 1.0, []), ("small", 0.1, [0.5])):
        subject = model()
        with torch.no_grad():
            for parameter in subject.parameters():
                parameter *= size
        callback = StabilityCallback(out=tmp_path / name, every=1, probes=probes, alarm=tmp_path / "mine.json")
        fit(subject, tmp_path, callback, max_steps=23, lines=92)
        told = sl.Run.open(tmp_path / name).manifest.get("alarms", [])
        assert [alert["bound"] for alert in told] == bounds


class TwoOptimizers(Module):
    def __init__(self) -> None:
        super().__init__(model())
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=LR), torch.optim.SGD(self.parameters(), lr=LR)]


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[StabilityCallback(tmp_path / "run")],
    )  # fmt: skip
    with pytest.raises(UsageError, match="2 optimizers"):
        trainer.fit(TwoOptimizers(), DataLoader(sentences(4), batch_size=2))
    assert not (tmp_path / "run").exists()


def test_updates_are_recorded_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"dtype": torch.float32, "dropout": 0.1}

    def loss_fn(module: Any, content: Any) -> torch.Tensor:
        return module(**content).loss

    plain = fit(model(**shape), tmp_path, None)
    given = sl.Recorder(loss_fn, every=2, digests=1, clip=CLIP, accumulate=2, labels="labels")
    recorded = fit(
        model(**shape), tmp_path, StabilityCallback(tmp_path / "run", probes="none", record=given, strict=True)
    )
    pairs = zip(plain.parameters(), recorded.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "training differs under the recorder"
    fresh = Module(model(**shape))
    optimizer = torch.optim.SGD(fresh.parameters(), lr=LR, momentum=0.5)
    found = sl.explain(tmp_path / "run", fresh, loss_fn, optimizer)
    assert found.audit is not None
    assert (found.audit.replayed, found.audit.equal) == (4, 4), str(found)
    assert [one for one in found.findings if one.accused] == [], str(found)


class Evaluated(Module):
    """Steps with L-BFGS, which evaluates the loss several times an update."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__(subject)
        self.losses: list[float] = []

    def training_step(self, content: Any, index: int) -> torch.Tensor:
        loss = super().training_step(content, index)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)


def test_an_update_that_evaluates_its_closure_several_times_has_one_row(tmp_path: Path) -> None:
    callback, module = StabilityCallback(tmp_path / "run", every=1, probes="standard"), Evaluated(model())
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 3, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(**settings, **quiet, default_root_dir=tmp_path, callbacks=[callback])
    trainer.fit(module, DataLoader(sentences(6), batch_size=2))
    assert len(module.losses) == 9
    run = sl.Run.open(tmp_path / "run")
    assert list(run.metrics["step"]) == [0, 1, 2]
    assert list(run.metrics["loss"]) == pytest.approx(module.losses[::3], rel=1e-6)
    assert list(run.metrics["grad_norm_total"]) == pytest.approx(module.norms[::3], rel=1e-6)
    assert "loop_warnings" not in run.manifest
