"""``stabilitylab.tap``: values that no module yields are places like any other, and training does not notice."""

from __future__ import annotations

import copy
import dis
import io
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from rest_slow import rest_slow
from tap_toys import Bare, BareDecoder, Functional, Oracle, ids
from torch import Tensor, nn

import stabilitylab
from stabilitylab import tapping
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.store import Run

EXACT = {"rel": 1e-10, "abs": 1e-14}
NORMS = [f"blocks.{n}.norm{k}" for n in range(3) for k in (1, 2)]
MIDDLES, INNERS = ([f"blocks.{n}.{name}" for n in range(3)] for name in ("middle", "inner"))
PROBES = "ln_input,residual_norm,activation_grad_norm,activation_sparsity,output_norm,outliers,grad_norm"


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that never watched anything."""
    monkeypatch.setattr(tapping, "_shown", None)


def trained(watched: bool, micro: int = 1, updates: int = 3, **options: Any) -> tuple[list[Tensor], ListSink]:
    torch.manual_seed(0)
    model, sink = BareDecoder(**options).double(), ListSink()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watcher = None
    if watched:
        held_out = lambda: model(ids(100))  # noqa: E731
        watcher = Watcher(model, sink, probes=PROBES, every=1, update_every=1, reference=held_out, strict=True)
    for t in range(updates):
        for part in range(micro):
            (model(ids(micro * t + part)).square().mean() / micro).backward()
        if watcher is not None:
            watcher.step(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    return [parameter.detach() for parameter in model.parameters()], sink


@pytest.mark.parametrize("recompute", ["", "reentrant", "not"])
@pytest.mark.parametrize("owner", [True, False])
@pytest.mark.parametrize("micro", rest_slow([1, 2], [2]))
def test_tables_equal_the_formula_and_training_is_unchanged(recompute: str, owner: bool, micro: int) -> None:
    parameters, sink = trained(True, micro, recompute=recompute, owner=owner)
    untouched, _ = trained(False, micro, recompute=recompute, owner=owner)
    without, _ = trained(False, micro, recompute=recompute, shows=False)
    assert all(map(torch.equal, parameters, untouched))
    assert all(map(torch.equal, parameters, without))
    torch.manual_seed(0)
    twin = BareDecoder().double()
    parts, held_out = [Oracle(twin, ids(part)) for part in range(micro)], Oracle(twin, ids(100))

    assert sink.column(0, "ln_input", "value") == pytest.approx(
        {name: sum(part.mean_norm(name) for part in parts) / micro for name in NORMS}, **EXACT
    )
    middle = sink.column(0, "residual_norm", "value")
    assert {name: middle[name] for name in MIDDLES} == pytest.approx(
        {name: sum(part.mean_norm(name) for part in parts) / micro for name in MIDDLES}, **EXACT
    )
    flowing = sink.column(0, "activation_grad_norm", "value")
    assert {name: flowing[name] for name in MIDDLES} == pytest.approx(
        {name: sum(float(p.gradient(name).square().sum()) for p in parts) ** 0.5 / micro for name in MIDDLES}, **EXACT
    )
    for row in range(3):
        assert set(sink.column(row, "ln_input", "value")) == set(NORMS)
        assert not sink.absent(row, "ln_input")
        assert not sink.absent(row, "activation_grad_norm")
    sparse = sink.column(0, "activation_sparsity", "nonzero_fraction")
    assert sparse == pytest.approx({n: float((held_out.held[n] > 0).double().mean()) for n in INNERS}, **EXACT)
    output = sink.column(0, "output_norm", "value")
    assert output["final"] == pytest.approx(held_out.mean_norm("final"), **EXACT)
    assert {*MIDDLES, *INNERS} < set(sink.column(0, "outliers", "max_abs"))
    largest = sink.column(0, "outliers", "max_abs")["blocks.1.inner"]
    assert largest == pytest.approx(float(held_out.held["blocks.1.inner"].detach().abs().max()), **EXACT)


def test_its_places_stand_where_its_module_does() -> None:
    _, sink = trained(True, updates=1)
    rows = {row.site: (row.stack, row.layer, row.sublayer) for row in sink.tables["ln_input"].rows}
    assert rows == {f"blocks.{n}.norm{k}": ("blocks", n + 1, f"norm{k}") for n in range(3) for k in (1, 2)}


def test_names_tell_layers_where_there_are_no_modules() -> None:
    torch.manual_seed(1)
    model, sink, x = Functional().double(), ListSink(), torch.randn(2, 3, 8, dtype=torch.float64)
    with Watcher(model, sink, every=1, probes="ln_input,residual_norm,activation_grad_norm") as watcher:
        model(x).square().mean().backward()
        watcher.step()
    assert [(r.site, r.stack, r.layer, r.sublayer) for r in sink.tables["ln_input"].rows] == [
        (f"layers.{n}.norm", "layers", n + 1, "norm") for n in (0, 1)
    ]
    assert [(r.site, r.layer) for r in sink.tables["residual_norm"].rows] == [("layers.0", 1), ("layers.1", 2)]
    assert sink.column(0, "ln_input", "value")["layers.0.norm"] == pytest.approx(float(x.norm(dim=-1).mean()), **EXACT)
    assert not sink.absent(0, "activation_grad_norm")


def test_it_is_free_where_nobody_watches() -> None:
    x = torch.randn(3, requires_grad=True)
    assert stabilitylab.tap(x, "anything") is x
    assert len(list(dis.get_instructions(stabilitylab.tap))) < 24  # a comparison, and out
    model, sink = BareDecoder(), ListSink()
    with Watcher(model, sink, every=5, probes="ln_input") as watcher:
        for _ in range(3):
            model(ids()).sum().backward()
            watcher.step()
        y = torch.randn(3, requires_grad=True)
        assert stabilitylab.tap(y, "norm1", model.blocks[0]) is y
        assert y._backward_hooks is None
    assert [step for step, _, tables in sink.rows if "ln_input" in tables] == [0]
    assert "_stabilitylab_key" not in vars(model.blocks[0])


def test_a_mask_counts_there_as_everywhere() -> None:
    torch.manual_seed(0)
    model, sink = BareDecoder().double(), ListSink()
    real = torch.arange(5)[None] < torch.tensor([[5], [3], [2], [4]])
    with Watcher(model, sink, every=1, probes="ln_input", mask=real) as watcher:
        model(ids()).square().mean().backward()
        watcher.step()
    torch.manual_seed(0)
    entering = Oracle(BareDecoder().double(), ids()).held["blocks.2.norm2"].detach().norm(dim=-1)
    assert sink.column(0, "ln_input", "value")["blocks.2.norm2"] == pytest.approx(float(entering[real].mean()), **EXACT)


class Growing(BareDecoder):
    late = False

    def forward(self, ids: Tensor) -> Tensor:
        return stabilitylab.tap(super().forward(ids), "late") if self.late else super().forward(ids)


def test_what_comes_by_too_late_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = Growing(), ListSink()
    with Watcher(model, sink, every=1, probes="ln_input,residual_norm") as watcher:
        for row in range(4):
            model.late = row > 1
            model(ids()).sum().backward()
            watcher.step()
    said = [record.getMessage() for record in caplog.records if "tap" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("row 2: tap late was first reached after the first row")
    assert "late" not in sink.column(3, "residual_norm", "value")


@pytest.mark.parametrize(
    ("show", "sentence"),
    [
        (lambda x, m: stabilitylab.tap(x, "n", kind="norm"), "tap: 'norm' is no kind of place; choose one of stream"),
        (lambda x, m: stabilitylab.tap(x, "head"), "tap: 'head' is the name of a module already"),
        (lambda x, m: stabilitylab.tap([x], "list"), "tap: 'list' is a list, not a tensor"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(show: Any, sentence: str) -> None:
    class Wrong(BareDecoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = super().forward(ids)
            show(x, self)
            return x

    model = Wrong()
    with Watcher(model, ListSink(), every=1), pytest.raises(UsageError, match=sentence):
        model(ids())


class Silent(nn.Module):
    """It has the word in its code, and no value to show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return stabilitylab.tap(x, "never") if x is None else self.linear(x)


