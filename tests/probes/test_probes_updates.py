"""update_ratio against the parameters before and after the optimizer's step."""

from __future__ import annotations

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.probes.parameters import copies


@pytest.mark.parametrize(("every", "elsewhere"), [(1, False), (2, False), (1, True)])
def test_update_ratio_is_the_change_of_a_row_over_its_norm(
    every: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the copy of the parameters elsewhere, of which a few are fetched at a time."""
    if elsewhere:
        monkeypatch.setattr(copies, "on_host", lambda tensors: True)
        monkeypatch.setattr(copies, "beside", lambda *_: False)
        monkeypatch.setattr(copies, "PART", 100)
        assert len(list(copies.parts([torch.ones(60)] * 7, torch.device("cpu")))) == 4
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher = Watcher(model, sink, probes="update_ratio", every=every, optimizer=optimizer)
    snapshots = []
    for t in range(3):
        loss_of(model, batch(t)).backward()
        snapshots.append({n: p.detach().double().clone() for n, p in model.named_parameters()})
        watcher.step()
        optimizer.step()
        optimizer.zero_grad()
    snapshots.append({n: p.detach().double().clone() for n, p in model.named_parameters()})
    watcher.finish()
    assert [step for step, _, tables in sink.rows if "update_ratio" in tables] == list(range(0, 3, every))
    for t in range(0, 3, every):
        ratio, rms = {}, {}
        for row in sink.tables["update_ratio"].rows:
            own = [name for name in snapshots[0] if name.startswith(f"{row.site}.")]
            before, after = (torch.cat([snapshots[i][n].flatten() for n in own]) for i in (t, t + 1))
            ratio[row.site] = ((after - before).norm() / before.norm()).item()
            rms[row.site] = (after - before).square().mean().sqrt().item()
        assert sink.column(t, "update_ratio", "value") == pytest.approx(ratio, rel=1e-6)
        assert sink.column(t, "update_ratio", "rms") == pytest.approx(rms, rel=1e-6)


def test_a_frozen_row_has_an_update_of_zero() -> None:
    model, sink = Toy(), ListSink()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with Watcher(model, sink, probes="update_ratio,grad_norm", optimizer=optimizer) as watcher:
        loss_of(model, batch()).backward()
        watcher.step()
        optimizer.step()
    rms = sink.column(0, "update_ratio", "rms")
    frozen = {site for site in rms if site.startswith("encoder.")}
    assert {site for site, value in rms.items() if value == 0.0} == frozen == sink.absent(0, "grad_norm")


def test_an_interruption_before_the_update_leaves_the_table_out() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(model, sink, probes="update_ratio,grad_norm", optimizer=optimizer)
    loss_of(model, batch()).backward()
    watcher.step(loss=1.0)
    watcher.flush()
    optimizer.step()
    watcher.close()
    assert [(step, metrics["loss"], set(tables)) for step, metrics, tables in sink.rows] == [(0, 1.0, {"grad_norm"})]


def test_it_needs_the_optimizer() -> None:
    with pytest.raises(UsageError, match="'update_ratio' needs optimizer="):
        Watcher(Toy(), ListSink(), probes="update_ratio")
    watcher = Watcher(Toy(), ListSink(), probes="default")
    assert ("update_ratio", "needs optimizer=, the optimizer") in watcher.dropped


def test_norms_of_every_single_parameter() -> None:
    """The weight, the gradient before clipping and the update, each against its own float64 sum."""
    torch.manual_seed(0)
    model, sink = Toy(), ListSink()
    spare = torch.nn.Parameter(torch.ones(3))
    model.register_parameter("spare", spare)  # without a gradient
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Watcher(model, sink, probes="parameter_norm", every=1, optimizer=optimizer) as watcher:
        loss_of(model, batch()).backward()
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        gradients = {n: float(p.grad.double().norm()) for n, p in model.named_parameters() if p.grad is not None}
        watcher.step(loss=1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        after = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    spec, cells = sink.tables["parameter_norm"], sink.row(0)[1]["parameter_norm"]
    assert [row.site for row in spec.rows] == list(before)
    assert {row.layer for row in spec.rows if row.stack == "encoder"} >= {1, 2}
    for number, name in enumerate(before):
        weight, gradient, update = cells.values[number]
        assert weight == pytest.approx(float(before[name].norm()), rel=1e-7)
        assert update == pytest.approx(float((after[name] - before[name]).norm()), rel=1e-5, abs=1e-12)
        if name == "spare":
            assert cells.missing is not None
            assert cells.missing[number].tolist() == [False, True, False]
        else:
            assert gradient == pytest.approx(gradients[name], rel=1e-6)
