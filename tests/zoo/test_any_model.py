"""Every default probe on models of other people, against an independent computation, in every kind of loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from animals import LAYERS, ZOO, born, fed
from oracle import Oracle, stack_of
from probe_toys import ListSink
from rest_slow import rest_slow
from torch import Tensor, nn

from stabilitylab.probes import Watcher, find_sites

UPDATES = 2
CASES = {
    "plain": {},
    "accumulate": {"parts": 2},
    "reentrant": {"recompute": True, "use_reentrant": True},
    "recompute": {"recompute": True, "use_reentrant": False},
    "frozen": {"frozen": True},
    "validation": {"validation": True},
    "scaler": {"scaled": True},
    "autocast": {"autocast": True, "dtype": torch.float32},
}
SOME = {*((name, "plain") for name in [*ZOO][::2]), *(("t5", case) for case in CASES)}
PAIRS = [(name, case) for name in ZOO for case in CASES if not ("recompute" in CASES[case] and name == "torch")]


class Loop:
    """A training loop of anybody's, with the options that a case asks for."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64, parts: int = 1, frozen: bool = False,
                 validation: bool = False, scaled: bool = False, autocast: bool = False, recompute: bool = False,
                 use_reentrant: bool = False) -> None:  # fmt: skip
        self.name, self.animal, self.parts = name, ZOO[name], parts
        self.validation, self.autocast = validation, autocast
        self.model = born(name, dtype)
        if recompute:
            enable = getattr(self.model, "activation_checkpointing_enable", None)  # its name since transformers 5
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
        if frozen:
            layer = self.animal.names(self.animal.layers)[0]
            self.model.get_submodule(layer).requires_grad_(False)
            for path, parameter in self.model.named_parameters():
                if any(part in path for part in ("embed", "shared", "wte", "wpe")):
                    parameter.requires_grad_(False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.batch: Mapping[str, Any] = {}
        self.held_out = fed(name, 1000, dtype)
        self.dtype = dtype
        torch.manual_seed(11)

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.animal.loss(self.model, batch)

    def masks(self) -> dict[str, Tensor] | None:
        return {stack_of(place): mask for place, mask in self.animal.masks(self.batch).items()} or None

    def reference(self) -> None:
        before, self.batch = self.batch, self.held_out
        self.loss(self.held_out)
        self.batch = before

    @contextmanager
    def micro_batch(self, batch: Mapping[str, Any]) -> Iterator[None]:
        yield

    def step(self, loss: Tensor) -> None:
        """Where a watcher comes in."""

    def run(self) -> None:
        for t in range(UPDATES):
            for part in range(self.parts):
                self.batch = fed(self.name, 10 * t + part, self.dtype)
                with self.micro_batch(self.batch):
                    loss = self.loss(self.batch) / self.parts
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                if self.validation:
                    self.model.eval()
                    with torch.no_grad():
                        self.loss(fed(self.name, 500, self.dtype))
                    self.model.train()
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.step(loss)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()


class OracleLoop(Loop):
    """Keeps for each row an :class:`Oracle`, the gradients' norms and the parameters."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[Oracle] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.parameters: list[dict[str, Tensor]] = []
        self.oracle = Oracle(self.model, self.name)

    @contextmanager
    def micro_batch(self, batch: Mapping[str, Any]) -> Iterator[None]:
        with self.oracle.listening(batch):
            yield

    def step(self, loss: Tensor) -> None:
        self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()})
        self.evaluate()

    def evaluate(self) -> None:
        self.parameters.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
        self.model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # it goes past the modules of nn.Transformer
        with torch.no_grad(), self.oracle.listening(self.held_out, evaluation=True):
            self.reference()
        torch.backends.mha.set_fastpath_enabled(True)
        self.model.train()
        self.rows.append(self.oracle)
        self.oracle = Oracle(self.model, self.name)


def watched(name: str, **options: Any) -> tuple[Loop, ListSink]:
    loop, sink = Loop(name, **options), ListSink()
    with Watcher(loop.model, sink, every=1, update_every=1, optimizer=loop.optimizer, scaler=loop.scaler,
                 mask=loop.masks, reference=loop.reference) as watcher:  # fmt: skip
        loop.step = lambda loss: watcher.step(loss=loss)
        loop.run()
    return loop, sink


def cells(sink: ListSink, step: int, table: str, column: str) -> dict[str, float]:
    spec = sink.tables[table]
    values = sink.row(step)[1][table].values[:, spec.columns.index(column)]
    return {row.site: float(value) for row, value in zip(spec.rows, values, strict=True)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # nn.Transformer's own, in the validation
@pytest.mark.parametrize(("name", "case"), rest_slow(PAIRS, SOME))
def test_tables_equal_an_independent_computation_and_training_is_unchanged(name: str, case: str) -> None:
    options = CASES[case]
    # recomputing and a loss scale of a power of 2 change no bit of what is right
    plainly = {key: value for key, value in options.items() if key not in ("recompute", "use_reentrant", "scaled")}
    loop, sink = watched(name, **options)
    oracle = OracleLoop(name, **plainly)
    oracle.run()
    oracle.evaluate()
    unwatched = Loop(name, **options)
    unwatched.run()
    for (key, one), two in zip(loop.model.state_dict().items(), unwatched.model.state_dict().values(), strict=True):
        assert torch.equal(one, two), f"watching changed {key}"

    near = {"rel": 1e-5, "abs": 1e-7} if case == "autocast" else {"rel": 1e-9, "abs": 1e-13}
    animal = ZOO[name]
    layers = animal.names(animal.layers)
    entries = [f"{stack_of(place)}.input" for place in animal.layers]
    for t in range(UPDATES):
        row = oracle.rows[t]
        norms = cells(sink, t, "ln_input", "value")
        assert norms == pytest.approx({n: row.mean("ln_input", n) for n in animal.names(animal.norms)}, **near)

        flowing = cells(sink, t, "activation_grad_norm", "value")
        known = {n for table, n in row.sums if table == "activation_grad_norm"}
        assert set(flowing) == {*layers, *entries}
        assert {n for n, value in flowing.items() if not np.isnan(value)} == known
        assert (
            (layers[0] in known)
            == (entries[0] in known or (name == "torch" and case != "frozen"))
            == (case != "frozen")
        )
        for place in known:
            assert flowing[place] == pytest.approx(row.norm("activation_grad_norm", place), **near)

        gradients = {n: p for n, p in oracle.gradients[t].items() if p is not None}
        recorded = cells(sink, t, "grad_norm", "value")
        exact: dict[str, list[Tensor]] = {place: [] for place in recorded}
        for parameter, gradient in gradients.items():  # in the row whose name is the longest that it begins with
            exact[max((p for p in exact if f"{parameter}.".startswith(f"{p}.")), key=len)].append(gradient)
        for place, value in recorded.items():
            squares = [float(gradient.double().square().sum()) for gradient in exact[place]]
            assert value == pytest.approx(sum(squares) ** 0.5, **near) if squares else np.isnan(value), place
    for t in range(UPDATES + 1):
        row = oracle.rows[t]
        similarity = cells(sink, t, "cosine_similarity", "raw")
        assert similarity == pytest.approx({n: row.mean("cosine_similarity", n) for n in layers}, **near)
        places = [n.lstrip("<=") for n in animal.names(animal.activations)]
        for column in ("nonzero_fraction", "active_fraction"):
            assert cells(sink, t, "activation_sparsity", column) == pytest.approx(
                {n: row.mean(column, n) for n in places}, rel=near["rel"], abs=2e-3 if case == "autocast" else 1e-12
            )


@pytest.mark.parametrize("name", ZOO)
def test_the_places_are_those_named_by_hand(name: str) -> None:
    sites, animal = find_sites(born(name)), ZOO[name]
    assert [site.name for site in sites.layers] == animal.names(animal.layers)
    assert {site.name for site in sites.norms} == set(animal.names(animal.norms))
    taken = {{"input": "<", "inner": "="}.get(site.take, "") + site.name for site in sites.activations}
    assert taken == set(animal.names(animal.activations))
    assert [site.name for site in sites.outputs] == list(animal.outputs)
    assert {stack.name: len(stack.layers) for stack in sites.stacks} == {stack_of(p): LAYERS for p in animal.layers}