def test_a_named_probe_that_finds_nothing_after_all_is_refused_at_the_first_row() -> None:
    model = Silent()
    watcher = Watcher(model, ListSink(), every=1, probes="ln_input")
    model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(UsageError, match="probe 'ln_input' finds no norms in this model"):
        watcher.step()
    watcher.close()


def test_copies_of_a_watched_model_show_nothing() -> None:
    model, sink = BareDecoder(), ListSink()
    with Watcher(model, sink, every=1, probes="ln_input") as watcher:
        twin = copy.deepcopy(model)
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        again = torch.load(file, weights_only=False)
        for other in (twin, again):
            other(ids(7)).sum().backward()
        model(ids()).sum().backward()
        watcher.step()
    alone = ListSink()
    with Watcher(twin, alone, every=1, probes="ln_input") as watcher:
        twin(ids()).sum().backward()
        watcher.step()
    assert sink.column(0, "ln_input", "value") == alone.column(0, "ln_input", "value")


def test_a_run_holds_them_and_goes_on_with_them(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = BareDecoder()

    def updates(watcher: Any, rows: int) -> None:
        for _ in range(rows):
            model(ids()).sum().backward()
            watcher.step(loss=1.0)
            model.zero_grad()

    first = stabilitylab.watch(model, out=tmp_path / "run", every=1, reference=None)
    updates(first, 2)
    state = first.checkpoint()
    first.run.close()
    first.close()
    with stabilitylab.watch(model, out=tmp_path / "run", every=1, reference=None, resume=state) as watcher:
        updates(watcher, 2)
    run = Run.open(tmp_path / "run")
    assert not [name for name, _ in run.manifest["probes_dropped"].items() if name == "ln_input"]
    frame = run.frame("ln_input")
    assert sorted(set(frame["site"])) == NORMS
    assert sorted(set(frame["step"])) == [0, 1, 2, 3]
    assert not frame["value"].isna().any()


def test_a_block_of_one_model_may_be_watched_in_two() -> None:
    """Each watcher has the places of its own model."""
    torch.manual_seed(0)
    one, two = BareDecoder(), BareDecoder()
    sinks = ListSink(), ListSink()
    with (
        Watcher(one, sinks[0], every=1, probes="ln_input") as a,
        Watcher(two, sinks[1], every=1, probes="ln_input") as b,
    ):
        one(ids()).sum().backward()
        two(ids()).sum().backward()
        a.step()
        b.step()
    first, second = (sink.column(0, "ln_input", "value") for sink in sinks)
    assert set(first) == set(second) == set(NORMS)
    assert first["blocks.1.norm1"] != second["blocks.1.norm1"]
    assert isinstance(one.blocks[0], Bare)
