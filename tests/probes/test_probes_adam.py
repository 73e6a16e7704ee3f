"""Adam's RMS_t, update rms and eps floor, against Adam written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of
from rest_slow import rest_slow
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.probes.library import adam

COLUMNS = ("rms_t", "update_rms", "eps_floor")
EPS, BETAS = 1e-4, (0.8, 0.95)
Make = Callable[[Any], torch.optim.Optimizer]


class Written:
    """Adam's moments of one parameter, in float64, as the paper writes them."""

    def __init__(self, like: Tensor, betas: tuple[float, float], eps: float, amsgrad: bool = False) -> None:
        self.m, self.v, self.largest = (torch.zeros_like(like, dtype=torch.float64) for _ in range(3))
        self.betas, self.eps, self.amsgrad, self.t = betas, eps, amsgrad, 0

    def update(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squares of g / max(sqrt v, eps) and of the update's direction, and which entries stand at the floor."""
        g, (b1, b2) = g.double(), self.betas
        self.t += 1
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g**2
        self.largest = torch.maximum(self.largest, self.v)
        m, v = self.m / (1 - b1**self.t), (self.largest if self.amsgrad else self.v) / (1 - b2**self.t)
        return g**2 / v.clamp(min=self.eps**2), (m / (v.sqrt() + self.eps)) ** 2, (v.sqrt() < 10 * self.eps).double()


def mean(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).mean().item()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    encoder = [p for name, p in model.named_parameters() if name.startswith("encoder")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("encoder")]
    return [{"params": encoder, "eps": 1e-2, "betas": (0.5, 0.9)}, {"params": rest}]


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "Adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "weight decay": (torch.optim.AdamW, {"weight_decay": 0.3}),
}


def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: int, clip: float = math.inf, accumulate: int = 1
) -> tuple[ListSink, list[dict[str, Tensor]]]:
    """The tables, and the gradients that each update used."""
    sink, gradients = ListSink(), []
    with Watcher(model, sink, probes="adam", every=1, optimizer=optimizer) as watcher:
        for t in range(updates):
            for part in range(accumulate):
                (3.0 ** (t % 3) * loss_of(model, batch(t * accumulate + part))).backward()
            watcher.step()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    return sink, gradients


def check(sink: ListSink, gradients: list[dict[str, Tensor]], written: Mapping[str, Written], rel: float) -> None:
    for t, row in enumerate(gradients):
        numbers = {name: written[name].update(gradient) for name, gradient in row.items()}
        expected: dict[str, dict[str, float]] = {column: {} for column in COLUMNS}
        for site in (row.site for row in sink.tables["adam"].rows):
            own = [numbers[name] for name in numbers if name.startswith(f"{site}.")]
            for place, column in enumerate(COLUMNS):
                value = mean([each[place] for each in own]) if own else math.nan
                expected[column][site] = value if column == "eps_floor" else value**0.5
        for column in COLUMNS:
            assert sink.column(t, "adam", column) == pytest.approx(expected[column], rel=rel, nan_ok=True)


@pytest.mark.parametrize("at_once", [adam.AT_ONCE, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", rest_slow(KINDS, {"AdamW", "amsgrad", "fused"}))
def test_every_kind_of_adam_with_groups_clipping_and_accumulation(
    kind: str, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "AT_ONCE", at_once)
    model = Toy().to(dtype)
    make, options = KINDS[kind]
    optimizer = make(groups(model), lr=1e-2, betas=BETAS, eps=EPS, **options)
    sink, gradients = watched(model, optimizer, 4, clip=0.5, accumulate=2)
    amsgrad = bool(options.get("amsgrad"))
    written = {
        name: Written(p, (0.5, 0.9), 1e-2, amsgrad) if name.startswith("encoder") else Written(p, BETAS, EPS, amsgrad)
        for name, p in model.named_parameters()
    }
    check(sink, gradients, written, 1e-9 if dtype is torch.float64 else 1e-4)
    floors = sink.column(2, "adam", "eps_floor")
    assert 0 < min(v for site, v in floors.items() if site.startswith("encoder")) <= 1
    assert min(floors.values()) < 1


def test_the_first_update_has_an_rms_of_one_and_a_jump_of_the_gradient_the_bound() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    sink, optimizer = ListSink(), torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-12)
    with Watcher(model, sink, probes="adam", every=1, optimizer=optimizer) as watcher:
        for scale in (1.0, 1e6):
            model.weight.grad = scale * torch.tensor([[1.0, -2.0, 3.0]] * 2, dtype=torch.float64)
            watcher.step()
            optimizer.step()
    first, second = ({c: next(iter(sink.column(t, "adam", c).values())) for c in COLUMNS} for t in (0, 1))
    assert first == pytest.approx({"rms_t": 1.0, "update_rms": 1.0, "eps_floor": 0.0})
    assert second["rms_t"] == pytest.approx(math.sqrt((1 - 0.999**2) / (1 - 0.999)), rel=1e-6)


def test_the_first_update_has_the_root_of_the_share_of_entries_with_a_gradient() -> None:
    table = nn.Embedding(8, 3)
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-2)
    sink = ListSink()
    with Watcher(table, sink, probes="adam", every=1, optimizer=optimizer) as watcher:
        table(torch.tensor([0, 5])).sum().backward()  # 2 of 8 rows
        watcher.step()
        optimizer.step()
    assert [*sink.column(0, "adam", "rms_t").values()] == pytest.approx([0.5])


