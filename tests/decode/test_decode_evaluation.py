"""A trained run is scored on every sentence, and two of them are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from edited_runs import edit

from stabilitylab import decode
from stabilitylab.config import parse_set, resolve
from stabilitylab.decode import translations
from stabilitylab.errors import InputError, UsageError
from stabilitylab.store import Run
from stabilitylab.train import checkpoint, plan, start

SETTINGS = (
    "model.d_model=32 model.d_ffn=64 model.heads=2 model.dropout=0 train.lr=5e-3 train.warmup=5 data.sentences=64 "
    "data.vocab_size=64 probes.every=100 probes.update_every=100"
)


class Silent:
    def opened(self, path, manifest) -> None: ...

    def show(self, report) -> None: ...


def trained(folder: Path, name: str, *settings: str, depth: int = 2) -> Path:
    sets = [*SETTINGS.split(), *settings]
    return start(plan(resolve(parse_set(sets), depth=depth)), folder, name, Silent()).path


HOW = {
    "long": ("model.arch=preln", "train.steps=100"),
    "early": ("model.arch=preln", "train.steps=30"),
    "short": ("model.arch=branchnorm", "model.T=40", "train.steps=9"),
}


class Runs(dict[str, Path]):
    """A run that has learnt something of the synthetic task, one of a few updates, and one that is still in its
    ramp, each made when a test asks for it."""

    def __init__(self, folder: Path, make: Callable[[Path, str], Path]) -> None:
        super().__init__()
        self._folder, self._make = folder, make

    def __missing__(self, name: str) -> Path:
        self[name] = self._make(self._folder, name)
        return self[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), lambda folder, name: trained(folder, name, *HOW[name]))


@pytest.fixture
def runs(made: Runs, tmp_path: Path) -> Runs:
    return Runs(tmp_path, lambda folder, name: Path(shutil.copytree(made[name], folder / name)))


@pytest.mark.slow
def test_a_run_is_scored_on_all_its_held_out_sentences(runs: dict[str, Path]) -> None:
    told: list[tuple[int, int]] = []
    result = decode.evaluate(runs["long"], progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (24, 24)
    assert Run.open(runs["long"]).evaluation == result
    references, hypotheses = translations.read(runs["long"])
    assert len(references) == len(hypotheses) == result["sentences"] == 24
    assert result["bleu"] == sacrebleu.corpus_bleu(hypotheses, [references]).score > 1  # it did learn something
    assert result["chrf"] == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert "tok:13a" in result["signature"]
    assert "nc:6" in result["chrf_signature"]
    kept = {"beam": 4, "length_penalty": 0.6, "penalty_kind": "fairseq", "row": 100, "alpha": None, "truncated": 0}
    kept["max_length"] = 24
    assert result.items() >= kept.items()
    assert result["score"] == "log p / len^0.6, len counts EOS"
    pairs = list(zip(references, hypotheses, strict=True))
    assert len(result["examples"]) == 5
    assert all((example["reference"], example["hypothesis"]) in pairs for example in result["examples"])
    assert not [path for path in runs["long"].iterdir() if path.name.endswith(".tmp")]


@pytest.mark.slow
def test_alpha_is_the_checkpoints_and_matters(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        decode.evaluation, "translate", lambda model, *a, **k: seen.append(model) or decode.translate(model, *a, **k)
    )
    result = decode.evaluate(runs["short"], sentences=3, beam=2, penalty_kind="gnmt", length_penalty=1.0)
    assert result["row"] == 9
    assert result["alpha"] == pytest.approx((9 + 1) / 40)
    assert seen[0].schedule.get() == result["alpha"]
    state = torch.load(runs["short"] / "checkpoints" / "step-00000009.pt", weights_only=True)["model"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in seen[0].state_dict().items() if "layers" in name)
    assert not seen[0].training
    assert result["sentences"] == 3
    assert result["score"] == "log p / ((5 + len) / 6)^1, len counts EOS"


def test_sentences_come_back_in_their_order(runs: dict[str, Path]) -> None:
    """They are translated by length, in batches; one at a time gives the same."""
    decode.evaluate(runs["early"])
    together = translations.read(runs["early"])
    decode.evaluate(runs["early"], sentences=5)
    assert translations.read(runs["early"]) == (together[0][:5], together[1][:5])
    assert len(set(together[1])) > 10


def test_a_text_of_another_kind_or_none_at_all(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no vocabulary for other text"):
        decode.evaluate(runs["early"], data="text:a,b")
    with pytest.raises(UsageError, match="sentences = 0"):
        decode.evaluate(runs["early"], sentences=0)
    with pytest.raises(UsageError, match="max_length = 0"):
        decode.evaluate(runs["early"], max_length=0)
    with pytest.raises(UsageError, match="unknown length penalty"):
        decode.evaluate(runs["early"], penalty_kind="none")
    assert not (runs["early"] / "evaluation.json").exists()
    with pytest.raises(InputError, match=r"absent"):
        decode.evaluate(tmp_path / "absent")


def test_a_run_without_a_checkpoint_or_with_a_foreign_one(runs: dict[str, Path]) -> None:
    newest = sorted((runs["early"] / "checkpoints").iterdir())[-1]
    foreign = next((runs["short"] / "checkpoints").iterdir())
    shutil.copy(foreign, newest)
    with pytest.raises(InputError, match="it belongs to another run"):
        decode.evaluate(runs["early"])
    state = torch.load(foreign, weights_only=True)
    checkpoint.save(newest.parent, 30, {**state, "model": {}}, Run.open(runs["early"]).identity.run_id)
    with pytest.raises(InputError, match="does not belong to its configuration"):
        decode.evaluate(runs["early"])
    shutil.rmtree(runs["early"] / "checkpoints")
    with pytest.raises(InputError, match=r"has no checkpoint.*--resume"):
        decode.evaluate(runs["early"])


def edited(run: Path, change) -> None:
    document = json.loads((run / "run.json").read_text(encoding="utf-8"))
    change(document)
    edit(run / "run.json", document)


def test_runs_that_translate_nothing(runs: dict[str, Path]) -> None:
    edited(runs["early"], lambda document: document["config"]["model"].update(stack="decoder", encoder_layers=0))
    with pytest.raises(UsageError, match=r"single stack \(decoder\)"):
        decode.evaluate(runs["early"])
    edited(runs["short"], lambda document: document.update(kind="onestep"))
    with pytest.raises(InputError, match="holds no trained model"):
        decode.evaluate(runs["short"])


@pytest.mark.parametrize("key", ["train_sha256", "held_out_sha256"])
def test_data_that_have_changed(runs: dict[str, Path], key: str) -> None:
    edited(runs["early"], lambda document: document["data"].update({key: "other"}))
    with pytest.raises(InputError, match="have changed since it was trained"):
        decode.evaluate(runs["early"])


def test_a_model_that_is_not_finite(runs: dict[str, Path]) -> None:
    newest = sorted((runs["early"] / "checkpoints").iterdir())[-1]
    state = torch.load(newest, weights_only=True)
    state["model"]["output.weight"][:] = torch.nan
    checkpoint.save(newest.parent, 30, state, Run.open(runs["early"]).identity.run_id)
    with pytest.raises(InputError, match="not finite"):
        decode.evaluate(runs["early"])


def evaluated(folder: Path, references: list[str], hypotheses: list[str]) -> Path:
    folder.mkdir()
    translations.write(folder, references, hypotheses)
    return folder


def test_what_is_written_is_read_again_and_scores_the_same(tmp_path: Path) -> None:
    references = ['He said "no".', "a\tb", "", "line\u2028separator", "x\r", '"']
    hypotheses = ["tab\there", '"quoted', "ü\x85", "", "two\nlines", "'"]
    run = evaluated(tmp_path / "run", references, hypotheses)
    read = translations.read(run)
    assert read == (translations.plain(references), translations.plain(hypotheses))
    assert read[0][:2] == ['He said "no".', "a b"]
    assert sacrebleu.corpus_bleu(read[1], [read[0]]).score == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert sacrebleu.corpus_chrf(read[1], [read[0]]).score == sacrebleu.corpus_chrf(hypotheses, [references]).score


def three(tmp_path: Path) -> list[Path]:
    """The references with 5, the same 5, and 40 % of their words replaced."""
    draw = np.random.default_rng(0)
    references = [" ".join(f"w{i}" for i in draw.integers(0, 50, 12)) for _ in range(60)]
    runs = []
    for name, share, seed in (("a", 0.05, 1), ("b", 0.05, 1), ("c", 0.4, 2)):
        draw = np.random.default_rng(seed)
        words = [["oops" if draw.random() < share else word for word in line.split()] for line in references]
        runs.append(evaluated(tmp_path / name, references, [" ".join(line) for line in words]))
    return runs


def test_paired_bootstrap_finds_a_real_difference_and_no_other(tmp_path: Path) -> None:
    runs = three(tmp_path)
    result = decode.paired(*runs)
    assert (result["resamples"], result["seed"], result["sentences"]) == (1000, 12345, 60)
    assert "seed:12345" in result["signature"]
    assert "bs:1000" in result["chrf_signature"]
    base, near, far = result["systems"]
    assert [system["run"] for system in result["systems"]] == [str(run) for run in runs]
    for metric in ("bleu", "chrf"):
        assert base[metric]["p"] is None
        assert near[metric]["p"] == 1
        assert far[metric]["p"] == pytest.approx(1 / 1001)  # none of 1000 resamples: the smallest p there is
    for run, system in zip(runs, result["systems"], strict=True):
        references, hypotheses = translations.read(run)
        assert system["bleu"]["score"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)
        assert abs(system["bleu"]["mean"] - system["bleu"]["score"]) < system["bleu"]["half_width"]
    assert decode.paired(*runs) == result == json.loads(json.dumps(result))


def test_paired_needs_the_same_references_of_evaluated_runs(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    references, hypotheses = translations.read(b)
    translations.write(b, [*references[:-1], "another"], hypotheses)
    with pytest.raises(InputError, match=r"not evaluated on the same references"):
        decode.paired(a, c, b)
    with pytest.raises(UsageError, match="with itself"):
        decode.paired(a, c, tmp_path / "." / "a")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="has not been evaluated: run stabilitylab evaluate"):
        decode.paired(a, tmp_path / "none")


@pytest.mark.parametrize(
    "content", [b"", b"reference\thypothesis\n", b"other\thead\na\tb\n", b"reference\thypothesis\na\n", b"\xff"]
)
def test_a_damaged_table(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "evaluation.tsv").write_bytes(content)
    with pytest.raises(InputError, match="is damaged: run stabilitylab evaluate"):
        translations.read(tmp_path)
