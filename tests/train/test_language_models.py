"""Decoder-only models train: on running text by the command line's path, every architecture, and 200 layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rest_slow import MORE_ARCHS, rest_slow
from test_archs_train import learns

from stabilitylab.commands._outcome import print_summary
from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS
from stabilitylab.store import Run
from stabilitylab.train import plan, start
from stabilitylab.train.run import Nobody

NEW = ("keel", "gpas", "mix-ln", "hybridnorm", "hybridnorm-star", "completep")
NEW += ("hyper-connections", "hyper-connections-static", "mhc", "siamese-norm", "attnres", "attnres-block")
LANGUAGE = "train.lr=4e-3"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 3,000 lines in which a word decides the next."""
    random = np.random.default_rng(0)
    words = [f"word{n}" for n in range(40)]
    lines = []
    for _ in range(3000):
        word, line = int(random.integers(40)), []
        for _ in range(8):
            line.append(words[word])
            word = (7 * word + int(random.integers(3))) % 40
        lines.append(" ".join(line))
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "text.txt"


def test_a_run_of_running_text_has_every_table_and_a_verdict(text: Path, tmp_path: Path, capsys) -> None:
    sets = f"data.source=text:{text} data.vocab_size=200 data.validation=20 train.steps=12 train.lr=2e-3 train.warmup=2"
    config = resolve({"model": {"arch": "deepnorm", "design": "gpt2"}}, parse_set(sets.split()), depth=3)
    result = start(plan(config), tmp_path / "runs", None, Nobody())
    run = Run.open(result.path)
    assert (run.path.name, result.state) == ("deepnorm-gpt2-3-s0", "finished")
    assert {"grad_norm", "ln_input", "cosine_similarity", "model_update", "activation_sparsity"} <= set(run.tables)
    assert set(run.frame("ln_input")["stack_name"]) == {"decoder"}
    assert run.verdict is not None
    assert run.verdict.source_worth is None  # there is no source
    metrics = run.metrics
    assert metrics["held_out_nll"].dropna().iloc[-1] < metrics["held_out_nll"].dropna().iloc[0] - 0.3
    assert run.manifest["config"]["model"]["context"] == 24
    print_summary(run, result)
    assert "(20 validation blocks of 24 tokens: nll - unigram" in capsys.readouterr().out


def test_a_dry_run_of_a_decoder_says_nothing_of_a_source(text: Path, run) -> None:
    sizes = ("--set", "data.vocab_size=200", "--set", "data.max_length=24")
    code, out, _ = run("probe", "--model", "gpt2", "--depth", "2", "--data", f"text:{text}", *sizes, "--dry-run")
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith("("))
    assert facts["(rows)"].split()[1:] == ["blocks", "of", "24", "tokens"]
    assert 23 < float(facts["(tokens_per_row)"]) <= 24
    assert not {"(source_vocab)", "(joint)", "(pairs)", "(tokens_per_sentence)"} & facts.keys()
    assert "'pairs'" not in out
    assert "(source_vocab)" in run("probe", "--depth", "2", "--dry-run")[1]


def decodes(arch: str, design: str) -> bool:
    return "decoder" in ARCHS[arch].defined_for and not (arch == "rfixup" and design == "llama")


CASES = [
    (arch, design, depth)
    for arch in sorted(ARCHS)
    for design in ("gpt2", "llama")
    for depth in (6, 12)
    if decodes(arch, design)
]
SOME = {
    (arch, design, depth)
    for arch, design, depth in CASES
    if (arch in NEW and (design, depth) == ("llama", 12)) or (arch in MORE_ARCHS and (design, depth) == ("gpt2", 6))
}


@pytest.mark.parametrize(("arch", "design", "depth"), rest_slow(CASES, (), SOME))
def test_every_architecture_learns_in_each_design(arch: str, design: str, depth: int, tmp_path: Path) -> None:
    rate = LANGUAGE if ARCHS[arch].normalised else "train.lr=2e-3"
    learns(tmp_path / "run", arch, f"model.design={design}", rate, depth=depth)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", rest_slow(NEW, (), {"keel"}))
def test_two_hundred_layers_train(arch: str, tmp_path: Path) -> None:
    small = ("train.lr=1e-3", "model.d_model=32", "data.sentences=4", "data.held_out=8", "data.validation=0")
    learns(tmp_path / "run", arch, "model.design=llama", *small, depth=200, least=0.2)


def test_what_refuses_says_why_before_anything_is_loaded() -> None:
    for arch, design, why in (("tfixup", "gpt2", "its paper gives constants"), ("rfixup", "llama", "SwiGLU has three")):
        with pytest.raises(UsageError, match=why):
            plan(resolve({"model": {"arch": arch, "design": design}}, depth=2))
