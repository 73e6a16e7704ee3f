"""Several optimizers for one model, and optimizers of other kinds than Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of

from stabilitylab.probes import Watcher

Optimizer = torch.optim.Optimizer


def matrices(model: Toy) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def others(model: Toy) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


def run(
    make: Callable[[Toy], list[Optimizer]], watched: bool = True, **options: Any
) -> tuple[Toy, ListSink, list[Any]]:
    torch.manual_seed(0)
    model, sink = Toy(), ListSink()
    optimizers = make(model)
    before: list[Any] = []
    options = {"probes": "update_ratio,grad_norm,adam", "optimizer": optimizers} | options
    watcher = Watcher(model, sink, every=1, strict=True, **options) if watched else None
    for row in range(4):
        loss_of(model, batch(row)).backward()
        if watcher is not None:
            watcher.step(loss=1.0)
        before.append({name: p.detach().clone() for name, p in model.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    before.append({name: p.detach().clone() for name, p in model.named_parameters()})
    if watcher is not None:
        watcher.finish()
        watcher.close()
    return model, sink, before


def two(model: Toy) -> list[Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=0.05), torch.optim.AdamW(others(model), lr=1e-3)]


def test_updates_of_all_stand_in_the_row() -> None:
    plain, _, _ = run(two, watched=False)
    model, sink, before = run(two)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    for row in range(4):
        for site, value in sink.column(row, "update_ratio", "value").items():
            own = [name for name in before[0] if name.startswith(f"{site}.") or name == site]
            if own:
                moved = sum(float((before[row + 1][n] - before[row][n]).double().square().sum()) for n in own)
                held = sum(float(before[row][n].double().square().sum()) for n in own)
                assert value == pytest.approx((moved / held) ** 0.5, rel=1e-5, nan_ok=True), site
                assert value > 0 or held == 0


def test_adams_numbers_are_those_of_its_own_parameters() -> None:
    _, sink, _ = run(two)
    spec, cells = sink.tables["adam"], sink.row(3)[1]["adam"]
    norms = [n for n, row in enumerate(spec.rows) if "norm" in row.site]
    alone = [n for n, row in enumerate(spec.rows) if row.site.endswith("embedding")]
    assert norms
    assert not cells.absent[norms].any()
    assert cells.absent[alone].all()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_row_waits_for_the_steps_of_all(order: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, sink = Toy(), ListSink()
    optimizers = two(model)
    with Watcher(model, sink, probes="update_ratio", every=1, optimizer=optimizers) as watcher:
        loss_of(model, batch(0)).backward()
        watcher.step(loss=1.0)
        for number in order:
            optimizers[number].step()
        for p in model.parameters():
            p.data.add_(1.0)  # what happens after both is no part of the update
    assert max(sink.column(0, "update_ratio", "rms").values()) < 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Rprop(p),
    ],
    ids=["Adafactor", "NAdam", "RAdam", "SGD", "Rprop"],
)
def test_any_optimizer_is_watched_and_trains_as_unwatched(make: Callable[[Any], Optimizer]) -> None:
    plain, _, _ = run(lambda model: [make(model.parameters())], watched=False)
    model, sink, _ = run(lambda model: [make(model.parameters())], probes="all", reference=lambda: None)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert [step for step, _, tables in sink.rows if "update_ratio" in tables] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam])
def test_of_nadam_and_radam_the_moments_are_told_and_the_update_is_missing(kind: Any) -> None:
    _, own, _ = run(lambda model: [kind(model.parameters(), lr=1e-3)], probes="adam")
    _, adam, _ = run(lambda model: [torch.optim.Adam(model.parameters(), lr=1e-3)], probes="adam")
    cells = own.row(0)[1]["adam"]
    columns = list(own.tables["adam"].columns)
    assert cells.missing is not None
    assert cells.missing[:, columns.index("update_rms")].all()
    for column in ("rms_t", "eps_floor"):  # of the first update, whose gradients are the same
        assert own.column(0, "adam", column) == pytest.approx(adam.column(0, "adam", column), nan_ok=True)


ASK = "give scaler=, and call scaler.unscale_(optimizer) before step()"


@pytest.mark.parametrize(
    ("probes", "unscale", "said"),
    [
        (
            "activation_grad_norm,grad_norm,parameter_norm,ln_input",
            False,
            "activation_grad_norm, grad_norm, parameter_norm (gradient), grad_norm_total and grad_under_eps carry it: "
            + ASK,
        ),
        ("ln_input", False, f"grad_norm_total carries it: {ASK}"),
        ("activation_grad_norm,grad_norm,parameter_norm", True, "activation_grad_norm carries it: give scaler="),
        ("grad_norm", True, ""),
    ],
)
def test_a_gradscaler_that_was_not_given_is_noticed_with_the_columns_that_carry_it(
    probes: str, unscale: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is named is what differs, by the scale, from a run that was told."""
    rows = {}
    for given in (False, True):
        torch.manual_seed(0)
        model, sink = Toy(), ListSink()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with Watcher(
            model, sink, probes=probes, every=1, optimizer=optimizer, scaler=scaler if given else None
        ) as watcher:
            for row in range(2):
                scaler.scale(loss_of(model, batch(row))).backward()
                if unscale or given:
                    scaler.unscale_(optimizer)
                watcher.step(loss=1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        rows[given] = sink.row(0)
    wrong = [name for name, value in rows[True][0].items() if rows[False][0][name] != pytest.approx(value)]
    for name, cells in rows[True][1].items():
        if not np.allclose(cells.values, rows[False][1][name].values, equal_nan=True):
            wrong.append(name)
    expected = [f"row 0: a GradScaler is in use, at 1024, and {said}."] if said else []
    assert [record.message for record in caplog.records] == expected
    named = said.split(" carr")[0].replace(" (gradient)", "").replace(" and ", ", ")
    assert sorted(wrong) == sorted(filter(None, named.split(", ")))


def test_an_optimizer_inside_backward_is_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Toy()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def now(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(now)
    sink = ListSink()
    with Watcher(model, sink, every=1) as watcher:
        loss_of(model, batch(0)).backward()
        watcher.step(loss=1.0)
    assert "since the optimizer steps inside it: give optimizer=None and probes='-grad_norm'" in caplog.text
    assert not sink.row(0)[1]["activation_grad_norm"].absent.any()


def measured(optimizer: Optimizer, parameters: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sum of g^2 / v of each parameter, right after the optimizer's step, by its definition."""
    sums = {}
    for name, p in parameters.items():
        state, group = optimizer.state[p], optimizer.param_groups[0]
        v = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state["step"]))
        assert p.grad is not None
        sums[name] = float((p.grad.double().square() / v.clamp(min=group["eps"] ** 2)).sum())
    return sums


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("rare", [False, True])
def test_each_adams_numbers_are_of_the_gradients_of_its_own_step(set_to_none: bool, rare: bool) -> None:
    torch.manual_seed(0)
    model, sink = Toy(), ListSink()
    parts = [
        dict(model.encoder.named_parameters(prefix="encoder")),
        dict(model.decoder.named_parameters(prefix="decoder")),
    ]
    optimizers = [torch.optim.AdamW(part.values(), lr=1e-3) for part in parts]
    rows: list[dict[str, float]] = []
    with Watcher(model, sink, probes="adam", every=1, optimizer=optimizers, strict=True) as watcher:
        for row in range(4):
            (3.0**row * loss_of(model, batch(row))).backward()
            watcher.step(loss=1.0)
            rows.append({})
            for optimizer, part in zip(optimizers, parts, strict=True):
                if not (rare and row % 2 == 0 and optimizer is optimizers[1]):
                    optimizer.step()
                    rows[-1] |= measured(optimizer, part)
                optimizer.zero_grad(set_to_none=set_to_none)  # before the other one steps
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for row, sums in enumerate(rows):
        found = {site: value for site, value in sink.column(row, "adam", "rms_t").items() if value == value}
        wanted = {}
        for place in sink.tables["adam"].rows:
            if own := [name for name in sums if name.startswith(f"{place.site}.")]:
                wanted[place.site] = (sum(sums[n] for n in own) / sum(sizes[n] for n in own)) ** 0.5
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_checkpoint_keeps_the_update_in_which_one_of_two_optimizers_steps() -> None:
    ratios = []
    for saves in (False, True):
        torch.manual_seed(0)
        model, sink = Toy(), ListSink()
        optimizers = two(model)
        with Watcher(model, sink, probes="update_ratio", every=1, optimizer=optimizers) as watcher:
            for row in range(3):
                loss_of(model, batch(row)).backward()
                watcher.step(loss=1.0)
                for optimizer in optimizers[: 1 + row % 2]:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                if saves:
                    watcher.state_dict()
        ratios.append([sink.column(row, "update_ratio", "rms") for row in range(3)])
    assert ratios[1] == ratios[0]
    assert max(ratios[0][0].values()) > 0
