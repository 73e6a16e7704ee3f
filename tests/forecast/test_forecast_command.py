"""``forecast`` and ``recommend`` as a user meets them: the reference model, GPT-2, a model of one's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_forecast_fitting import made, measured

from stabilitylab.commands._forecasts import lines
from stabilitylab.commands.recommend import standing
from stabilitylab.forecast import fitting, forecast, trials
from stabilitylab.forecast.fitting import FEATURES, TRIAL, Cover, Line
from stabilitylab.forecast.known import Known, KnownEdges

TINY = [
    *("--depth", "4", "--d-model", "16", "--set", "model.d_ffn=24", "--set", "model.heads=2"),
    *("--set", "data.sentences=4", "--set", "data.max_length=9", "--set", "data.vocab_size=200"),
    *("--set", "data.held_out=4", "--set", "train.device=cpu"),
]
MINE = """
from forecast_cases import own

def whole():
    return own()

def short():
    given = own()
    return given["model"], given["batch"], given["loss_fn"]

def foreign():
    return own() | {"epochs": 3}

def unsure():
    return own() | {"baseline": "low"}

def gpt2():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    batches = [own()["batches"][n]["ids"] for n in range(3)]
    batches = [{"input_ids": ids, "labels": ids} for ids in batches]
    return {"model": model, "batch": batches[0], "batches": batches[:2], "held_out": batches[2],
            "loss_fn": lambda model, batch: model(**batch).loss}
