"""One host read per row for everything together, and none in hooks; and the counter that says so can count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of
from rest_slow import rest_slow
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.probes import Probe, Watcher, probe
from stabilitylab.probes.instruments.ledger import UpdateLedger
from stabilitylab.probes.places.sites import layers

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal", "bincount")


class Scalars(TorchDispatchMode):
    """Counts operators that make the host wait: a scalar read, or a result whose shape depends on data."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])
        if by_mask or name.startswith(SYNCHRONISING):
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Every read of a tensor by the host; on a GPU each would wait for the device."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            real = getattr(torch.Tensor, name)

            def read(self: torch.Tensor, *args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                outermost = not seen or seen[-1] != "..."
                if outermost:
                    seen.extend((_name, "..."))
                try:
                    return _real(self, *args, **kwargs)
                finally:
                    if outermost:
                        seen.remove("...")

            patch.setattr(torch.Tensor, name, read)
        with Scalars(seen):
            yield seen


def reads_of_a_step(watcher: Watcher, model: Toy, optimizer: torch.optim.Optimizer, t: int) -> list[str]:
    inputs = batch(t)
    tokens = int(inputs["target_mask"].sum())
    real = inputs["target_mask"]
    with counted() as seen:
        logits = model(**inputs)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs["target"], reduction="none")
        loss = torch.where(real, losses, 0).sum() / tokens
        loss.backward()
        watcher.step(loss=loss, nll=loss.detach())
        optimizer.step()
    optimizer.zero_grad()
    return seen


def watch(probes: str, every: int = 1) -> tuple[ListSink, Toy, torch.optim.Optimizer, Watcher]:
    model, sink, fixed = Toy(dropout=0.1), ListSink(), batch(99)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam would read its step counter
    watcher = Watcher(
        model,
        sink,
        probes=probes,
        every=every,
        update_every=every,
        optimizer=optimizer,
        schedule=model.alpha,
        reference=lambda: {"held_out": model(**fixed).square().mean()},
    )
    return sink, model, optimizer, watcher


BY_NAME = "histograms,gradient_alignment,attention_sink"  # which "all" leaves out


@pytest.mark.parametrize(
    ("probes", "every"),
    rest_slow([("all", 1), ("all", 2), ("standard", 1), (BY_NAME, 1), (f"all,{BY_NAME}", 2)], [("all", 2)]),
)
def test_one_read_a_row(probes: str, every: int) -> None:
    sink, model, optimizer, watcher = watch(probes, every)
    counts = []
    for t in range(5):
        model.alpha.set((t + 1) / 8)
        counts.append(reads_of_a_step(watcher, model, optimizer, t))
    # row t is read when row t + 1 begins: by then its numbers have long arrived
    assert set(counts[0]) == {"equal"}  # the first reference pass alone is held against a copy of the model, at once
    assert counts[1:] == [["numpy"]] * 4
    with counted() as last:
        watcher.finish()
    assert last == ["numpy", "numpy"]  # the pending row and the row after training
    assert all(tables for _, _, tables in sink.rows[:-1][::every])


def test_looking_at_a_rows_metrics_after_the_update_is_the_same_one_read() -> None:
    _, model, optimizer, watcher = watch("all")
    reads_of_a_step(watcher, model, optimizer, 0)
    loss_of(model, batch(1)).backward()
    with counted() as seen:
        metrics = watcher.step(loss=1.0)
        optimizer.step()
        total = metrics["grad_norm_total"]
        watcher.flush()
    assert seen == ["numpy", "numpy"]  # row 0 at step(), row 1 here
    assert total is not None


class Digested:
    def instruments(self) -> list[UpdateLedger]:
        return [UpdateLedger(digests=1)]


@pytest.mark.parametrize("record", [None, Digested()])
def test_the_ledger_reads_nothing_as_the_optimizer_steps(record: Digested | None) -> None:
    """A rate on a GPU, digests and shares are on their way then, and are taken as the row is read."""
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["of_somebody"] = torch.tensor(3.0)
    with Watcher(model, sink, probes="none", optimizer=optimizer, record=record) as watcher:
        for t in range(4):
            loss_of(model, batch(t)).backward()
            watcher.step(loss=1.0)
            with counted() as seen:
                optimizer.step()
            assert seen == [], f"the host reads in the hooks of update {t}"
            optimizer.zero_grad()


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("how", ["item", "float", "if", "numpy", "index"])
def test_the_counter_notices_a_probe_that_reads(how: str) -> None:
    @probe("reader", on="forward", at=layers)
    class Reader(Probe):
        def measure(self, site: Any, x: Any, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if how == "item":
                y.sum().item()
            elif how == "float":
                float(y.sum())
            elif how == "if":
                if y.sum() > 0:
                    return y.sum(-1)
            elif how == "numpy":
                y.sum().numpy()
            else:
                return y[y > 0].sum()
            return y.sum(-1)

    _, model, optimizer, watcher = watch("reader")
    assert len(reads_of_a_step(watcher, model, optimizer, 0)) >= 4  # once a layer
    watcher.close()
