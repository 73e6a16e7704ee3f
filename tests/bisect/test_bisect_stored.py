"""Stored runs, fingerprints in files, and the commands: what they find, and how they end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import GPT, faulty, ids, loss_in_bf16, loss_of
from torch import nn

import stabilitylab as sl
from stabilitylab.bisect.prints import load, of_run
from stabilitylab.bisect.rounding import redrawn
from stabilitylab.bisect.sides import here
from stabilitylab.bisect.stored import of_stored
from stabilitylab.errors import InputError, UsageError

Call = Callable[..., tuple[int, str, str]]


def recorded(out: Path, model: nn.Module, loss: Any = loss_of, steps: int = 1, probes: str = "fingerprint") -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.watch(model, out=out, probes=probes, every=1, reference=None, optimizer=optimizer) as watcher:
        for _ in range(steps):
            value = loss(model, ids())
            value.backward()
            watcher.step(loss=value)
            optimizer.step()
            optimizer.zero_grad()
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """fp32 twice (the second with roundings drawn anew), bf16 autocast, and a fault in fp32 and in bf16."""
    folder = tmp_path_factory.mktemp("runs")
    made = {"fp32": recorded(folder / "fp32", GPT(2), steps=2)}
    again = GPT(2)
    with redrawn(again, 2.0**-7, 3):
        made["again"] = recorded(folder / "again", again)
    made["same"] = recorded(folder / "same", GPT(2), steps=2)
    made["bf16"] = recorded(folder / "bf16", GPT(2), loss_in_bf16)
    made["scale"] = recorded(folder / "scale", faulty(GPT(2), "wrong scale"), loss_in_bf16)
    made["norms"] = recorded(folder / "norms", GPT(2), probes="default")
    return made


def test_a_stored_fault_is_suspected_and_a_clean_pair_is_rounding(runs: dict[str, Path]) -> None:
    clean = of_stored(runs["fp32"], runs["bf16"], runs["again"])
    assert (clean.verdict, clean.exit_code) == ("rounding", 0)
    found = of_stored(runs["fp32"], runs["scale"], runs["again"])
    assert (found.verdict, found.confirmed, found.where) == ("different", False, "h.1.attn")
    words = " ".join(found.sentences())
    assert "h.1.attn (forward pass, suspected)" in words
    assert "Bisect the two models themselves" in words
    assert of_stored(runs["fp32"], runs["same"]).verdict == "identical"


def test_a_gradient_that_differs_from_the_output_on_comes_from_the_loss(runs: dict[str, Path], run: Call) -> None:
    def smoothed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), label_smoothing=0.1)

    folder = runs["fp32"].parent
    other = recorded(folder / "smoothed", GPT(2), smoothed)
    halved = recorded(folder / "halved", GPT(2), lambda model, batch: loss_of(model, batch) / 2)
    for one in (other, halved):
        found = of_stored(runs["fp32"], one, runs["again"])
        assert found.first is not None
        assert (found.verdict, found.where, found.first.name) == ("different", "the loss", "head:out")
        result, *_, advice = found.sentences()
        assert "enters in the loss" in result
        assert "The forward passes agree up to head: compare the labels" in advice
    assert "the model itself" not in run("bisect", str(runs["fp32"]), str(other))[1]


def test_without_a_control_the_dtype_stands_for_it_and_that_is_said(runs: dict[str, Path]) -> None:
    clean = of_stored(runs["fp32"], runs["bf16"])
    assert clean.verdict == "rounding"
    assert any("Give --control" in sentence for sentence in clean.sentences())
    found = of_stored(runs["fp32"], runs["scale"])
    assert found.where == "h.1.attn"
    # a control that repeats the first bit for bit says nothing of another dtype
    assert of_stored(runs["fp32"], runs["bf16"], runs["same"]).verdict == "rounding"


def test_the_row_of_a_run_is_what_was_recorded(runs: dict[str, Path]) -> None:
    run = sl.Run.open(runs["fp32"])
    found = of_run(run, 0)
    frame = run.frame("fingerprint_weight")
    frame = frame[frame["step"] == 0].set_index("site")
    place = found.passes["weights"]["h.0.mlp.c_fc.weight"]
    assert place.norm == frame.loc["h.0.mlp.c_fc.weight", "norm"]
    np.testing.assert_array_equal(
        place.sums, frame.loc["h.0.mlp.c_fc.weight", [f"s{j}" for j in range(16)]].to_numpy(dtype=float)
    )
    # SGD: the update is minus the rate times the gradient, and so are its sums
    for name, moved in found.passes["update"].items():
        np.testing.assert_allclose(moved.sums, -0.1 * found.passes["gradients"][name].sums, rtol=1e-3, atol=1e-6)
    order = [place.order for place in found.passes["forward"].values()]
    assert order == sorted(order)
    with pytest.raises(UsageError, match="no fingerprint at step 7: give one of 0, 1"):
        of_run(run, 7)


def test_an_update_that_differs_is_found_after_the_gradients(tmp_path: Path) -> None:
    class Skipping(torch.optim.SGD):
        """Leaves one parameter out."""

        def step(self, closure: Any = None) -> None:  # pyright: ignore
            self.param_groups[0]["params"][8].grad = None
            super().step()

    paths = []
    for kind in (torch.optim.SGD, Skipping):
        model = GPT(2)
        optimizer = kind(model.parameters(), lr=0.1)
        with sl.watch(model, out=tmp_path / kind.__name__, probes="fingerprint", every=1, reference=None) as watcher:
            for _ in range(2):
                loss_of(model, ids()).backward()
                watcher.step()
                optimizer.step()
                optimizer.zero_grad()
        paths.append(tmp_path / kind.__name__)
    found = of_stored(*paths, step=0)
    assert found.first is not None
    names = [name for name, _ in GPT(2).named_parameters()]
    assert (found.first.phase, found.first.name) == ("update", names[8])


def test_runs_without_fingerprints_or_common_steps_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no fingerprint: record it with probes='default,fingerprint'"):
        of_stored(runs["fp32"], runs["norms"])
    with pytest.raises(UsageError, match="not all runs have a fingerprint at step 1: the common steps are 0"):
        of_stored(runs["fp32"], runs["bf16"], step=1)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="is no fingerprint: make one with"):
        load(tmp_path / "other.json")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_a_fingerprint_is_kept_in_a_file_and_holds_against_a_run(runs: dict[str, Path], run: Call) -> None:
    code, out, _ = run("fingerprint", str(runs["fp32"]), "--out", "golden.json")
    assert (code, "places of" in out) == (0, True)
    read, plain = load(Path("golden.json")), of_run(sl.Run.open(runs["fp32"]), 0)
    for phase, places in plain.passes.items():
        for name, place in places.items():
            np.testing.assert_array_equal(read.passes[phase][name].sums, place.sums)
            assert read.passes[phase][name].norm == place.norm
    kept = Path("golden.json").read_bytes()
    code, _, err = run("fingerprint", str(runs["scale"]), "--out", "golden.json")
    assert (code, "golden.json exists: remove it, or give another --out" in err) == (2, True)
    assert Path("golden.json").read_bytes() == kept
    assert run("bisect", "golden.json", str(runs["same"]))[0] == 0
    code, out, _ = run("bisect", "golden.json", str(runs["scale"]), "--control", str(runs["again"]))
    assert code == 1
    assert "h.1.attn" in out


def test_the_command_ends_with_the_answer(runs: dict[str, Path], run: Call) -> None:
    paths = [str(runs[name]) for name in ("fp32", "scale", "again")]
    code, out, _ = run("bisect", *paths[:2], "--control", paths[2], "--json", "--picture", "depth.png")
    read = json.loads(out)
    assert (code, read["verdict"], read["where"], read["confirmed"]) == (1, "different", "h.1.attn", False)
    assert Path("depth.png").stat().st_size > 10_000
    code, out, _ = run("bisect", *paths[:2], "--all")
    assert (code, out.count("\nforward")) == (1, len([p for p in read["places"] if p["phase"] == "forward"]))
    for wrong, word in (
        (("mine:f", paths[0]), "of one kind"),
        (("mine:f", "mine:g", "--step", "3"), "--step is about stored runs"),
        ((*paths[:2], "--picture", "depth.gif"), "must end in .png"),
        ((*paths[:2], "--limit", "0"), "must be above 0"),
    ):
        code, _, err = run("bisect", *wrong)
        assert (code, word in err) == (2, True), err
    assert run("bisect", "nowhere", paths[0])[0] == 4


@pytest.mark.slow
def test_compare_names_the_place_by_the_sums_and_says_where_norms_cannot(
    runs: dict[str, Path], run: Call, tmp_path: Path
) -> None:
    paths = [str(runs[name]) for name in ("fp32", "scale")]
    code, out, _ = run("compare", *paths)
    assert code == 0
    assert out.index("first trouble") < out.index("part at"), "the table of both comes first"
    assert ". A difference in what is computed enters in h.1.attn (forward" in out
    assert "the control. Read from their fingerprints at step 0." in out
    read = json.loads(run("compare", *paths, "--json")[1])
    assert read["sketched"]["where"] == "h.1.attn"
    assert not any(name.startswith("fingerprint") and ".s" in name for name in read["compared"])
    rolled = recorded(tmp_path / "rolled", faulty(GPT(4), "channels rolled"), probes="default")
    plain = recorded(tmp_path / "plain", GPT(4), probes="default")
    out = run("compare", str(plain), str(rolled))[1]
    assert "Norms alone do not show the place: record both runs with the probe fingerprint" in out
    assert all(line.count("part at") == line.count("Norms alone") for line in out.splitlines()), "a paragraph is a line"
    same = run("compare", str(runs["fp32"]), str(runs["same"]))[1]
    assert "identical bit for bit" in same
    assert "Norms alone" not in same


@pytest.mark.slow
def test_the_page_shows_what_its_program_prints(monkeypatch: pytest.MonkeyPatch, run: Call) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bisect.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    called, shown = re.findall(r"^```console\n\$ stabilitylab (.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    Path("mine.py").write_text(programs[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr("stabilitylab.bisect.sides.elsewhere", here)
    try:
        code, out, _ = run(*called.split())
        names = vars(sys.modules["mine"])
    finally:
        sys.modules.pop("mine", None)
    assert code == 1
    assert out.splitlines()[0] == shown.splitlines()[0]
    numbers = re.compile(r"\d[\d.]*(e[-+]\d+)?")  # whose digits are the machine's
    assert numbers.sub("#", out).split() == numbers.sub("#", shown).split(), "docs/bisect.md shows other words"
    found: dict[str, Any] = {**names, "sl": sl}
    exec(programs[1], found)
    assert (found["found"].verdict, found["found"].where) == ("different", "h.1.attn")


@pytest.mark.slow
def test_two_factories_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch, run: Call) -> None:
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parents[1]}")
    monkeypatch.syspath_prepend(str(here))
    code, out, _ = run("bisect", "mine:reference", "mine:candidate", "--json")
    read = json.loads(out)
    assert (code, read["confirmed"], read["where"]) == (1, True, "h.1.attn")
    code, out, _ = run("bisect", "mine:reference", "mine:in_bf16")
    assert (code, out.startswith("Rounding: mine:in_bf16 and mine:reference")) == (0, True)
    code, _, err = run("bisect", "mine:reference", "mine:broken")
    assert (code, "mine:broken failed: RuntimeError: no such weights" in err) == (4, True)


def test_several_controls(runs: dict[str, Path]) -> None:
    """The control of a place is the root mean square of its differences from all of them."""
    given = (runs["same"], runs["bf16"], [runs["same"], runs["bf16"]])
    one, other, both = (of_stored(runs["fp32"], runs["scale"], control) for control in given)
    places = [{p.name: p.control for p in found.places if p.phase == "forward"} for found in (one, other, both)]
    floor = places[0]
    large = {name for name, control in places[1].items() if control > 1e-3}  # far above the floor of a control
    assert len(large) > 3
    for name in large:
        mean = max(places[1][name] / 2**0.5, floor[name])  # "same" is the first run bit for bit
        assert places[2][name] == pytest.approx(mean, rel=1e-9), name
    assert all(path.name in both.control for path in (runs["same"], runs["bf16"]))


def test_a_path_that_looks_like_a_style_is_a_path(run: Call) -> None:
    code, _, err = run("bisect", "a[/b]", "[red]c")
    assert (code, "a[/b]" in err) == (4, True)
