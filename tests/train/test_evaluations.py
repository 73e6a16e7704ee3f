"""When and on what a run is evaluated, that training does not notice, and that a state is read as it was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_runs import edit
from rest_slow import rest_slow, slow
from torch.nn.functional import cross_entropy

from stabilitylab.config import parse_set, resolve, validated
from stabilitylab.errors import UsageError
from stabilitylab.models import build_model
from stabilitylab.store import Run
from stabilitylab.store.absent import AbsentRun
from stabilitylab.sweep.identity import key_of
from stabilitylab.train import checkpoint, plan, resume, start
from stabilitylab.train.loop import Trainer
from stabilitylab.train.passes import cosine_distances
from stabilitylab.train.run import Nobody, Plan
from stabilitylab.verdict import RULE


def prepared(*settings: str, steps: int = 20, stack: str = "encoder-decoder") -> Plan:
    common = (
        "model.T=6 model.dropout=0.1 train.warmup=3 train.lr=1e-3 data.sentences=4 data.held_out=6 data.validation=90"
    )
    sets = [*common.split(), "model.arch=branchnorm", f"model.stack={stack}", f"train.steps={steps}", *settings]
    return plan(resolve(parse_set(sets), depth=2))


def trained(folder: Path, *settings: str, **more: Any) -> Run:
    return Run.open(start(prepared(*settings, **more), folder, "run", Nobody()).path)


def evaluated(run: Run) -> list[int]:
    data = run.arrow("metrics", columns=["held_out_nll"]).to_pydict()
    return [step for step, nll in zip(data["step"], data["held_out_nll"], strict=True) if nll is not None]


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        slow(50, range(21)),  # as many as there are rows
        slow(10, range(0, 21, 2)),
        slow(4, (0, 5, 10, 15, 20)),
        (3, (0, 7, 14, 20)),  # ceil(k 20 / 3), and the row after training
        slow(0, (0, 20)),  # the probes' own pass alone
    ],
)
def test_evaluations_are_spread_evenly_apart_from_the_probes(count: int, rows: Any, tmp_path: Path) -> None:
    run = trained(tmp_path, "probes.update_every=20", f"train.evaluations={count}")
    assert evaluated(run) == [*rows]


@pytest.mark.slow
def test_the_probes_rows_are_evaluated_as_well(tmp_path: Path) -> None:
    run = trained(tmp_path, "probes.update_every=3", "train.evaluations=4")
    assert evaluated(run) == sorted({*range(0, 21, 3), *range(0, 21, 5)})
    assert run.frame("model_update")["step"].unique().tolist() == [*range(0, 20, 3), 20]


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder", "encoder"])
def test_training_does_not_notice(stack: str, tmp_path: Path) -> None:
    often, never = (
        trained(tmp_path / name, *sets, stack=stack)
        for name, sets in (("often", ()), ("never", ("train.evaluations=0", "data.validation=0")))
    )
    for name in ("loss", "grad_norm_total"):
        one, two = (run.metrics[name].dropna().tolist() for run in (often, never))
        assert one == two
    a, b = (checkpoint.load(run.path / "checkpoints", torch.device("cpu"))["model"] for run in (often, never))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert "validation_nll" in often.metrics
    assert "validation_nll" not in never.metrics


def after_training(ready: Plan, run: Run) -> Any:
    """A float64 copy of the trained model."""
    data = ready.dataset
    model = build_model(ready.config.model, source_vocab=data.source_vocab, target_vocab=data.target_vocab, seed=0)
    model.load_state_dict(checkpoint.load(run.path / "checkpoints", torch.device("cpu"))["model"])
    model.double().eval()
    model.set_row(20)
    return model


@pytest.mark.parametrize("stack", rest_slow(["encoder-decoder", "decoder"], ["encoder-decoder"]))
def test_the_loss_after_training_is_that_of_all_sentences(stack: str, tmp_path: Path) -> None:
    """Against a float64 copy of the trained model, sentence by sentence, without padding."""
    ready = prepared(stack=stack)
    run = Run.open(start(ready, tmp_path, "run", Nobody()).path)
    data, model = ready.dataset, after_training(ready, run)
    total, right, tokens, sentences = 0.0, 0, 0, 0
    for batch in data.validation():
        for n in range(len(batch.labels)):
            real = batch.weight[n] > 0
            inputs = {name: tensor[n : n + 1] for name, tensor in batch.inputs.items()}
            for name in ("source", "target", "tokens"):
                mask = inputs.get({"tokens": "mask"}.get(name, f"{name}_mask"))
                if name in inputs and mask is not None:
                    inputs[name] = inputs[name][:, mask[0]]
            inputs = {name: torch.ones_like(t[:, t[0]]) if "mask" in name else t for name, t in inputs.items()}
            with torch.no_grad():
                logits = model(**inputs)[0]
            labels = batch.labels[n][real]
            total += float(cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(-1) == labels).sum())
            tokens, sentences = tokens + len(labels), sentences + 1
    last = run.arrow("metrics").to_pylist()[-1]
    assert last["step"] == 20
    assert last["validation_nll"] == pytest.approx(total / tokens, rel=1e-5)
    assert last["validation_accuracy"] == pytest.approx(right / tokens, abs=2 / tokens)
    assert sentences == 90 == run.manifest["data"]["validation"]
    assert run.metrics["validation_nll"].notna().sum() == 1


@pytest.mark.slow
def test_the_verdict_is_about_all_sentences_and_is_read_as_it_was_given(tmp_path: Path) -> None:
    run = trained(tmp_path)
    verdict = run.verdict
    assert verdict is not None
    assert verdict.recorded() == run.status.facts["verdict"]
    assert (verdict.sentences, verdict.rule) == (90, RULE)
    last, base = run.arrow("metrics").to_pylist()[-1], run.manifest["validation_unigram"]
    assert verdict.nll_gap == pytest.approx(last["validation_nll"] - base["cross_entropy"])
    _recorded_before(run.path)
    assert run.verdict == verdict  # judged anew, from the tables alone
    assert verdict.trend is not None
    assert verdict.trend.evaluations == 8


@pytest.mark.slow
def test_what_the_source_is_worth_is_measured_with_the_held_out_batch(tmp_path: Path) -> None:
    """Sentence by sentence, each alone with the source of the next one."""
    ready = prepared()
    run = Run.open(start(ready, tmp_path, "run", Nobody()).path)
    batch, model = ready.dataset.held_out, after_training(ready, run)
    total = 0.0
    lengths = batch.weight.sum(1)
    real = int((lengths > 0).sum())
    for place in range(real):
        for sign, source in ((1, (place + 1) % real), (-1, place)):
            words = batch.inputs["source"][source]
            with torch.no_grad():
                logits = model(source=words[None, words != 0], target=batch.inputs["target"][place][None])[0]
            kept = batch.weight[place] > 0
            total += sign * float(cross_entropy(logits[kept], batch.labels[place][kept], reduction="sum"))
    data = run.arrow("metrics", columns=["source_worth"]).to_pydict()
    measured = [step for step, value in zip(data["step"], data["source_worth"], strict=True) if value is not None]
    assert measured == evaluated(run)
    worth = data["source_worth"][-1]
    assert worth == pytest.approx(total / float(lengths.sum()), rel=1e-3)
    assert worth != 0
    assert "source_worth" not in trained(tmp_path / "alone", stack="decoder").metrics


@pytest.mark.parametrize("measured", ["reference", "curvature_loss", "validate", "source"])
def test_training_finds_its_own_masks_after_every_measurement(measured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the measurement ends in an error."""
    ready = prepared()
    trainer = Trainer(ready.config, ready.dataset, AbsentRun("nowhere"), torch.device("cpu"))
    passes, own, seen = trainer.passes, ready.dataset.micro_batch(0).masks, []
    passes.masks = own
    trainer.model.register_forward_hook(lambda *_: seen.append(passes.masks))
    getattr(passes, measured)()
    assert seen
    assert all(masks is not own for masks in seen)
    assert passes.masks is own
    monkeypatch.setattr(type(trainer.model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        getattr(passes, measured)()
    assert passes.masks is own


@pytest.mark.slow
def test_curvature_of_the_update_looks_at_the_micro_batches_of_its_row() -> None:
    """Of each real token of all of them, in any row; the other choices stay with one batch."""
    for choice in ("update", "training", "held-out"):
        ready = prepared(f"probes.curvature_batch={choice}", "train.accumulate=2")
        trainer = Trainer(ready.config, ready.dataset, AbsentRun("nowhere"), torch.device("cpu"))
        trainer.model.eval()
        for row in (0, 3):
            trainer.row = row
            update = [ready.dataset.micro_batch(row, part, 2) for part in range(2)]
            first = ready.dataset.micro_batch(0, 0, 2)
            batches = {"update": update, "training": [first], "held-out": [ready.dataset.held_out]}[choice]
            expected = []
            for batch in batches:
                real = batch.weight > 0
                logits = trainer.model(**batch.inputs)[real]
                smoothing = ready.config.train.label_smoothing
                expected.append(cross_entropy(logits, batch.labels[real], label_smoothing=smoothing, reduction="none"))
            torch.testing.assert_close(trainer.passes.curvature_loss(), torch.cat(expected))


def _recorded_before(path: Path) -> None:
    """As an older version wrote it, by an older rule."""
    document = json.loads((path / "status.json").read_text())
    document["facts"]["verdict"] = {"state": "stuck", "step": 0, "reason": "", "nll_gap": 0.0, "accuracy_gap": 0.0}
    edit(path / "status.json", document)


@pytest.mark.slow
def test_an_old_run_with_few_evaluations_cannot_be_told(tmp_path: Path) -> None:
    run = trained(tmp_path, "train.evaluations=0", "data.validation=0", "probes.update_every=log")
    _recorded_before(run.path)
    assert run.verdict is not None
    assert len(evaluated(run)) > 8  # rows 0 to 6 among them, long before the end
    run = trained(tmp_path / "fewer", "train.evaluations=0", "data.validation=0", "probes.update_every=10")
    _recorded_before(run.path)
    assert run.verdict is not None
    assert (run.verdict.state, run.verdict.sentences) == ("cannot tell", 0)
    assert "3 evaluations cannot show whether it falls" in run.verdict.reason


def test_distances_of_tokens_are_means_over_pairs() -> None:
    """Within sentences and between them, pair by pair, and where all tokens are one direction but for 1e-9."""
    torch.manual_seed(0)
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    for hidden in (torch.randn(3, 4, 8), 1 + 1e-9 * torch.randn(3, 4, 8, dtype=torch.float64)):
        tokens = [(sentence, hidden[sentence, place].double()) for sentence, place in real.nonzero().tolist()]
        found: dict[bool, list[float]] = {True: [], False: []}
        for i, (sentence, x) in enumerate(tokens):
            for j, (other, y) in enumerate(tokens):
                if i != j:
                    off = x / x.norm() - y / y.norm()
                    found[sentence == other].append(float(off @ off) / 2)
        within, between = cosine_distances(hidden, real)
        assert float(within) == pytest.approx(sum(found[True]) / len(found[True]), rel=1e-6)
        assert float(between) == pytest.approx(sum(found[False]) / len(found[False]), rel=1e-6)
    alone, none = cosine_distances(torch.randn(1, 1, 8), torch.ones(1, 1).bool())
    assert alone.isnan()
    assert none.isnan()


def test_a_constant_encoder_has_no_distances(tmp_path: Path) -> None:
    ready = prepared()
    trainer = Trainer(ready.config, ready.dataset, AbsentRun("nowhere"), torch.device("cpu"))
    encoder = trainer.model.encoder
    assert encoder is not None
    before = trainer.passes.source()
    assert before["encoder_distance_within"] > 0.1
    assert before["encoder_distance_between"] > 0.1
    handle = encoder.register_forward_hook(lambda module, given, output: torch.ones_like(output))
    after = trainer.passes.source()
    handle.remove()
    assert {name: float(value) for name, value in after.items()} == dict.fromkeys(before, 0.0)


@pytest.mark.slow
def test_a_run_that_stops_before_its_schedule_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Bit for bit, and its key is that of a run that was never stopped."""
    linear = ("train.schedule=linear", "train.evaluations=10", "probes.update_every=20")
    whole = trained(tmp_path / "whole", *linear)
    first = prepared(*linear, "train.horizon=20", steps=8)
    path = start(first, tmp_path, "stopped", Nobody()).path
    half = Run.open(path)
    assert half.status.step == 8
    assert evaluated(half) == [0, 2, 4, 6, 8]
    assert key_of(validated(half.config)) != key_of(validated(whole.config))
    resume(path, 20, Nobody())
    again = Run.open(path)
    rows = [
        {name: value for name, value in row.items() if name not in ("tokens_per_second", "memory_bytes")}
        for row in again.arrow("metrics").to_pylist()
    ]
    want = whole.arrow("metrics").to_pylist()
    assert rows == [{name: row[name] for name in rows[0]} for row in want]
    assert key_of(validated(again.config)) == key_of(validated(whole.config))
    with pytest.raises(UsageError, match=r"must not exceed train\.horizon = 20"):
        resume(path, 21, Nobody())
