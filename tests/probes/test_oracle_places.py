"""Whose numbers they are: every place of the real model once, under its own name, and no number from padding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from oracles import CASES, UPDATES, Place, Run, run_of, watched_run
from rest_slow import rest_slow
from torch import nn

from stabilitylab.models import Transformer
from stabilitylab.schema import Row

PROBES = {
    *("grad_norm", "activation_grad_norm", "ln_input", "cosine_similarity"),
    *("activation_sparsity", "model_update", "update_ratio", "branch_variance", "attention", "adam", "outliers"),
    *("ln_gain", "residual_norm", "logits", "rank", "layer_branch", "output_norm", "attention_heads"),
}
REFERENCE = {
    *("cosine_similarity", "activation_sparsity", "model_update", "branch_variance"),
    *("attention", "outliers", "logits", "rank", "layer_branch", "output_norm"),
}
OF_PARAMETERS = {"grad_norm", "update_ratio", "adam"}
ALL = pytest.mark.parametrize("case", rest_slow(CASES, ["preln-branchnorm", "encoder-preln", "dropout"]))


def stacks(case: str) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """Stack -> its number of layers, its architecture and the names of a layer's sub-layers."""
    settings = CASES[case]
    n, m, arch = settings["encoder_layers"], settings["decoder_layers"], settings["arch"]
    both = {
        "encoder": (n, arch, ("self_attn", "ffn")),
        "decoder": (m, settings.get("decoder_arch", arch), ("self_attn", *(("cross_attn",) if n else ()), "ffn")),
    }
    return {stack: what for stack, what in both.items() if what[0]}


def places(case: str, table: str) -> list[Place]:
    expected: list[Place] = []
    for stack, (layers, arch, sublayers) in stacks(case).items():
        final_norm = [(stack, 0, "norm")] if arch == "preln" else []
        each = [(stack, number, sublayer) for number in range(1, layers + 1) for sublayer in sublayers]
        embedding = [(stack, 0, "embedding")]
        if CASES[case].get("tie") == "all" and stack == "encoder":
            embedding = []  # it is the decoder's
        expected += {
            "grad_norm": [*each, *final_norm, *embedding],
            "update_ratio": [*each, *final_norm, *embedding],
            "adam": [*each, *final_norm, *embedding],
            "activation_grad_norm": [(stack, 0, "input"), *each],
            "ln_input": [*each, *final_norm],
            "cosine_similarity": [(stack, number, "") for number in range(1, layers + 1)],
            "activation_sparsity": [place for place in each if place[2] == "ffn"],
            "model_update": [(stack, 0, "output")],
            "branch_variance": each,
            "attention": [place for place in each if place[2] != "ffn"],
            "attention_heads": [
                (stack, number, sublayer + head)
                for _, number, sublayer in each
                for head in ("", ".head_0", ".head_1")
                if sublayer != "ffn"
            ],
            "outliers": [
                *((stack, n, "") for n in range(1, layers + 1)),
                *(place for place in each if place[2] == "ffn"),
            ],
            "ln_gain": [*each, *final_norm],
            "residual_norm": [(stack, 0, "input"), *each],
            "logits": [],
            "rank": [(stack, number, "") for number in range(1, layers + 1)],
            "layer_branch": [(stack, number, "") for number in range(1, layers + 1)],
            "output_norm": [(stack, 0, "output")],
        }[table]
    if table == "logits":
        expected.append((list(stacks(case))[-1], 0, "output"))
    if table in OF_PARAMETERS and CASES[case].get("tie") == "none":
        expected.append(("", 0, "output"))
    return expected


@ALL
def test_each_place_has_one_row_in_each_table_where_it_belongs(case: str) -> None:
    run = run_of(case, torch.float32 if case != "dropout" else torch.float64)
    assert set(run.tables) == PROBES
    for table in PROBES:
        assert Counter(run.places(table)) == Counter(places(case, table))
        assert len({row.site for row in run.tables[table].rows}) == len(run.tables[table].rows)


