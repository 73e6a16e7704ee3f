"""``branch_variance`` against each architecture's formula in float64; its place among the probes; no taps, no table."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import (
    CASES,
    RUNS,
    UPDATES,
    VOCAB,
    Column,
    Place,
    agree,
    listen,
    make_batch,
    run_of,
    sublayers,
    watched_run,
)
from probe_toys import ListSink, Toy
from probe_toys import batch as make_inputs
from rest_slow import SOME_ARCHS, rest_slow
from test_oracle_ln_input import arch_of, shortcut_scale
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, build_model
from stabilitylab.probes import Watcher
from stabilitylab.probes._engine.selection import chosen


def variance(tokens: list[Tensor]) -> float:
    """Mean over tokens of the population variance over the width, from plain sums."""
    rows = torch.cat(tokens).double().tolist()
    means = [math.fsum(row) / len(row) for row in rows]
    squares = [(v - mean) ** 2 for row, mean in zip(rows, means, strict=True) for v in row]
    return math.fsum(squares) / len(squares)


def expected(case: str, dtype: torch.dtype, t: int) -> dict[str, Column]:
    run = run_of(case, dtype)
    model, columns = run.twins[t].eval(), {name: {} for name in ("branch", "shortcut", "total")}
    with torch.no_grad():
        passes = [listen(model, batch) for batch in run.held_out]
    for place, residual in sublayers(model):
        alpha = model.schedule.get() if model.schedule and arch_of(model, place[0]) == "branchnorm" else 1.0
        scale = shortcut_scale(model, place[0], residual)
        real = [batch.masks[place[0]] for batch in run.held_out]
        added = [alpha * seen.branch[place][m] for seen, m in zip(passes, real, strict=True)]
        kept = [scale * seen.x[place][m] for seen, m in zip(passes, real, strict=True)]
        columns["branch"][place], columns["shortcut"][place] = variance(added), variance(kept)
        columns["total"][place] = variance([a + b for a, b in zip(added, kept, strict=True)])
    return columns


@RUNS
def test_branch_shortcut_and_sum_of_every_sublayer(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    assert set(run.tables["branch_variance"].columns) == {"branch", "shortcut", "total"}
    for t in (0, UPDATES):
        for name, column in expected(case, dtype, t).items():
            agree(run.column(t, "branch_variance", name), column, dtype)


@pytest.mark.parametrize("case", ["postln", "deepnorm", "branchnorm", "admin", "preln"])
def test_the_sum_is_what_post_ln_normalises_and_what_pre_ln_passes_on(case: str) -> None:
    run = run_of(case, torch.float64)
    model, batch = run.twins[0].eval(), run.held_out[0]
    normalised: dict[Place, Tensor] = {}
    for place, residual in sublayers(model):
        norm = residual.get_submodule("norm")
        norm.register_forward_pre_hook(lambda _norm, args, place=place: normalised.update({place: args[0]}))
    with torch.no_grad():
        passed_on = listen(model, batch).out
    where = passed_on if case == "preln" else normalised
    sums = {place: variance([value[batch.masks[place[0]]]]) for place, value in where.items()}
    agree(run.column(0, "branch_variance", "total"), sums, torch.float64)


def test_branch_and_shortcut_are_not_mixed_up_and_do_not_add_up() -> None:
    run = run_of("branchnorm", torch.float64)  # alpha = 1/7: the branch is the smaller one
    branch, shortcut, total = (run.column(0, "branch_variance", name) for name in ("branch", "shortcut", "total"))
    assert all(branch[place] < 0.5 * shortcut[place] for place in branch)
    assert any(total[place] != pytest.approx(branch[place] + shortcut[place], rel=1e-3) for place in branch)


@pytest.mark.slow
def test_padding_does_not_count() -> None:
    masked, all_tokens = run_of("deepnorm", torch.float64), watched_run("deepnorm", torch.float64, masked=False)
    for name in ("branch", "shortcut", "total"):
        one, other = (run.column(0, "branch_variance", name) for run in (masked, all_tokens))
        assert one != pytest.approx(other, rel=1e-3)


def test_default_runs_go_without_it_and_it_is_named_by_its_name_and_by_all() -> None:
    assert "branch_variance" not in chosen("default")
    assert chosen("default,branch_variance") == {**chosen("default"), "branch_variance": True}
    assert chosen("all")["branch_variance"] is False


def test_a_model_without_taps_has_no_such_table() -> None:
    sink, options = ListSink(), {"reference": lambda: None}
    dropped = dict(Watcher(Toy(), sink, probes="all", optimizer=torch.optim.SGD([torch.ones(1)]), **options).dropped)
    assert "branch_variance" not in sink.tables
    assert dropped["branch_variance"].startswith("finds no branches in this model; nearest are ")
    with pytest.raises(UsageError, match="probe 'branch_variance' finds no branches"):
        Watcher(Toy(), sink, probes="branch_variance", reference=lambda: None)


class Foreign(nn.Module):
    """Somebody's sub-layer with taps in an order of its own: the shortcut is the later one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.branch, self.shortcut = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.branch(self.f(x))
        return self.norm(self.shortcut(2 * x) + branch)


