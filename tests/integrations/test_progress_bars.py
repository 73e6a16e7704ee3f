"""The numbers in the progress bars of the Trainer and of Lightning, and a training that does not notice them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import model, transformers
from test_hf_trainer import arguments, sentences, train

import stabilitylab as sl
from stabilitylab.alarm import Alarm, AlarmRule, RuleSet
from stabilitylab.integrations.transformers import HuggingFaceCallback

try:
    import lightning
    from lightning.pytorch import Callback
    from test_lightning_fit import fit

    from stabilitylab.integrations.lightning import LightningCallback
except ImportError:
    Callback = object

of_lightning = pytest.mark.skipif(Callback is object, reason="Lightning is not installed")

LOUD = RuleSet((AlarmRule("always", {"update.level": 1.0}, -20.0),))  # at the first row that may have an alarm


class Reader(transformers.TrainerCallback):
    """What the callback behind ours gets, as the bar does."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def trained(folder: Path, callback: Any, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    reader = Reader()
    settings = {"logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2} | changes
    trainer = transformers.Trainer(
        model=model(dropout=0.1),
        args=arguments(folder, **settings),
        train_dataset=sentences(16),
        eval_dataset=sentences(4),
        callbacks=[*([callback] if callback else []), reader],
    )
    trainer.train()
    return trainer, reader.logs


def test_the_trainers_bar_has_the_gradient_norm_of_each_logged_update(tmp_path: Path) -> None:
    trainer, logs = trained(tmp_path, HuggingFaceCallback(tmp_path / "run", every=1))
    recorded = sl.Run.open(tmp_path / "run").metrics["grad_norm_total"].tolist()
    steps = [one for one in logs if "loss" in one]
    assert [one["grad_norm_total"] for one in steps] == recorded
    assert all("grad_norm_total" not in one for one in logs if "loss" not in one)
    assert any("eval_loss" in one for one in logs)
    assert not any("alarm" in one for one in logs)
    assert not any("grad_norm_total" in one for one in trainer.state.log_history)
    assert trainer.state.log_history[0]["loss"] == steps[0]["loss"]  # the Trainer's own numbers are its own


@pytest.mark.slow
def test_training_does_not_notice_the_bar(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "a", None)
    watched, _ = trained(tmp_path / "b", HuggingFaceCallback(tmp_path / "run", every=1))
    assert all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))


@pytest.mark.slow
def test_rows_that_are_not_probed_have_the_norm_too(tmp_path: Path) -> None:
    _, logs = trained(tmp_path, HuggingFaceCallback(tmp_path / "run", every=3, probes="ln_input"))
    assert [one["grad_norm_total"] > 0 for one in logs if "loss" in one] == [True] * 4


@pytest.mark.slow
def test_the_trainers_lines_name_the_last_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alarm = Alarm(LOUD)
    callback = HuggingFaceCallback(tmp_path / "run", every=1, alarm=alarm)
    train(model(), tmp_path, callback, logging_strategy="steps", logging_steps=1, max_steps=22)
    (alert,) = alarm.alerts
    lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]  # of its own PrinterCallback
    assert len(lines) == 22
    assert f"'alarm': '{alert.title} at step {alert.step}'" in lines[-1]
    assert "'grad_norm_total'" in lines[-1]
    assert "'alarm'" not in lines[5]


class Bar(Callback):
    """Reads the metrics of the bar after each batch, as a bar does."""

    def __init__(self) -> None:
        self.shown: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))


@of_lightning
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_lightnings_bar_has_the_gradient_norm_of_the_update_before(tmp_path: Path) -> None:
    bar, alarm = Bar(), Alarm(LOUD)
    callback = LightningCallback(tmp_path / "run", every=1, alarm=alarm)
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path / "logs")
    watched = fit(
        model(), tmp_path, None, callbacks=[callback, bar], max_steps=24, lines=96, logger=logger, log_every_n_steps=1
    )
    recorded = sl.Run.open(tmp_path / "run").metrics["grad_norm_total"].tolist()
    after = bar.shown[1::2]  # two batches are an update
    assert "grad_norm_total" not in after[0]
    assert [one["grad_norm_total"] for one in after[1:]] == pytest.approx(recorded[:-1], rel=1e-6)
    assert bar.shown[-1]["alarm_step"] == alarm.alerts[-1].step == 20
    assert "alarm_step" not in bar.shown[10]
    logged = (Path(logger.log_dir) / "metrics.csv").read_text() if Path(logger.log_dir, "metrics.csv").exists() else ""
    assert "grad_norm_total" not in logged
    plain = fit(model(), tmp_path, None, max_steps=24, lines=96)
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
