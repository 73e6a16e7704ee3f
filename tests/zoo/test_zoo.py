"""In every family and layout the places are those named by hand, three tables are those of plain hooks, training is
unchanged, and a place that is missing is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from convolutional import CONVOLUTIONAL
from decoders import DECODERS
from encoders import ENCODERS
from entries import Entry
from experts import EXPERTS
from handmade import HANDMADE
from known import KNOWN
from probe_toys import ListSink
from rest_slow import rest_slow
from translators import TRANSLATORS
from truth import Table, Truth, unfused

from stabilitylab.probes import Sites, Watcher, find_sites

ZOO: dict[str, Entry] = {**DECODERS, **ENCODERS, **EXPERTS, **TRANSLATORS, **HANDMADE, **CONVOLUTIONAL, **KNOWN}
KINDS = ("layers", "norms", "activations", "outputs", "attentions")
EACH = pytest.mark.parametrize("name", rest_slow(ZOO, [*ZOO][::3]))
SIGNS = {"input": "<", "inner": "=", "output": ""}
NEAR = {"rel": 1e-9, "abs": 1e-13, "nan_ok": True}


def test_there_are_enough_that_differ() -> None:
    assert len(ZOO) >= 45
    described = [(e.layers, e.norms, e.activations, e.outputs, e.attentions) for e in ZOO.values()]
    assert len({type(entry.born()).__name__ for entry in HANDMADE.values()}) == len(HANDMADE)
    assert len(set(described)) > 0.9 * len(described)  # BERT's layout is that of two


@cache
def watched(name: str) -> tuple[Sites, dict[str, Table], dict[str, torch.Tensor | None]]:
    entry, sink = ZOO[name], ListSink()
    model = entry.born()
    with unfused(), Watcher(model, sink, probes=entry.probes, every=1, update_every=1, strict=True,
                            reference=lambda: entry.loss(model)) as watcher:  # fmt: skip
        loss = entry.loss(model)
        loss.backward()
        watcher.step(loss=loss)
    tables = {"ln_input": "value", "activation_grad_norm": "value", "activation_sparsity": "nonzero_fraction"}
    found = {table: sink.column(0, table, column) for table, column in tables.items() if table in sink.tables}
    found["activation_grad_norm"] = {n: v for n, v in found["activation_grad_norm"].items() if not n.endswith("input")}
    return watcher.sites, found, {name: p.grad for name, p in model.named_parameters()}


@cache
def truth(name: str) -> Truth:
    with unfused():
        return Truth(ZOO[name])


def check_places(entry: Entry, sites: Sites) -> None:
    for kind in KINDS:
        wanted = getattr(entry, kind)
        if wanted is not None:
            found = [(SIGNS[s.take] if kind == "activations" else "") + s.name for s in getattr(sites, kind)]
            assert sorted(found) == sorted(entry.names(wanted)), kind
    assert len({stack.name for stack in sites.stacks}) == len(sites.stacks)


def check_tables(tables: Mapping[str, Table], known: Mapping[str, Table]) -> None:
    for name, table in known.items():
        assert dict(tables.get(name, {})) == pytest.approx(table, **NEAR), name


@EACH
def test_places_are_those_named_by_hand(name: str) -> None:
    check_places(ZOO[name], find_sites(ZOO[name].born()))


@EACH
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_three_tables_are_those_of_plain_hooks_and_training_is_unchanged(name: str) -> None:
    _, tables, gradients = watched(name)
    check_tables(tables, truth(name).tables)
    for parameter, own in truth(name).gradients.items():
        assert own is gradients[parameter] is None or torch.equal(own, gradients[parameter])


@EACH
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_place_less_is_noticed(name: str) -> None:
    entry, sites = ZOO[name], find_sites(ZOO[name].born())
    removed = 0
    for kind in KINDS:
        if getattr(entry, kind) is None:
            continue
        for site in getattr(sites, kind):
            rest = tuple(each for each in getattr(sites, kind) if each is not site)
            with pytest.raises(AssertionError, match=kind):
                check_places(entry, replace(sites, **{kind: rest}))
            removed += 1
    _, tables, _ = watched(name)
    for table, rows in truth(name).tables.items():
        for row in rows:
            less = {**tables, table: {n: v for n, v in tables[table].items() if n != row}}
            with pytest.raises(AssertionError, match=table):
                check_tables(less, truth(name).tables)
            removed += 1
    assert removed > 2