def test_gradients_far_below_eps_stand_at_the_floor() -> None:
    model = nn.Linear(3, 2, bias=False)
    sink, optimizer = ListSink(), torch.optim.Adam(model.parameters(), eps=1e-8)
    with Watcher(model, sink, probes="adam", every=1, optimizer=optimizer) as watcher:
        model.weight.grad = torch.full((2, 3), 1e-12)
        watcher.step()
        optimizer.step()
    numbers = {c: next(iter(sink.column(0, "adam", c).values())) for c in COLUMNS}
    assert numbers == pytest.approx({"rms_t": 1e-4, "update_rms": 1e-4, "eps_floor": 1.0}, rel=1e-3)


def test_a_gradient_whose_square_underflows_stays_finite() -> None:
    model = nn.Linear(3, 2, bias=False)
    sink, optimizer = ListSink(), torch.optim.Adam(model.parameters(), eps=1e-8)
    with Watcher(model, sink, probes="adam", every=1, optimizer=optimizer) as watcher:
        model.weight.grad = torch.full((2, 3), 1e-30)
        watcher.step()
        optimizer.step()
    assert list(sink.column(0, "adam", "rms_t").values()) == pytest.approx([1e-22], rel=1e-5)


def test_frozen_parameters_do_not_count_and_rows_without_a_gradient_are_absent() -> None:
    model = Toy().double()
    model.decoder.requires_grad_(False)
    model.encoder.layers[0].self_attn.q.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], betas=BETAS, eps=EPS)
    sink, gradients = watched(model, optimizer, 2)
    check(sink, gradients, {n: Written(p, BETAS, EPS) for n, p in model.named_parameters()}, 1e-9)
    frozen = {row.site for row in sink.tables["adam"].rows if row.site.startswith("decoder")}
    assert sink.absent(1, "adam") == frozen


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_that_never_came_leaves_the_row_absent(fused: bool) -> None:
    """As when a loss scaler skips it: by the time that shows, the gradients are those of the next row."""
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    watcher = Watcher(model, sink, probes="adam", every=1, optimizer=optimizer)
    for t in range(3):
        loss_of(model, batch(t)).backward()
        watcher.step()
        if t != 1:
            optimizer.step()
            optimizer.zero_grad()
    watcher.finish()
    watcher.close()
    sites = {row.site for row in sink.tables["adam"].rows}
    assert [sink.absent(t, "adam") for t in range(3)] == [set(), sites, set()]


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_an_update_that_the_scaler_skips_leaves_the_row_absent(
    fused: bool, on_device: bool, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer steps all the same, and takes its count back. ``on_device``: counts compared as on a GPU."""
    if on_device:
        monkeypatch.setattr(adam, "is_on_host", lambda count: False)
    model, sink, gradients = Toy(), ListSink(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=BETAS, eps=EPS, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    overflows = False
    model.head.bias.register_hook(lambda gradient: gradient * torch.inf if overflows else gradient)
    with Watcher(model, sink, probes="adam", every=1, optimizer=optimizer, scaler=scaler) as watcher:
        for t in range(4):
            overflows = t == skipped
            scaler.scale(loss_of(model, batch(t))).backward()
            scaler.unscale_(optimizer)
            watcher.step()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert sink.absent(skipped, "adam") == {row.site for row in sink.tables["adam"].rows}
    assert watcher.incident is None
    written = {name: Written(p, BETAS, EPS) for name, p in model.named_parameters()}
    rows = [t for t in range(4) if t != skipped]
    sink.rows = [(rows.index(t), *row) for t, *row in sink.rows if t in rows]
    check(sink, [gradients[t] for t in rows], written, 1e-4)


def test_gradients_that_are_gone_when_the_update_ends_leave_the_row_absent() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    with Watcher(model, sink, probes="adam", optimizer=optimizer) as watcher:
        loss_of(model, batch()).backward()
        watcher.step()
        optimizer.step()
    assert sink.absent(0, "adam") == {row.site for row in sink.tables["adam"].rows}


class Wrapping(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_a_wrapped_adam_is_an_adam() -> None:
    model, sink = Toy(), ListSink()
    optimizer = Wrapping(torch.optim.AdamW(model.parameters()))
    with Watcher(model, sink, probes="adam", optimizer=optimizer) as watcher:
        loss_of(model, batch()).backward()
        watcher.step()
        optimizer.step()
    # every token embedding that did not occur has a gradient of 0, and g / max(sqrt v, eps) of it is 0
    assert sink.column(0, "adam", "rms_t")["encoder.layers.0.norm3"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adafactor,
    ],
    ids=["SGD", "Adamax", "Adagrad", "Adafactor"],
)
def test_other_optimizers_are_refused_by_name_and_go_without_it_else(make: Make) -> None:
    model = Toy()
    optimizer = make(model.parameters())
    sentence = f"needs an Adam or AdamW as optimizer=, not {type(optimizer).__name__}"
    with pytest.raises(UsageError, match=f"probe 'adam' {sentence}"):
        Watcher(model, ListSink(), probes="adam", optimizer=optimizer)
    watcher = Watcher(model, ListSink(), probes="all", optimizer=optimizer)
    assert ("adam", sentence) in watcher.dropped
    with pytest.raises(UsageError, match="probe 'adam' needs optimizer=, the optimizer"):
        Watcher(model, ListSink(), probes="adam")


def test_large_models_are_looked_at_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "AT_ONCE", 10)
    sizes = {0: 4, 1: 6, 2: 1, 4: 99, 5: 3, 6: 7}
    assert adam.parts([*sizes], [*(sizes.get(place, 0) for place in range(7))]) == [[0, 1], [2], [4], [5, 6]]
    assert adam.parts([], []) == [[]]


def test_reductions_do_not_grow_with_depth() -> None:
    from test_probes_operators import Calls

    def of_update(layers: int) -> int:
        model = Toy(layers)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        watcher = Watcher(model, ListSink(), probes="adam", every=1, optimizer=optimizer, total_every_step=False)
        for _ in range(2):
            loss_of(model, batch()).backward()
            watcher.step()
            with Calls() as calls:
                optimizer.step()
            optimizer.zero_grad()
        watcher.close()
        return calls.count

    assert of_update(6) - of_update(2) <= 2  # the optimizer's own operators take lists as well


class Filter(nn.Module):
    """Weights of frequencies: complex, or the same numbers as pairs of real ones."""

    def __init__(self, is_complex: bool, width: int = 6) -> None:
        super().__init__()
        pairs = torch.randn(width, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.is_complex = is_complex
        self.weight = nn.Parameter(torch.view_as_complex(pairs) if is_complex else pairs)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.is_complex else torch.view_as_complex(self.weight)
        passed = torch.fft.ifft(torch.fft.fft(x) * weight)
        return passed.real + 0.3 * passed.imag.square()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_complex_entry_counts_as_two_real_ones(amsgrad: bool) -> None:
    found = []
    for is_complex in (False, True):
        model, sink = Filter(is_complex), ListSink()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, betas=BETAS, amsgrad=amsgrad)
        with Watcher(model, sink, probes="adam", every=1, optimizer=optimizer, strict=True) as watcher:
            for t in range(4):
                x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
                (3.0**-t * model(x).pow(4).mean()).backward()
                watcher.step()
                optimizer.step()
                optimizer.zero_grad()
        found.append([sink.column(t, "adam", column)["weight"] for t in range(4) for column in COLUMNS])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
