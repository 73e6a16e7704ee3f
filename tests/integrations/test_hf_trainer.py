"""The callback for the Trainer of Hugging Face: raw gradients of whole updates, and a training that does not notice."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rest_slow import rest_slow
from subjects import LR, VOCAB, batch, model, norm, sentences, token_loss, transformers
from torch import nn

import stabilitylab as sl
from stabilitylab.alarm import Alarm, AlarmRule, Alert, RuleSet, calibrate
from stabilitylab.errors import UsageError
from stabilitylab.integrations import before_clipping as seam
from stabilitylab.integrations.transformers import StabilityCallback

CLIP = 1e-3


def arguments(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": CLIP,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "seed": 1,
    }
    return transformers.TrainingArguments(**settings | changes)


def train(subject: nn.Module, folder: Path, callback: StabilityCallback | None = None, **changes: Any) -> Any:
    resume = changes.pop("resume", None)
    trainer = transformers.Trainer(
        model=subject,
        args=arguments(folder, **changes),
        train_dataset=sentences(16),
        eval_dataset=sentences(4),
        callbacks=[callback] if callback else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def by_hand(clip: float | None = CLIP) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, that of the first layer) of each update of plain SGD on the four sentences of an update."""
    subject = model().train()
    rows = []
    for step in range(4):
        total, count = token_loss(subject, range(4 * step, 4 * step + 4))
        parameters = list(subject.parameters())
        gradients = torch.autograd.grad(total / count, parameters)
        first = [g for (name, _), g in zip(subject.named_parameters(), gradients, strict=True) if ".h.0." in name]
        rows.append(((total / count).item(), norm(gradients), norm(first)))
        scale = min(1.0, clip / (rows[-1][1] + 1e-6)) if clip else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= LR * scale * gradient
    return rows


@pytest.mark.parametrize("clip", rest_slow([CLIP, 0.0], [CLIP]))
def test_gradients_are_those_before_clipping_and_of_all_micro_batches(tmp_path: Path, clip: float) -> None:
    train(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1), max_grad_norm=clip)
    run = sl.Run.open(tmp_path / "run")
    truth = by_hand(clip or None)
    assert run.status.state == "finished"
    assert list(run.metrics["step"]) == [0, 1, 2, 3]
    np.testing.assert_allclose(run.metrics["loss"], [loss for loss, _, _ in truth], rtol=1e-6)
    np.testing.assert_allclose(run.metrics["grad_norm_total"], [total for _, total, _ in truth], rtol=1e-5)
    layers = run.frame("grad_norm", by="layer")
    first = layers[(layers["layer"] == 1)]
    np.testing.assert_allclose(first["value"], [layer for _, _, layer in truth], rtol=1e-5)
    assert min(total for _, total, _ in truth) > 100 * CLIP  # clipping was hard
    assert set(run.metrics["lr"]) == {LR}


def test_means_are_over_real_tokens_as_the_attention_mask_says(tmp_path: Path) -> None:
    train(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1, probes="ln_input"))
    subject, norms = model(), []
    subject.transformer.h[0].ln_1.register_forward_pre_hook(lambda m, args: norms.append(args[0].norm(dim=-1)))
    content: Any = batch(range(4))
    subject(**content)
    real = content["attention_mask"].bool()
    frame = sl.Run.open(tmp_path / "run").frame("ln_input")
    recorded = frame[(frame["step"] == 0) & (frame["site"] == "transformer.h.0.ln_1")]["value"].item()
    assert recorded == pytest.approx(norms[0][real].mean().item(), rel=1e-6)
    assert recorded != pytest.approx(norms[0].mean().item(), rel=1e-4)


def test_training_does_not_notice(tmp_path: Path) -> None:
    settings = {"optim": "adamw_torch", "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 1}
    dropping = {"dtype": torch.float32, "dropout": 0.1}
    plain = train(model(**dropping), tmp_path / "a", **settings)
    callback = StabilityCallback(tmp_path / "run", every=1, probes="all", reference=batch(range(20, 23)))
    watched = train(model(**dropping), tmp_path / "b", callback, **settings)
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.state.log_history, watched.state.log_history, strict=True):
        assert one.get("eval_loss") == other.get("eval_loss")
    run = sl.Run.open(tmp_path / "run")
    assert list(run.metrics["step"]) == [0, 1, 2, 3, 4]  # the last is the reference pass after training
    assert {"model_update", "cosine_similarity", "update_ratio"} <= set(run.tables)
    assert not watched.model._forward_hooks
    assert not watched.model._forward_pre_hooks