def module_of(model: Transformer, table: str, row: Row) -> nn.Module:
    stack = model.stacks[row.stack]
    if not row.layer:
        if table == "logits":
            return model.output
        return stack if row.sublayer == "output" else stack.get_submodule(row.sublayer)
    layer = stack.layers[row.layer - 1]
    inside = {"ln_input": ".norm", "ln_gain": ".norm", "activation_sparsity": ".f.activation", "attention": ".f"}
    inside["attention_heads"] = ".f"
    if table == "outliers" and row.sublayer:
        return layer.get_submodule("ffn.f.activation")
    return layer.get_submodule(row.sublayer.partition(".head_")[0] + inside.get(table, ""))


@ALL
def test_the_site_of_a_row_is_the_module_that_its_labels_name(case: str) -> None:
    run = run_of(case, torch.float64)
    for table in PROBES - OF_PARAMETERS:
        for row in run.tables[table].rows:
            if row.sublayer == "input":
                assert row.site == f"{row.stack}.input"
            else:
                assert run.twins[0].get_submodule(row.site.partition(".head_")[0]) is module_of(
                    run.twins[0], table, row
                )
    for row in (row for table in OF_PARAMETERS for row in run.tables[table].rows):
        number = [str(row.layer)] if row.layer else []
        assert row.site == ".".join(part for part in [row.stack, *number, row.sublayer] if part)


@ALL
def test_each_row_of_a_run_holds_the_tables_that_it_should(case: str) -> None:
    run = run_of(case, torch.float64)
    assert run.closed
    assert list(run.rows) == list(range(UPDATES + 1))
    for t, (_, tables) in run.rows.items():
        assert set(tables) == (PROBES if t < UPDATES else REFERENCE)
        assert not any(cells.absent.any() for cells in tables.values())


def same(a: Run, b: Run, rows: list[int], tables: set[str]) -> bool:
    """Equal tables at these rows, bit for bit."""
    pairs = [(a.rows[t][1].get(table), b.rows[t][1].get(table)) for t in rows for table in sorted(tables)]
    return all(x is not None and y is not None and np.array_equal(x.values, y.values, equal_nan=True) for x, y in pairs)


@ALL
def test_token_ids_on_padding_change_no_number(case: str) -> None:
    dtype = torch.float64 if case == "dropout" else torch.float32
    run, other = run_of(case, dtype), watched_run(case, dtype, junk=1)
    for one, two in zip(run.held_out, other.held_out, strict=True):
        assert not all(torch.equal(one.inputs[name], two.inputs[name]) for name in one.inputs)
    assert same(run, other, [0, 1, 2], PROBES)
    assert same(run, other, [3], REFERENCE)
    assert {t: metrics for t, (metrics, _) in run.rows.items()} == {t: row[0] for t, row in other.rows.items()}


def test_without_masks_they_do() -> None:
    one, two = (watched_run("postln", torch.float32, junk=junk, masked=False) for junk in (0, 1))
    for table in ("ln_input", *REFERENCE):
        assert not same(one, two, [1], {table})
    assert same(one, two, [0, 1, 2], OF_PARAMETERS | {"activation_grad_norm", "ln_gain"})  # the loss has its own


def test_rows_that_are_probed_now_and_then_hold_the_numbers_of_those_that_always_are() -> None:
    always, sometimes = (
        run_of("branchnorm", torch.float32),
        watched_run("branchnorm", torch.float32, every=2, update_every=3),
    )
    assert same(always, sometimes, [0, 2], PROBES - REFERENCE)
    assert same(always, sometimes, [0, 3], REFERENCE)
    assert not sometimes.rows[1][1]
    for t in range(UPDATES):
        assert sometimes.rows[t][0]["grad_norm_total"] == pytest.approx(always.rows[t][0]["grad_norm_total"], rel=1e-6)
