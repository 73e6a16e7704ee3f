"""The benchmarks run at toy size and say what they measured; their statistics are right; peers are the same model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from loose_scripts import scripts_of
from rest_slow import complete, rest_slow

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.models import build_model

ROOT = Path(__file__).resolve().parents[1]
TOY = ["--set", "model.d_model=16", "--set", "model.d_ffn=16", "--set", "data.sentences=4"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a benchmark by its name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes that it starts
    monkeypatch.chdir(ROOT)
    with scripts_of("benchmarks") as load:
        yield load


@pytest.fixture
def main(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a benchmark as its command does."""

    def call(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        script(name).main()

    return call


def cells(path: Path) -> list[list[str]]:
    """The rows of the first table of a Markdown file, without its head."""
    lines = [line for line in path.read_text().split("\n\n")[2].splitlines() if line.startswith("|")]
    assert set(lines[1]) <= set("|-")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def ratio(cell: str) -> float:
    """The value of ``1.234 [1.2, 1.3]``, finite, positive and inside its interval."""
    value, low, high = (float(text) for text in cell.replace("[", "").replace("]", "").replace(",", "").split())
    assert 0 < low <= value <= high < np.inf
    return value


@pytest.mark.slow
def test_the_recorder_is_measured_by_what_it_does_in_an_update(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = script("recorder_cost")
    monkeypatch.setattr(benchmark, "SIZES", ((1, 8, 2, 4),))
    benchmark.main()
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    told = {name.strip(): value.strip() for name, value in lines}
    assert told[""] == "1 x 8, 2 x 4"
    assert all(ratio(told[name]) for name in ("ledger (`record=None`)", "with sketches", "with a snapshot"))
    assert 12 <= float(told["bytes a parameter and snapshot"]) < 14, "weights, two moments and random states"


@pytest.mark.slow
@complete
def test_depth_measures_each_depth_and_mode_and_adds_to_what_is_there(main: Any, tmp_path: Path) -> None:
    out, modes = tmp_path / "depth", "bare;checkpointing, probes"
    common = ("--steps", "10", "--modes", modes, "--anchor", "2", *TOY, "--out", str(out))
    main("depth", "--depths", "2", *common)
    main("depth", "--depths", "4", "--add", *common)
    frame = pd.read_csv(out.with_suffix(".csv"))
    assert frame.groupby(["depth", "mode"]).size().to_dict() == {
        (d, m): 10 for d in (2, 4) for m in (*modes.split(";"), "anchor")
    }
    assert (frame["seconds"] > 0).all()
    assert (frame["peak_bytes"] > 0).all()
    rows = cells(out.with_suffix(".md"))
    assert [row[:3] for row in rows] == [["CPU", str(d), m] for d in (2, 4) for m in modes.split(";")]
    assert [ratio(row[4]) for row in rows][::2] == [1, 1]
    assert all(ratio(row[3]) and ratio(row[4]) for row in rows)
    assert out.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "9"), "--steps 9 may miss the reference pass: give at least 10"),
        (("--modes", "probes"), "--modes 'probes': give bare, and any others of bare;control"),
        (("--device", "cuda"), "sees no CUDA device"),
    ],
)
def test_depth_refuses_what_it_cannot_measure(
    main: Any,
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main("depth", *arguments)
    assert said in capsys.readouterr().err


def made_up(
    cost: Callable[[int, int], float], depths: tuple[int, ...] = (10, 20, 40), rows: int = 40, busy: float = 1.0
) -> pd.DataFrame:
    """Updates that take ``cost(depth, row)`` seconds in the mode "bare", and as many bytes; 1 s in the mode "anchor".

    ``busy``: how much slower the machine is while the last depth is measured.
    """
    return pd.DataFrame(
        [
            {"series": "CPU", "depth": d, "mode": mode, "row": row, "peak_bytes": cost(d, 0)}
            | {"seconds": (cost(d, row) if mode == "bare" else 1.0) * (busy if d == depths[-1] else 1.0)}
            for d in depths
            for mode in ("bare", "anchor")
            for row in range(3, 3 + rows)
        ]
    ).assign(made="made up")


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (lambda depth, row: 5 + 0.3 * depth, "constant"),
        (lambda depth, row: 5 + 0.3 * depth**1.3, "not constant"),
        (lambda depth, row: (5 + 0.3 * depth) * (1 + 0.5 * (7 * row % 11) / 11), "inconclusive"),
    ],
)
def test_the_verdict_on_a_constant_cost_a_layer(script: Any, cost: Callable[[int, int], float], expected: str) -> None:
    lines = script("depth_report").text(made_up(cost, busy=1.5), 10).splitlines()
    time, memory = (line for line in lines if "| time |" in line or "| memory |" in line)
    assert time.endswith(f"| {expected} |")
    assert memory.endswith("| not constant |" if expected == "not constant" else "| constant |")
    if expected == "constant":
        assert "20-40: 1.000 [1.000, 1.000]" in time