@pytest.mark.slow
def test_evaluation_is_not_recorded(tmp_path: Path) -> None:
    tables = []
    for number, changes in enumerate(({}, {"eval_strategy": "steps", "eval_steps": 1})):
        out = tmp_path / str(number)
        train(model(), out, StabilityCallback(out / "run", every=1), **changes)
        tables.append(sl.Run.open(out / "run").frame("ln_input"))
    assert tables[0].equals(tables[1])


@pytest.mark.slow
def test_a_resumed_training_goes_on_in_the_same_run(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}

    def callback(name: str) -> StabilityCallback:
        return StabilityCallback(tmp_path / name, every=1, reference=batch(range(20, 23)))

    train(model(), tmp_path / "whole", callback("whole-run"), **saving)
    train(model(), tmp_path / "halves", callback("run"), **saving)
    checkpoint = tmp_path / "halves" / "checkpoints" / "checkpoint-2"
    subject = model(seed=9)  # whose weights the checkpoint replaces
    train(subject, tmp_path / "halves", callback("run"), resume=str(checkpoint), **saving)
    whole, run = sl.Run.open(tmp_path / "whole-run"), sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.step) == ("finished", 4)
    assert len(run.manifest["attempts"]) == 2
    for table in ("metrics", *whole.tables):
        assert run.frame(table).equals(whole.frame(table)), table


@pytest.mark.slow
def test_a_resumed_training_without_its_run_starts_one_at_its_step(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(model(), tmp_path, **saving)
    checkpoint = str(tmp_path / "checkpoints" / "checkpoint-2")
    train(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1), resume=checkpoint, **saving)
    run = sl.Run.open(tmp_path / "run")
    assert list(run.metrics["step"]) == [2, 3]
    np.testing.assert_allclose(run.metrics["grad_norm_total"], [row[1] for row in by_hand()[2:]], rtol=1e-5)
    with pytest.raises(UsageError, match="give another out="):
        train(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1), resume=checkpoint, **saving)


@pytest.mark.slow
def test_the_row_after_training_is_of_the_last_weights_not_of_the_best(tmp_path: Path) -> None:
    changes = {
        "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    callback = StabilityCallback(tmp_path / "run", every=1, reference=batch([20]))
    trainer = train(model(), tmp_path, callback, **changes)
    assert trainer.state.best_global_step < 4  # the highest loss, as asked
    update = sl.Run.open(tmp_path / "run").frame("model_update")
    steps = update.groupby("step")["cumulative"].max()
    assert steps[4] > steps[3] > steps[1]


class Breaks(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("the loop broke")


def failing(folder: Path, callback: StabilityCallback) -> None:
    trainer = transformers.Trainer(
        model=model(), args=arguments(folder), train_dataset=sentences(16), callbacks=[callback, Breaks()]
    )
    trainer.train()


@pytest.mark.slow
def test_an_error_under_with_ends_the_run_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the loop broke"),
        StabilityCallback(tmp_path / "run", every=1) as callback,
    ):
        failing(tmp_path, callback)
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.reason) == ("failed", "RuntimeError: the loop broke")
    assert list(run.metrics["step"]) == [0, 1]
    assert not seam._OPEN


