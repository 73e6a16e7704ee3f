"""results/deepnorm-baseline: its closed form against models, its page against its table, and its rules as code."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loose_scripts import scripts_of
from rest_slow import rest_slow
from torch import nn

from stabilitylab.models import Transformer, build_model

HERE = Path(__file__).resolve().parents[1] / "results" / "deepnorm-baseline"
PUBLISHED = {6: (1.861210, 0.379918), 12: (2.213364, 0.319472), 32: (2.828427, 0.25), 64: (3.363586, 0.210224)}


@pytest.fixture
def study() -> Iterator[SimpleNamespace]:
    names = ("protocol", "judge", "exact", "page", "make", "own_rates")
    with scripts_of("results/deepnorm-baseline", "results") as load:
        yield SimpleNamespace(**{name: load(name) for name in names})


def built(study: Any, arm: str, layers: int) -> Transformer:
    data = {"data": {"source": "synthetic"}}
    config = study.protocol.STUDY.experiment(arm, layers, 1e-3, 3, data).config.model
    model = build_model(config, source_vocab=29, target_vocab=29).double()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.eps = 0.0
    return model


def test_constants_are_deepnets_and_their_inverse(study) -> None:
    for layers, (alpha, beta) in PUBLISHED.items():
        own = study.protocol.constants(layers, 0.13912)
        assert (own["alpha"], own["beta"]) == pytest.approx((alpha, beta), abs=5e-7)
        assert own["inverted gain"] == pytest.approx((8 * layers) ** 0.25, rel=1e-15)
        assert own["branch ratio"] == pytest.approx(8 * layers, rel=1e-12)
    assert study.protocol.constants(12, 0.1)["gain ratio"] == pytest.approx(9.80, abs=5e-3)
    assert study.protocol.constants(32, 0.1)["gain ratio"] == pytest.approx(16, rel=1e-12)
    assert study.protocol.constants(12, 0.1)["fixed alpha ratio"] == pytest.approx(1.278, abs=5e-4)
    assert "fixed-alpha" not in study.protocol.arms(32)
    assert {*study.protocol.arms(12)} - {*study.protocol.arms(32)} == {"fixed-alpha", "both"}


@pytest.mark.parametrize("arm", ["deepnorm", "inverted", "fixed-alpha", "both"])
def test_every_sublayer_at_the_start_is_a_scaled_branch_of_gain_1(study, arm) -> None:
    """LN(alpha x + F) = LN(x + c F_1), c = g^2 / alpha, in every sub-layer of the arm's own model."""
    own, plain = built(study, arm, 12), built(study, "deepnorm", 12)
    for residual in plain.residuals():  # the same numbers, drawn with gain 1
        for matrix, (linear, rows) in residual.f.matrices.items():
            if matrix not in ("q", "k", "gate"):
                weight = residual.f.get_submodule(linear).weight.data
                weight[slice(None) if rows is None else rows] /= study.protocol.beta_of(12)
    constants = study.protocol.constants(12, 0.1)
    gain = constants["inverted gain"] if arm in ("inverted", "both") else constants["beta"]
    alpha = study.protocol.ALPHA if arm in ("fixed-alpha", "both") else constants["alpha"]
    x = torch.randn(2, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = own.decoder.rotations(9)
    for one, other in zip(own.residuals(), plain.residuals(), strict=True):
        given = (None, *turned) if one.place.sublayer == "self_attn" else ()
        expected = F.rms_norm(x + gain**2 / alpha * other.f(x, *given), (64,))
        torch.testing.assert_close(one(x, *given), expected, rtol=0, atol=1e-6)  # weights are drawn in float32
    if arm == "inverted":
        assert gain**2 / alpha == pytest.approx(constants["inverted c"], rel=1e-15)


def test_a_branch_of_gain_g_is_its_square_exactly(study) -> None:
    model = built(study, "deepnorm", 12)
    x = torch.randn(2, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for residual in list(model.residuals())[:4]:
        given = (None, *model.decoder.rotations(9)) if residual.place.sublayer == "self_attn" else ()
        before = residual.f(x, *given).detach()
        for matrix, (linear, rows) in residual.f.matrices.items():
            if matrix not in ("q", "k", "gate"):
                residual.f.get_submodule(linear).weight.data[slice(None) if rows is None else rows] *= 3.130169
        torch.testing.assert_close(residual.f(x, *given), 3.130169**2 * before, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("arm", rest_slow(["deepnorm", "inverted"], ["deepnorm"]))
def test_the_variance_in_front_of_a_norm_and_the_share_of_the_shortcut(study, arm) -> None:
    """alpha^2 + g^4 v of a wide feed-forward block at an input of mean square 1."""
    gain = {} if arm == "deepnorm" else {"options": {"beta": 96**0.25}}
    sizes = {"d_model": 768, "d_ffn": 2048, "heads": 4, "decoder_layers": 12, "source_vocab": 5, "target_vocab": 5}
    plain = {"design": "llama", "stack": "decoder", "init": "arch", "activation": "swiglu", "norm": "rmsnorm"}
    model = build_model(arch="deepnorm", bias=False, **sizes, **plain, **gain)
    ffn = model.decoder.layers[0].ffn
    x = F.rms_norm(torch.randn(400, 768, generator=torch.Generator().manual_seed(0)), (768,))
    seen: list[torch.Tensor] = []
    ffn.norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    ffn(x)
    own = study.protocol.constants(12, study.exact.SWIGLU)
    prefix = "" if arm == "deepnorm" else "inverted "
    variance = float(seen[0].detach().square().mean())
    assert variance == pytest.approx(own[f"{prefix}norm input"], rel=0.05)
    assert own[f"{prefix}shortcut"] == pytest.approx(own["alpha"] / math.sqrt(variance), rel=0.03)


@pytest.mark.slow
def test_the_committed_table_is_what_is_measured(study, tmp_path: Path) -> None:
    """One arm at 12 layers, measured again: the exact part does not depend on the machine but for the last digits."""
    again = study.exact.measured("inverted", 12, 3, tmp_path)
    with (HERE / "exact.csv").open(newline="", encoding="utf-8") as file:
        kept = [
            row for row in csv.DictReader(file) if (row["arm"], row["layers"], row["seed"]) == ("inverted", "12", "3")
        ]
    assert len(kept) == len(again) == 12
    for row, own in zip(kept, again, strict=True):
        assert float(row["gradient"]) == pytest.approx(float(own[4]), rel=1e-3)
        assert float(row["change"]) == pytest.approx(float(own[5]), rel=0.05)


def test_the_inverted_gain_lets_gradients_grow_downwards_and_deepnets_does_not(study) -> None:
    with (HERE / "exact.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["layers"] == "32"]
    ratio = {}
    for arm in ("deepnorm", "inverted"):
        own = {(row["seed"], int(row["layer"])): float(row["gradient"]) for row in rows if row["arm"] == arm}
        ratio[arm] = [own[seed, 1] / own[seed, 32] for seed in ("3", "4", "5")]
    assert np.exp(np.mean(np.log(ratio["inverted"]))) == pytest.approx(7000, rel=0.05), "the sentence of both pages"
    assert all(0.5 < value < 1.5 for value in ratio["deepnorm"])
    assert all(value > 100 for value in ratio["inverted"])


def ends(study: Any, *losses: float, failed: int = 0) -> dict[int, Any]:
    seeds = study.protocol.STUDY.seeds
    values = losses if len(losses) > 1 else [losses[0] + 0.002 * number for number in range(6)]
    return {seed: study.own_rates.End(values[n], n < failed) for n, seed in enumerate(seeds)}


@pytest.mark.parametrize(
    ("first", "second", "failed", "word"),
    [
        (3.2, 3.0, (0, 0), "worse"),
        (3.0, 3.2, (0, 0), "better"),
        (3.01, 3.0, (0, 0), "alike"),
        (3.06, 3.0, (0, 0), "worse"),
        (3.2, 3.0, (4, 0), "fails"),
        (3.0, 3.2, (0, 6), "only the second fails"),
        (3.0, 3.2, (5, 5), "both fail"),
        (3.2, 3.0, (1, 0), "cannot tell"),
    ],
)
def test_the_words(study, first, second, failed, word) -> None:
    own = ends(study, first, failed=failed[0]), ends(study, second, failed=failed[1])
    assert study.own_rates.Difference(*own, study.protocol.STUDY.seeds, 0.05).word() == word


def test_a_wide_interval_cannot_tell_and_a_missing_run_leaves_it_open(study) -> None:
    spread = ends(study, 3.0, 3.4, 2.9, 3.3, 3.1, 3.5)
    found = study.own_rates.Difference(spread, ends(study, 3.1), study.protocol.STUDY.seeds, 0.05)
    assert found.word() == "cannot tell"
    differences = [end.loss - 3.1 - 0.002 * n for n, end in enumerate(spread.values())]
    half = 2.5705818 * np.std(differences, ddof=1) / math.sqrt(6)
    assert found.interval.high - found.interval.mean == pytest.approx(half, rel=1e-6)
    assert 0 < found.p < 1
    assert study.own_rates.Difference({}, ends(study, 3.0), study.protocol.STUDY.seeds, 0.05).word() == "open"


def test_a_question_with_failed_runs_counts_in_holms_correction(study) -> None:
    """Three questions, of which one has failed runs: the p of the others is that over three."""
    steps = [3.2, 3.21, 3.19, 3.22, 3.2, 3.18]
    known = {("deepnorm", 12): ends(study, 3.1), ("fixed-alpha", 12): ends(study, *steps)}
    known[("inverted", 12)] = ends(study, 3.3, failed=5)
    found = [study.own_rates.difference(study.protocol.STUDY, known, *question) for question in study.judge.PRIMARY]
    assert [own.p for own in found[:2]] == [1.0, 1.0]
    assert found[2].word() == "worse"
    line = study.judge.answers(known)[2]
    assert line.endswith(f"6 of 6 seeds, Holm p = {3 * found[2].p:.2g})")
    assert "fails" in study.judge.answers(known)[0]


def test_arms_without_a_rate_are_open(study, tmp_path: Path) -> None:
    assert study.own_rates.ends_of(study.protocol.STUDY, {"data": {"source": "synthetic"}}, tmp_path) == {}


@pytest.mark.parametrize("valid", [(), ("--valid", "test.txt")])
def test_a_search_chooses_by_a_text_that_is_not_judged(study, valid, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["make.py", "search", "--text", "a.txt", "--test", "test.txt", *valid])
    with pytest.raises(SystemExit) as ended:
        study.make.main()
    assert ended.value.code == 2
    assert "name it with --valid" in capsys.readouterr().err


@pytest.mark.slow
def test_another_model_of_the_same_name_is_not_read(study, tmp_path: Path, monkeypatch) -> None:
    study.exact.measured("deepnorm", 12, 3, tmp_path)
    monkeypatch.setattr(study.exact, "STUDY", study.own_rates.Study(
        study.own_rates.merge(study.protocol.SHARED, {"model": {"init": "arch"}}), study.protocol.arms, (12,), 6
    ))  # fmt: skip
    with pytest.raises(SystemExit, match="is a measurement of another model"):
        study.exact.measured("deepnorm", 12, 3, tmp_path)


def test_the_order_of_the_schemes(study) -> None:
    def order(deepnorm: float, inverted: float, failed: int = 0) -> str:
        known = {(scheme, 12): ends(study, 3.0) for scheme in study.protocol.SCHEMES}
        known |= {("deepnorm", 12): ends(study, deepnorm), ("inverted", 12): ends(study, inverted, failed=failed)}
        return study.judge.order(known, 12)

    assert order(2.8, 3.2) == "changes"
    assert order(2.8, 3.2, failed=6) == "changes"
    assert order(3.2, 3.5) == "does not change"
    assert order(3.2, 3.5, failed=6) == "does not change"
    assert order(3.0, 3.3) == "cannot tell"
    assert study.judge.order({}, 12) == "open"
    lines = study.judge.answers({})
    assert [line.split(":")[0] for line in lines] == ["P1", "P2", "P3", "P4", "P4"]


def test_runs_are_paired_by_seed_and_differ_in_their_arm_alone(study, tmp_path: Path) -> None:
    data = {"data": {"source": "synthetic"}}
    with pytest.raises(SystemExit, match="run the part `search` first"):
        list(study.own_rates.planned(study.protocol.STUDY, 12, data, tmp_path))
    for layers in (12, 32):
        for arm in study.protocol.arms(layers):
            study.own_rates.Lines(tmp_path / "rates.csv", study.own_rates.COLUMNS).add((arm, layers, 1e-3, 1, ""))
    for layers, arms in ((12, 7), (32, 5)):
        planned = list(study.own_rates.planned(study.protocol.STUDY, layers, data, tmp_path))
        assert [seed for _, seed, _ in planned] == [seed for seed in range(3, 9) for _ in range(arms)]
        assert len({experiment.name for *_, experiment in planned}) == 6 * arms
        models = {
            experiment.config.model.model_copy(update={"arch": "", "alpha": None, "options": {}})
            for *_, experiment in planned
        }
        assert len(models) == 1
        assert len({experiment.config.model for *_, experiment in planned}) == arms
        train = planned[0][2].config.train
        assert (train.steps, train.warmup, train.weight_decay, train.clip_norm) == (1000, 100, 0.0, 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_tiny_study_is_searched_judged_and_resumed(study, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"word{n % 7} word{(3 * n) % 7} word{(n * n) % 7} end" for n in range(900)))
    data = {"data": {"source": f"text:{text}", "valid": str(text), "vocab_size": 64, "max_length": 12}}
    tiny = study.own_rates.Study(
        {**study.protocol.SHARED, "data": {}},
        lambda layers: {"inverted": study.protocol.arms(12)["inverted"]},
        (2,), 6, (3, 4), rates=(1e-3, 2e-3, 4e-3), search_seeds=(100,), confirming=(),
    )  # fmt: skip
    study.own_rates.search(tiny, "inverted", 2, data, tmp_path / "runs", tmp_path)
    chosen = study.own_rates.chosen(tmp_path)
    assert {*chosen} == {("inverted", 2)}
    ledger = study.own_rates.Ledger(tmp_path / "ledger.csv")
    wanted = list(study.own_rates.planned(tiny, 2, data, tmp_path))
    study.own_rates.train([experiment for *_, experiment in wanted[:1]], tmp_path / "runs", ledger)
    study.own_rates.train([experiment for *_, experiment in wanted], tmp_path / "runs", ledger)
    found = [study.own_rates.end_of(ledger, experiment) for *_, experiment in wanted]
    assert all(end is not None and end.loss > 0 for end in found)
    lines = (tmp_path / "ledger.csv").read_text().splitlines()
    study.own_rates.search(tiny, "inverted", 2, data, tmp_path / "runs", tmp_path)
    study.own_rates.train([experiment for *_, experiment in wanted], tmp_path / "runs", ledger)
    assert (tmp_path / "ledger.csv").read_text().splitlines() == lines
    assert len((tmp_path / "rates.csv").read_text().splitlines()) == 2