def test_a_pass_counts_with_its_share_of_the_rows(script: Any) -> None:
    """Cadence 10: a tenth of the rows has a reference pass, the rows before those run the model for its outputs."""
    updates = made_up(lambda depth, row: {0: 10.0, 9: 5.0}.get(row % 10, 1.0), depths=(10,))
    for rows in (updates, updates[updates["row"] < 13]):  # the share in a long run, not that in the sample
        samples = script("depth_report").costs(rows, 10)["bare"]
        assert samples == pytest.approx(0.1 * 10 + 0.1 * 5 + 0.8 * 1)


def test_rounds_alternate_and_leave_out_the_slow_ones(script: Any) -> None:
    called: list[str] = []

    def work(name: str) -> Callable[[], float]:
        return lambda: float(len(called.append(name) or called))

    taken = script("timing").rounds({name: work(name) for name in "abc"}, 4, slow={"b"}, few=2)
    assert "".join(called) == "cba" + "abc" + "ca" + "ac"
    np.testing.assert_array_equal(taken["b"], [2, 5, np.nan, np.nan])
    np.testing.assert_array_equal(taken["a"], [3, 4, 8, 9])


def test_a_median_and_its_interval(script: Any) -> None:
    timing = script("timing")
    assert timing.middle(np.array([2.0, np.nan, 2.0])) == (2, 2, 2)
    value, low, high = timing.middle(np.random.default_rng(1).normal(1, 0.1, 400))
    half = 1.96 * 0.1 * np.sqrt(np.pi / 2 / 400)  # of the median of a normal sample
    assert abs(value - 1) < 2 * half
    assert high - low == pytest.approx(2 * half, rel=0.3)


