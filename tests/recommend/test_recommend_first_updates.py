"""The first updates against a loop of PyTorch's own; the range test on losses whose end is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recommend_cases import CPU, config_of, dataset, model_of

from stabilitylab.config import Config, ProbesConfig
from stabilitylab.data import Batch
from stabilitylab.models import Transformer
from stabilitylab.recommend.columns import RATES, UPDATES
from stabilitylab.recommend.first_updates import (
    Kept,
    Ramp,
    at_the_floor,
    first_updates,
    growth,
    headroom,
    ramp,
    range_test,
    until_it_breaks,
)
from stabilitylab.schema import Cells, Row, Table


def cross_entropy(model: Transformer, batch: Batch, smoothing: float) -> torch.Tensor:
    counted = batch.weight > 0
    return F.cross_entropy(model(**batch.inputs)[counted], batch.labels[counted], label_smoothing=smoothing)


def trained(config: Config, rates: list[float]) -> Iterator[float]:
    """The held-out loss before each update and after the last."""
    model = model_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=1e-4)
    for row, rate in enumerate([*rates, None]):
        model.set_row(row)
        model.eval()
        with torch.no_grad():
            yield float(cross_entropy(model, dataset().held_out, 0.0))
        if rate is None:
            return
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate
        cross_entropy(model, dataset().micro_batch(row), 0.1).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("arch", "warmup"), [("preln", 40), ("branchnorm", 4000), ("tfixup", 0)])
def test_the_first_updates_are_those_of_the_recipe_with_a_warm_up_within_them(arch: str, warmup: int) -> None:
    config = config_of(arch, train={"warmup": warmup})
    numbers, evidence = first_updates(config, dataset(), CPU, has_norms=arch != "tfixup")
    own = [1e-7 + (1e-3 - 1e-7) * row / UPDATES if warmup else 1e-3 for row in range(UPDATES)]
    losses = [*trained(config, own)]
    assert evidence["held_out_nll"] == pytest.approx([losses[0], losses[-1]], rel=1e-4)
    assert numbers["progress"] == pytest.approx((losses[0] - losses[-1]) / UPDATES, rel=1e-3)
    assert evidence["finite_losses"]
    assert numbers["parameters"] == sum(p.numel() for p in model_of(config).parameters())
    assert numbers["seconds"] > 0


def test_growth_is_that_of_the_norms_of_the_model_at_hand() -> None:
    numbers, _ = first_updates(config_of("preln"), dataset(), CPU, has_norms=True)
    model, batch = model_of(config_of("preln")), dataset().micro_batch(0)
    entering: dict[str, float] = {}

    def hear(name: str, x: torch.Tensor) -> None:
        side = "source_mask" if name.startswith("encoder") else "target_mask"
        entering[name] = float(x[batch.inputs[side]].norm(dim=-1).mean())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm) and ".layers." in name:
            module.register_forward_pre_hook(lambda _m, args, name=name: hear(name, args[0]))
    with torch.no_grad():
        model(**batch.inputs)
    decades = []
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        first, last = (
            np.mean([x for name, x in entering.items() if name.startswith(f"{stack}.layers.{layer}.")])
            for layer in (0, layers - 1)
        )
        decades.append(math.log10(last / first))
    assert numbers["growth_start"] == pytest.approx(max(decades), rel=1e-5)


def test_growth_takes_norms_on_the_stream_else_the_stream_itself() -> None:
    def table(name: str, columns: tuple[str, ...], *rows: tuple[int, tuple[float, ...]]) -> tuple[Table, Cells]:
        places = tuple(Row(f"{n}", "encoder", layer, "ffn") for n, (layer, _) in enumerate(rows))
        return Table(name, columns, places), Cells(np.array([v for _, v in rows]), np.zeros(len(rows), dtype=bool))

    nan = math.nan
    inputs = table(
        *("ln_input", ("value", "shortcut")),
        *((1, (1.0, 1.0)), (1, (500.0, nan)), (2, (90.0, 1.0)), (2, (110.0, 1.0)), (0, (1e6, nan))),
    )
    stream = table("residual_norm", ("value", "variance"), (0, (3.0, 0.0)), (1, (2.0, 0.0)), (2, (20.0, 0.0)))
    inner = table("ln_input", ("value", "shortcut"), (1, (1.0, nan)), (2, (5.0, nan)))
    assert growth({"ln_input": inputs, "residual_norm": stream}) == pytest.approx({"encoder": 2.0})
    assert growth({"ln_input": inner, "residual_norm": stream}) == pytest.approx({"encoder": 1.0})
    assert growth({"residual_norm": stream}) == pytest.approx({"encoder": 1.0})
    dead = table("residual_norm", ("value",), (1, (1.0,)), (2, (math.inf,)))
    assert math.isnan(growth({"residual_norm": dead})["encoder"])


def test_layers_at_adams_floor_are_named_with_their_largest_share() -> None:
    rows = [("encoder", 1, 0.5), ("encoder", 1, 0.51), ("encoder", 2, 0.2), ("decoder", 1, 1.0), ("decoder", 0, 1.0)]
    places = tuple(Row(str(n), stack, layer, "ffn") for n, (stack, layer, _) in enumerate(rows))
    values = np.array([[9.0, share] for *_, share in rows])
    table = Table("adam", ("rms_t", "eps_floor"), places), Cells(values, np.zeros(len(rows), dtype=bool))
    assert at_the_floor(table) == {"encoder 1": 0.51, "decoder 1": 1.0}


def descent(breaking: float) -> Iterator[float]:
    """Half a square under noisy gradient descent that diverges above the rate ``breaking``: each update multiplies it
    by (1 - 2 rate / breaking)^2, and noise keeps it at 0.2 at least."""
    loss = 3.0
    for row in itertools.count():
        yield loss
        loss = max(loss * (1 - 2 * ramp(row) / breaking) ** 2, 0.2)


@pytest.mark.parametrize("breaking", [1.0, 20.0, 300.0])
def test_headroom_of_gradient_descent_is_the_rate_at_which_it_diverges(breaking: float) -> None:
    losses, broke = until_it_breaks(itertools.islice(descent(breaking), RATES + 1))
    assert broke
    assert breaking < headroom(losses) < breaking * 10**0.35  # from .2 it takes a few rates to rise by .5


def test_a_range_test_ends_at_the_first_rise_and_names_the_rate_that_led_to_it() -> None:
    losses, broke = until_it_breaks([5.0, 4.0, 4.4, 4.49, 4.51, 1.0])
    assert (losses, broke) == ([5.0, 4.0, 4.4, 4.49, 4.51], True)
    assert headroom(losses) == ramp(3) == pytest.approx(10**0.3 / 30)
    assert until_it_breaks([5.0, math.nan, 1.0]) == (pytest.approx([5.0, math.nan], nan_ok=True), True)
    losses, broke = until_it_breaks([5.0] * (RATES + 1))
    assert not broke
    assert headroom(losses) == ramp(RATES - 1) == pytest.approx(10**4.4 / 30)


def test_the_range_test_trains_at_its_rates_and_reads_the_loss_after_each() -> None:
    config = config_of("preln")
    run = Kept()
    trainer = Ramp(config.model_copy(update={"probes": ProbesConfig(names=("none",))}), dataset(), run, CPU)
    for _ in range(11):
        trainer.update()
        trainer.row += 1
    trainer.watcher.flush()
    trainer.watcher.close()
    rates = [run.rows[row][0]["lr"] for row in range(11)]
    assert rates[0] == pytest.approx(1e-3 / 30)
    assert rates[10] == pytest.approx(10 * 1e-3 / 30)

    numbers, evidence = range_test(config, dataset(), CPU)
    seen = evidence["range_test"]
    expected = [*trained(config, [1e-3 * ramp(row) for row in range(len(seen) - 1)])]
    assert seen[:20] == pytest.approx(expected[:20], rel=1e-4)
    assert seen[20:] == pytest.approx(expected[20:], rel=0.2)  # at such rates float32 sums in another order part
    assert numbers["headroom"] == pytest.approx(ramp(len(seen) - 2))
    assert evidence["headroom_broke"] == (seen[-1] > min(seen) + 0.5)