"""


@pytest.fixture(autouse=True)
def no_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the package holds: these tests have a fit where they make one."""
    monkeypatch.setattr("stabilitylab.forecast.fitted", lambda: None)
    monkeypatch.setattr(trials, "UPDATES", 20)  # of which a language of nothing is learnt at no rate
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that covers nearly everything, and says that the edge is where trials stop to learn."""
    between = {"trial": (-9.0, 9.0), "layers": (1, 100), "warmup": (0, 40)}
    line = Line([*TRIAL], [0.0], [1.0], 0.0, [1.0], 0.1)
    fit = made(cover=Cover({}, {}, between), line=line)
    monkeypatch.setattr("stabilitylab.forecast.fitted", lambda: fit)


def test_the_reference_model_without_a_fit(run) -> None:
    code, out, err = run("forecast", "--arch", "postln,rezero", "--lr", "1e-3", "--warmup", "40", *TINY)
    assert code == 0
    assert "2 models of " in err
    assert out.count("warm-up 40: cannot tell") == 2
    assert out.count("since nothing is fitted yet") == 2
    assert out.count("trials of 20 updates with a warm-up of 40, by the held-out loss: learn at") == 2
    assert out.count("trials of 20 updates with no warm-up, by the held-out loss: learn at") == 2
    assert "postln, 4 layers, lr 0.001, warm-up 40: cannot tell" in out
    assert "No fit is stored, so that nothing is forecast" in out
    assert "P(fails)" not in out


def test_critical_rates_that_differ_have_a_line_each() -> None:
    line = Line([*FEATURES], [0.0] * 9, [1.0] * 9, 0.0, [1.0, *[0.0] * 6, -0.5, 0.0], 0.1)
    told = lines(forecast(measured(), 1e-2, 40, made(line=line)))
    assert [one.partition(" [")[0] for one in told if "critical" in one] == [
        "  critical rate with warm-up 40: 0.01",
        "  critical rate with no warm-up: 0.0032",
    ]


@pytest.mark.usefixtures("wide")
def test_the_reference_model_with_a_fit(run) -> None:
    code, out, err = run("forecast", "--arch", "postln", "--lr", "1e-9", "--warmup", "0", *TINY)
    assert code == 0
    assert "postln, 4 layers, lr 1e-09, no warm-up: trains, P(fails) 0.00 [0.00, 0.00]" in out
    assert "critical rate with no warm-up and with warm-up 40, which it does not tell apart: " in out
    assert "Fit 1 (9 runs), of 1 architectures. On architectures left out: off by a factor of 1.5." in out
    code, out, err = run("forecast", "--arch", "postln", "--lr", "10", "--json", "-q", *TINY)
    assert (code, err) == (0, "")
    document = json.loads(out)
    (one,) = document["forecasts"]
    assert one["forecast"] == "fails"
    assert one["p_fails"]["value"] > 0.99
    assert one["fitted"] == document["fit"]["version"] == "1 (9 runs)"
    assert document["fit"]["cover"]["between"]["layers"] == [1, 100]
    assert len(one["evidence"]) == 6
    assert {*one["trials"]} == {"warm-up 40", "no warm-up"}
    assert one["known"] == {}
    assert one["minutes"] > 0


def test_a_case_that_is_not_covered_says_so_before_minutes_are_spent(run, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = made(cover=Cover({"optimizer": "sgd"}, {"classes": 2000}, {"layers": (12, 36)}))
    monkeypatch.setattr("stabilitylab.forecast.fitted", lambda: fit)
    code, out, err = run("forecast", "--arch", "postln", "--lr", "1e-3", *TINY)
    assert code == 0
    misses = "optimizer is adamw (0.9, 0.98), fitted on sgd; classes are 200, fitted on about 2000; layers is 4"
    assert err.startswith(f"Nothing will be forecast, since {misses}")
    assert "cannot tell; its trials learn" in out
    assert "Fit 1" not in out  # nothing was forecast that an error rate would be about
    code, out, err = run("forecast", "mine:whole", "--lr", "1e-3")
    assert code == 0
    assert err.startswith("Nothing will be forecast, since optimizer is adamw (0.9, 0.95), fitted on sgd: what follows")


def test_an_edge_that_is_known_is_told_first(run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--arch", "postln", "--lr", "1e-3", "--warmup", "40", *TINY]
    facts = json.loads(run("forecast", *given, "--json", "-q")[1])["forecasts"][0]["facts"]
    edges = KnownEdges("a text", facts["entropy"], [Known(facts["design"], 40, 2e-3, 4e-3, 3)])
    monkeypatch.setattr("stabilitylab.forecast.known_edges", lambda: edges)
    code, out, _ = run("forecast", *given)
    assert code == 0
    assert out.splitlines()[:2] == [
        "postln, 4 layers, lr 0.001, warm-up 40: trains, by runs of this very design",
        "  with warm-up 40 trained up to a rate of 0.002, failed from 0.004 on (3 seeds, results/forecast)",
    ]
    assert "cannot tell" not in out.split("trials of")[0]
    out = run("recommend", *given)[1]
    assert out.splitlines()[1].split()[:6] == ["postln", "trains", "known", "0.002", "to", "0.004"]


@pytest.mark.parametrize(("name", "loss"), [("whole", "held-out"), ("short", "training")])
def test_a_model_of_ones_own(run, name: str, loss: str) -> None:
    code, out, err = run("forecast", f"mine:{name}", "--lr", "1e-3")
    assert (code, err) == (0, "")
    assert f"mine:{name}, 3 layers, lr 0.001, warm-up 40: cannot tell" in out
    assert f"by the {loss} loss: learn at" in out
    assert re.search(r"largest at layer \d of layers, smallest at layer \d", out)


@pytest.mark.usefixtures("wide")
def test_a_model_of_ones_own_is_forecast_where_the_fit_covers_it(run) -> None:
    code, out, _ = run("forecast", "mine:whole", "--lr", "1e-9")
    assert code == 0
    assert "mine:whole, 3 layers, lr 1e-09, warm-up 40: trains, P(fails) 0.00" in out


def test_a_model_of_transformers(run) -> None:
    pytest.importorskip("transformers")
    code, out, _ = run("forecast", "mine:gpt2", "--lr", "1e-3", "--json")
    assert code == 0
    (one,) = json.loads(out)["forecasts"]
    assert one["facts"]["layers"] == 2
    assert one["facts"]["width"] == 16
    assert one["forecast"] == "cannot tell"
    assert all(isinstance(value, float) for value in one["predictors"].values())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["mine:whole"], 2, "give --lr"),
        (
            ["mine:foreign", "--lr", "1"],
            2,
            "returned 'epochs', which is no argument of forecast: it takes baseline, batch",
        ),
        (["mine:unsure", "--lr", "1"], 2, "give the loss of a model that ignores its input"),
        (["nomodel:ready", "--lr", "1"], 4, "call forecast in the folder that holds it"),
        (["mine:whole", "--lr", "-1"], 2, "--lr -1 is no learning rate: give a positive number"),
        (["mine:whole", "--lr", "nan"], 2, "--lr nan is no learning rate"),
        (["mine:whole", "--lr", "1", "--depth", "12"], 2, "--depth is about reference models: leave it out"),
        (["mine:whole", "--lr", "1", "--set", "bogus"], 2, "--set is about reference models: leave it out"),
        (["mine.py:whole", "--lr", "1"], 2, "names a file: write mine:whole"),
        (["--arch", ","], 2, "--arch names no architecture"),
        (["--arch", "nonesuch"], 2, "unknown architecture 'nonesuch'"),
        (["--depth", "7"], 2, "--depth 7 is odd"),
        (["--data", "text:a,b"], 4, "a"),
        (["--depth", "20000", "--d-model", "4096", "--arch", "preln"], 5, "GiB are free on"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments: list[str], code: int, said: str) -> None:
    ended, out, err = run("forecast", "-q", *arguments)
    assert (ended, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("wide")
def test_recommend_sorts_forecasts_and_says_what_became_of_it(run) -> None:
    code, out, err = run("recommend", "--archs", "postln,preln", "--lr", "0.3", *TINY)
    assert code == 0
    assert err.startswith("'recommend' sorts forecasts, which 'forecast' gives with their evidence; its ranking")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["architecture", "forecast", "P(fails)"]
    assert {line.split()[0] for line in lines[1:3]} == {"postln", "preln"}
    assert "the order is that of seconds" not in out
    code, out, err = run("recommend", "--arch", "postln,preln", "--lr", "0.3", "--json", "-q", *TINY)
    assert (code, err) == (0, "")
    found = json.loads(out)["forecasts"]
    assert len(found) == 2
    assert round(found[0]["p_fails"]["value"], 1) <= round(found[1]["p_fails"]["value"], 1)


def test_an_order_by_cost_alone_says_so(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilitylab.forecast.fitted", lambda: None)
    code, out, _ = run("recommend", "--arch", "postln", "--lr", "0.3", "-q", *TINY)
    assert code == 0
    assert "Nothing could be told: the order is that of seconds an update alone" in out


def test_what_cannot_be_told_comes_last_and_the_cheaper_one_first() -> None:
    own = measured()
    sure, unsure = (forecast(replace(own, name=name), lr, 40, made()) for name, lr in (("b", 1e-3), ("c", 1e-1)))
    slow = forecast(replace(own, name="a", update_seconds=1.0), 1.01e-3, 40, made())
    untold = forecast(replace(own, name="d"), 1e-3, 40, None)
    assert [one.name for one in sorted([untold, unsure, slow, sure], key=standing)] == ["b", "a", "c", "d"]


def test_help_says_what_it_is_worth(run) -> None:
    from stabilitylab.commands import forecast as command

    words = " ".join(run("forecast", "--help")[1].replace("│", " ").split())
    assert " ".join(command.worth().split()[:6]) in words
    assert ("Nothing is fitted yet" in words) == (not fitting.FILE.exists())