@pytest.mark.slow
def test_a_program_that_an_error_ends_leaves_a_run_that_says_so(tmp_path: Path) -> None:
    program = f"""
        import sys
        sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
        from pathlib import Path
        from test_hf_trainer import StabilityCallback, failing
        failing(Path(sys.argv[1]), StabilityCallback(Path(sys.argv[1]) / "run", every=1))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.stderr.rstrip().endswith("RuntimeError: the loop broke")
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.reason) == ("failed", "RuntimeError: the loop broke")
    assert list(run.metrics["step"]) == [0, 1]


@pytest.mark.slow
def test_accelerate_is_as_it_was_when_nobody_watches(tmp_path: Path) -> None:
    before = {name: vars(seam.Accelerator)[name] for name in seam._AROUND}
    during: list[Any] = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            during[:] = [vars(seam.Accelerator)[name] for name in seam._AROUND]

    callback = StabilityCallback(tmp_path / "run", every=1)
    trainer = transformers.Trainer(
        model=model(), args=arguments(tmp_path), train_dataset=sentences(16), callbacks=[callback, Looks()]
    )
    trainer.train()
    assert not set(during) & set(before.values())
    assert {name: vars(seam.Accelerator)[name] for name in seam._AROUND} == before
    assert "seam" not in getattr(trainer.optimizer.step, "__func__", trainer.optimizer.step).__code__.co_filename


@pytest.mark.slow
def test_an_encoder_decoder_reads_its_own_masks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=VOCAB, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2, dropout_rate=0.0,
    )  # fmt: skip
    subject = transformers.T5ForConditionalGeneration(config)
    taken, norms = batch(range(4)), []
    target = batch(range(2, 6))["labels"]
    pairs = [
        {"input_ids": i, "attention_mask": m, "labels": t}
        for i, m, t in zip(taken["input_ids"], taken["attention_mask"], target, strict=True)
    ]
    block = subject.decoder.block[0].layer[0].layer_norm
    handle = block.register_forward_pre_hook(lambda m, args: norms.append(args[0].norm(dim=-1)))
    subject(**taken | {"labels": target})
    handle.remove()
    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    callback = StabilityCallback(tmp_path / "run", every=1, probes="ln_input")
    transformers.Trainer(model=subject, args=args, train_dataset=pairs, callbacks=[callback]).train()
    frame = sl.Run.open(tmp_path / "run").frame("ln_input")
    recorded = frame[frame["site"] == "decoder.block.0.layer.0.layer_norm"]["value"].item()
    assert recorded == pytest.approx(norms[0][target != -100].mean().item(), rel=1e-5)


@pytest.mark.slow
def test_an_alarm_comes_with_its_place(tmp_path: Path) -> None:
    heard: list[Alert] = []
    rules = RuleSet((AlarmRule("always", {"update.level": 1.0}, -20.0),))
    callback = StabilityCallback(out=tmp_path / "run", every=1, alarm=Alarm(rules, on_alarm=heard.append))
    train(model(), tmp_path, callback, max_steps=22)
    assert [(alert.step, alert.place is not None) for alert in heard] == [(20, True)]
    assert sl.Run.open(tmp_path / "run").manifest["alarms"][0]["sentence"] == heard[0].sentence


@pytest.mark.slow
def test_the_file_of_a_calibrated_alarm_is_taken(tmp_path: Path) -> None:
    """The run that calibrated it, again, has no alarm; one of 100 times its rate has one."""
    probes = ["grad_norm", "update_ratio"]
    train(model(), tmp_path, StabilityCallback(out=tmp_path / "run", every=1, probes=probes), max_steps=23)
    rules = RuleSet((AlarmRule("update", {"update.level": 1.0}, 0.0),))
    calibrate([tmp_path / "run"], rules).save(tmp_path / "mine.json")
    for name, rate, bounds in (("again", LR, []), ("fast", 100 * LR, [0.5])):
        callback = StabilityCallback(
            out=tmp_path / name, every=1, probes=probes, alarm=str(tmp_path / "mine.json"), config={"lr": rate}
        )
        train(model(), tmp_path, callback, max_steps=23, learning_rate=rate)
        told = sl.Run.open(tmp_path / name).manifest.get("alarms", [])
        assert [alert["bound"] for alert in told] == bounds


def test_what_only_the_trainer_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="'optimizer' is the trainer's"):
        StabilityCallback("run", optimizer=None)


@pytest.mark.slow
def test_a_run_that_exists_is_refused_before_the_first_update(tmp_path: Path) -> None:
    train(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1), max_steps=1)
    with pytest.raises(UsageError, match="exists already"):
        train(model(), tmp_path, StabilityCallback(tmp_path / "run", every=1), max_steps=1)
    assert not seam._OPEN