@pytest.mark.slow
def test_peers_at_toy_size(main: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    main("peers", "--sizes", "tiny-6", "--rounds", "2", *TOY, "--out", str(tmp_path / "peers"))
    rows = cells(tmp_path / "peers.md")
    names = [row[1] for row in rows]
    assert names == ["stabilitylab", "control", "torch.nn.Transformer", "Marian (transformers)"]
    assert len({row[2] for row in rows}) == 1
    assert all(ratio(row[4]) for row in rows)
    assert all(float(row[3]) > 0 for row in rows)
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_peers_refuse_to_compare_different_models(script: Any) -> None:
    size = object.__new__(script("peers").Size)
    size.title, size.vocabulary = "toy", 100
    size.parameters, size.first = {"a": 5, "b": 5}, {"a": 4.6, "b": 5.1}
    size.check()
    size.first["b"] = 6.0
    with pytest.raises(SystemExit, match=r"not near log V: \{'b': 6.0\}"):
        size.check()
    size.parameters["b"] = 6
    with pytest.raises(SystemExit, match="the models differ in size"):
        size.check()


def ours_as(kind: str, state: dict[str, torch.Tensor], d: int) -> dict[str, torch.Tensor]:
    """Our weights under a peer's names: "torch" fuses q, k and v of both attentions, "marian" splits them."""
    attentions = {"torch": {"self_attn": "self_attn", "cross_attn": "multihead_attn"}, "marian": {}}[kind]
    attentions = attentions or {"self_attn": "self_attn", "cross_attn": "encoder_attn"}
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        stack, _, rest = name.partition(".")
        if rest == "embedding.weight":
            other = {"encoder": "source", "decoder": "target"}[stack]
            renamed[f"{other}.weight" if kind == "torch" else f"model.{stack}.embed_tokens.weight"] = tensor
        if not rest.startswith("layers."):
            continue
        _, layer, sublayer, *inner, part = rest.split(".")
        where = f"{'transformer' if kind == 'torch' else 'model'}.{stack}.layers.{layer}"
        if inner == ["norm"]:
            place = ["self_attn", *(["cross_attn"] if stack == "decoder" else []), "ffn"].index(sublayer) + 1
            marian = "final_layer_norm" if sublayer == "ffn" else f"{attentions[sublayer]}_layer_norm"
            renamed[f"{where}.{f'norm{place}' if kind == 'torch' else marian}.{part}"] = tensor
        elif sublayer == "ffn":
            fc = {"fc1": "linear1", "fc2": "linear2"}[inner[1]] if kind == "torch" else inner[1]
            renamed[f"{where}.{fc}.{part}"] = tensor
        elif inner[1] == "out":
            renamed[f"{where}.{attentions[sublayer]}.out_proj.{part}"] = tensor
        elif kind == "torch":  # q comes before kv in a state dict
            key = f"{where}.{attentions[sublayer]}.in_proj_{part}"
            renamed[key] = torch.cat([renamed[key], tensor]) if key in renamed else tensor
        else:
            for letter, rows in zip(inner[1], tensor.split(d), strict=True):
                renamed[f"{where}.{attentions[sublayer]}.{letter}_proj.{part}"] = rows
    return renamed


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_slow(["torch", "marian"], ["torch"]))
def test_with_our_weights_a_peer_computes_our_function(script: Any, kind: str) -> None:
    """The same model, in float64 and to rounding, padding included; and no parameter of it is left out."""
    peers = script("peers")
    if kind == "marian":
        pytest.importorskip("transformers")
    config = resolve(parse_set(["model.arch=postln", "data.sentences=4"]), depth=4)
    data = load_data(config.data, stack=config.model.stack)
    ours = build_model(config.model, source_vocab=data.source_vocab, target_vocab=data.target_vocab).double()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model, logits = (peers.torch_transformer if kind == "torch" else peers.marian)(config.model, data)
    model.double().train()
    renamed = ours_as(kind, ours.state_dict(), 64)
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert unexpected == []
    assert not {name for name, parameter in model.named_parameters() if parameter.requires_grad} & set(missing)
    batch = data.micro_batch(0)
    assert not batch.inputs["source_mask"].all()
    real = batch.inputs["target_mask"]
    torch.testing.assert_close(logits(batch)[real], ours(**batch.inputs)[real], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_contenders_and_probe_cost_at_toy_size(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main("contenders", "--depth", "2", "--rounds", "2", "--only", "naive hooks", "--out", str(tmp_path / "made"))
    rows = cells(tmp_path / "made.md")
    assert [row[0] for row in rows] == ["bare", "control", "naive hooks"]
    assert all(ratio(row[1]) for row in rows)
    assert (tmp_path / "made.png").exists()
    capsys.readouterr()
    main("probe_cost", "--depth", "2", "--rounds", "3")
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if "/ bare" in line]
    assert len(shown) == 4
    assert all(ratio(line.split("/ bare")[1]) for line in shown)


def test_the_modes_differ_in_what_they_say(script: Any) -> None:
    depth = script("depth")
    arguments = argparse.Namespace(arch="postln", set=[])
    made = {mode: resolve(parse_set(depth.settings("CPU", mode, arguments)), depth=4) for mode in depth.MODES}
    assert [c.train.activation_checkpointing for c in made.values()] == [False, False, False, True, True]
    assert [c.probes.names == ("default",) for c in made.values()] == [False, False, True, False, True]
    assert [c.probes.update_every == 10 for c in made.values()] == [False, False, True, False, True]


@pytest.mark.slow
def test_the_benchmark_of_graphs_at_toy_size(main: Any, tmp_path: Path) -> None:
    """On a CPU, where nothing is recorded: times, operators, the floor, and where time goes."""
    main("cuda_graphs", "--model", "tiny", "--depth", "4", "--rounds", "2", *TOY, "--out", str(tmp_path / "graphs"))
    text = (tmp_path / "graphs.md").read_text()
    table = [line.strip("| ").split(" | ") for line in text.split("\n\n")[4].splitlines()[2:]]
    assert [row[0] for row in table] == ["eager, bare", "eager, control", "eager, probes"]
    assert all(ratio(row[2].rstrip(" |")) for row in table)
    bare, probed = (int(table[place][3].replace(",", "")) for place in (0, 2))
    arranged = int(text.partition("a probed update is ")[2].partition(" operators")[0].replace(",", ""))
    assert bare < arranged < probed
    shares = [line.split(" | ")[1:] for line in text.splitlines() if line.endswith("% |")]
    for column in zip(*shares, strict=True):
        assert sum(float(cell.rstrip("% |")) for cell in column) == pytest.approx(100, abs=0.5)


def test_the_floor_counts_what_probes_read(script: Any, tmp_path: Path) -> None:
    """Of a model of two layers: each watched value and gradient once, and the parameters three times."""
    graphs, subject = script("cuda_graphs"), script("subject")
    plan = subject.prepared(2, "probes.names=['ln_input']", "probes.every=1", "model.arch=preln", *TOY[1::2])
    made = subject.trainer(plan, tmp_path / "run")
    batch = plan.dataset.micro_batch(0)
    source, target = (batch.masks[stack].numel() for stack in ("encoder", "decoder"))
    weights = sum(p.numel() for p in made.model.parameters())
    # what enters a norm, the branch and the shortcut of 2 and 3 sub-layers, and what enters the final norm of each
    numbers = 16 * ((2 * 3 + 1) * source + (3 * 3 + 1) * target)
    assert graphs.bytes_read(made) == 4 * (numbers + 3 * weights)
    made.watcher.close()


@pytest.mark.slow
def test_one_card_estimates_where_there_is_none(main: Any, tmp_path: Path) -> None:
    main("one_card", "--depth", "2", "--sentences", "4", "--arch", "deepnorm", "--out", str(tmp_path / "card"))
    ((arch, parameters, tokens, estimated, *rest),) = cells(tmp_path / "card.md")
    assert (arch, rest) == ("deepnorm", ["", "", "", ""])
    assert int(parameters.replace(",", "")) > 1e6
    assert 20 < int(tokens) < 200
    assert float(estimated) > 0


@pytest.mark.slow
def test_the_attack_holds_and_can_fall(
    script: Any, main: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fork", lambda: pytest.fail("the kind with processes is left to the script"))
    attack = script("attack")
    for name in ("journal", "part", "lost file", "checkpoint", "JSON value", "setting", "TOML file"):
        with pytest.raises(SystemExit) as end:
            main("attack", "--only", name, "--cases", "4")
        assert end.value.code == 0, capsys.readouterr().out
        assert f"| {name} | 4 | 4 | 0 |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:  # one that fell once: the header of a dictionary's page
        main("attack", "--only", "part", "--seed", "2", "--first", "139", "--cases", "1")
    assert end.value.code == 0, capsys.readouterr().out
    monkeypatch.setattr("stabilitylab.store.journal.crc32", lambda data: 0)  # nothing is checked any more
    with pytest.raises(SystemExit) as end:
        main("attack", "--only", "journal", "--cases", "20")
    assert end.value.code == 1
    assert "--only 'journal' --seed 0 --first" in capsys.readouterr().out
    assert attack.STEPS == 12


@pytest.mark.slow
def test_the_long_run_and_the_many_say_what_they_measured(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main("long_run", "--rows", "60", "--every", "20", "--part", "25")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["probed"], facts["read"]["rows"]) == (60, 3, 60)


@pytest.mark.slow
def test_the_many_runs_are_read_by_each_command(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main("many_runs", "--runs", "6")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [line.rsplit("|", 2)[1].strip() for line in lines] == ["0"] * 5