def test_a_foreign_model_needs_taps_of_these_names_only() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(Foreign(6)) for _ in range(2))})

    def reference() -> None:
        x = torch.ones(3, 5, 6).cumsum(-1).sin()
        for layer in model["layers"]:  # type: ignore[union-attr]
            x = layer(x)

    sink = ListSink()
    watcher = Watcher(model, sink, probes="branch_variance", reference=reference, update_every=1)
    watcher.step()
    watcher.step()  # nothing of the first row is left over
    watcher.flush()
    first = model["layers"][0][0]  # type: ignore[index]
    x = torch.ones(6).cumsum(-1).sin()
    expected = {"branch": first.f(x), "shortcut": 2 * x, "total": first.f(x) + 2 * x}
    for name, value in expected.items():
        want = value.var(correction=0).item()
        for row in (0, 1):
            assert sink.column(row, "branch_variance", name)["layers.0.0"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("arch", rest_slow(ARCHS, SOME_ARCHS | {"mhc"}))
def test_a_watched_model_trains_bit_for_bit_as_an_unwatched_one(arch: str) -> None:
    def trained(watched: bool) -> list[Tensor]:
        layers: dict[str, Any] = {key: CASES["postln"][key] for key in ("encoder_layers", "decoder_layers")}
        model = build_model(arch=arch, d_model=16, d_ffn=24, **layers, source_vocab=VOCAB, target_vocab=VOCAB)
        batch, fixed = make_batch("encoder-decoder", 1), make_batch("encoder-decoder", 2)
        model.calibrate(**batch.inputs)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        options: dict[str, Any] = {"reference": lambda: model(**fixed.inputs), "update_every": 1}
        watcher = Watcher(model, ListSink(), probes="branch_variance", **options) if watched else None
        for _ in range(3):
            F.cross_entropy(model(**batch.inputs).flatten(0, 1), batch.labels.flatten()).backward()
            if watcher:
                watcher.step()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_what_a_layer_adds_to_what_enters_it_and_how_large_the_output_is() -> None:
    torch.manual_seed(0)
    model, sink = Toy(layers=2).double(), ListSink()
    inputs = make_inputs()
    real = {"encoder": inputs["source_mask"], "decoder": inputs["target_mask"]}
    with Watcher(
        model, sink, probes="layer_branch,output_norm", every=1, mask=real, reference=lambda: model(**inputs)
    ) as watcher:
        watcher.finish()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    model.eval()
    for name in (*(f"{s}.layers.{n}" for s in real for n in range(2)), *real):
        hook = partial(lambda name, m, args, out: seen.__setitem__(name, (args[0], out)), name)
        model.get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        model(**inputs)
    branch, size = sink.tables["layer_branch"], sink.tables["output_norm"]
    cells = sink.row(0)[1]
    for row, values in zip(branch.rows, cells["layer_branch"].values, strict=True):
        x, y = (z[real[row.stack]] for z in seen[row.site])
        pairs = [(variance([(b - a)[None]]), variance([a[None]])) for a, b in zip(x, y, strict=True)]
        exact = [math.fsum(column) / len(pairs) for column in ([b / s for b, s in pairs], *zip(*pairs, strict=True))]
        assert values.tolist() == pytest.approx(exact, rel=1e-10)
    for row, values in zip(size.rows, cells["output_norm"].values, strict=True):
        exact = [math.sqrt(math.fsum(v * v for v in token)) for token in seen[row.site][1][real[row.stack]].tolist()]
        assert values[0] == pytest.approx(math.fsum(exact) / len(exact), rel=1e-12)
