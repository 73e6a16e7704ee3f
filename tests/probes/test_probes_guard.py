"""A probe that raises ends its table, and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks

from stabilitylab import Run, watch
from stabilitylab.errors import UsageError
from stabilitylab.probes import PROBES, Collected, Mean, ParameterProbe, Probe, Watcher, probe
from stabilitylab.probes.places import norms

WHERE = ("forward", "backward", "reference", "step", "before", "update")


@pytest.fixture
def registry() -> Iterator[None]:
    with PROBES.restored():
        yield


def broken(where: str, at: int) -> str:
    """A probe that raises there when it is asked for the ``at``-th time."""
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked > at:
            raise ValueError(f"no number the {at}-th time\nand more")

    if where in ("forward", "backward", "reference"):

        @probe("fragile", on=where, at=norms, columns={"value": Mean()})
        class Fragile(Probe):
            """One number a norm."""

            def measure(self, site: Any, x: Any, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                if site.name.startswith("encoder.layers.0"):
                    ask()
                return torch.ones((), dtype=torch.float64)
    else:

        @probe("fragile", on="update" if where != "step" else "step", columns={"value": Mean()})
        class FragileParameters(ParameterProbe):
            """One number a row."""

            def before(self, parameters: Any) -> None:
                if where == "before":
                    ask()

            def collect(self, parameters: Any) -> Collected:
                if where != "before":
                    ask()
                ones = parameters.entries.new_ones((len(parameters.rows), 2))
                return Collected({"value": ones}, ones.bool().numpy()[:, :1])

    return "fragile"


def trained(probes: str, sink: Any = None, rows: int = 6, **options: Any) -> tuple[Toy, Watcher | None, ListSink]:
    torch.manual_seed(0)
    model, sink = Toy(), sink or ListSink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = batch(7)
    reference = lambda: loss_of(model, held_out)  # noqa: E731
    options = {"every": 1, "update_every": 1, "optimizer": optimizer, "reference": reference} | options
    watcher = Watcher(model, sink, probes=probes, **options) if probes else None
    for row in range(rows):
        loss = loss_of(model, batch(row))
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    return model, watcher, sink


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("where", WHERE)
def test_its_table_ends_and_training_goes_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the third row: those before are kept, it is said once, and training is that of an unwatched run."""
    broken(where, at=2)
    plain, _, _ = trained("")
    model, watcher, sink = trained("fragile,grad_norm")
    assert watcher is not None
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "no more rows of fragile: its probe raised ValueError (no number the 2-th time). Training goes on."
    ]
    assert dict(watcher.ended) == {"fragile": "its probe raised ValueError (no number the 2-th time)"}
    with_table = [step for step, _, tables in sink.rows if "fragile" in tables]
    assert with_table == list(range(len(with_table)))
    assert 0 < len(with_table) < 6
    assert [step for step, _, tables in sink.rows if "grad_norm" in tables] == list(range(6))


@pytest.mark.usefixtures("registry")
def test_strict_raises_it() -> None:
    broken("forward", at=2)
    with pytest.raises(ValueError, match="no number"):
        trained("fragile", strict=True)


@pytest.mark.usefixtures("registry")
def test_the_run_says_so(tmp_path: Any) -> None:
    broken("step", at=1)
    torch.manual_seed(0)
    model = Toy()
    with watch(model, out=tmp_path / "run", probes="fragile,grad_norm", every=1, reference=None) as watcher:
        for row in range(3):
            loss_of(model, batch(row)).backward()
            watcher.step(loss=1.0)
    run = Run.open(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["tables_ended"] == {
        "fragile": "its probe raised ValueError (no number the 1-th time)"
    }
    assert set(run.frame("fragile")["step"]) == {0}
    assert set(run.frame("grad_norm")["step"]) == {0, 1, 2}


def test_a_mask_of_another_shape_is_told_at_once_and_later_ends_the_tables_that_need_it() -> None:
    inputs = batch(0)
    wrong = {name: mask[:, :-1] for name, mask in masks(inputs).items()}
    with pytest.raises(UsageError, match="mask has shape"):
        trained("ln_input,grad_norm", mask=lambda: wrong)
    asked = 0

    def later() -> Any:
        nonlocal asked
        asked += 1
        return masks(batch(asked - 1)) if asked <= 2 else wrong

    _, watcher, sink = trained("ln_input,grad_norm", mask=later, reference=None)
    assert watcher is not None
    assert watcher.ended["ln_input"].startswith("its probe raised UsageError (mask has shape (")
    assert [step for step, _, tables in sink.rows if "ln_input" in tables] == [0, 1]
    assert [step for step, _, tables in sink.rows if "grad_norm" in tables] == list(range(6))


def test_a_reference_that_raises_is_raised_at_first_and_later_ends_its_tables() -> None:
    with pytest.raises(ZeroDivisionError):
        trained("cosine_similarity,grad_norm", reference=lambda: 1 // 0)
    asked = 0

    def later() -> None:
        nonlocal asked
        asked += 1
        1 // (4 - asked)

    _, watcher, sink = trained("model_update,grad_norm", reference=later)
    assert watcher is not None
    assert watcher.ended["model_update"].startswith("the held-out pass raised ZeroDivisionError")
    assert [step for step, _, tables in sink.rows if "grad_norm" in tables] == list(range(6))
