"""All probes on all architectures: watching changes no bit, every branch is found, added norms count as norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from rest_slow import SOME_ARCHS, rest_slow, slow
from torch import Tensor, nn

from stabilitylab.models import ARCHS, Transformer, build_model
from stabilitylab.probes import Watcher, find_sites
from stabilitylab.probes.parameters.pieces import Parameters

REAL = {
    "encoder": torch.arange(7) < torch.tensor([[7], [5], [6]]),
    "decoder": torch.arange(5) < torch.tensor([[5], [4], [3]]),
}
NO_NORM = ("rezero", "rfixup", "tfixup")


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randint(0, 29, (3, length), generator=draw) for length in (7, 5))
    return {"source": source, "target": target, "source_mask": REAL["encoder"], "target_mask": REAL["decoder"]}


def built(arch: str, **settings) -> Transformer:
    sizes = {"d_model": 16, "d_ffn": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    model = build_model(arch=arch, source_vocab=31, target_vocab=29, **(sizes | settings))
    model.calibrate(**inputs())
    return model


def trained(model: nn.Module, sink: ListSink | None) -> list[Tensor]:
    batch, optimizer = inputs(), torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"mask": REAL, "optimizer": optimizer, "reference": lambda: model(**batch), "every": 1, "update_every": 1}
    watcher = Watcher(model, sink, probes="all", **options) if sink else None
    for _ in range(2):
        F.cross_entropy(model(**batch).flatten(0, 1), batch["target"].flatten()).backward()
        if watcher:
            watcher.step()
        optimizer.step()
        optimizer.zero_grad()
    if watcher:
        watcher.flush()
    return list(model.parameters())


SWITCHED = {"qk_norm": True, "norm": "rmsnorm", "value_residual": "learned"}


@pytest.mark.parametrize("switches", [{}, slow(SWITCHED)], ids=["plain", "switched"])
@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), SOME_ARCHS | {"mhc", "attnres", "siamese-norm"}))
def test_a_watched_model_trains_bit_for_bit_and_fills_every_table(arch, switches) -> None:
    if arch.startswith("hybridnorm"):  # they have a norm of queries and keys of their own
        switches = {key: value for key, value in switches.items() if key != "qk_norm"}
    sink = ListSink()
    watched, alone = trained(built(arch, **switches), sink), trained(built(arch, **switches), None)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    norms = set() if arch in NO_NORM else {"ln_input", "ln_gain"}
    for table in {"grad_norm", "branch_variance", "residual_norm", "activation_sparsity", "attention"} | norms:
        assert sink.tables[table].rows
    branches = [(row.stack, row.layer, row.sublayer) for row in sink.tables["branch_variance"].rows]
    both = [(stack, layer) for stack in ("encoder", "decoder") for layer in (1, 2)]
    parts = {"encoder": ("self_attn", "ffn"), "decoder": ("self_attn", "cross_attn", "ffn")}
    assert branches == [(stack, layer, part) for stack, layer in both for part in parts[stack]]


def test_a_value_residual_of_weights_0_and_1_changes_no_number_of_any_table() -> None:
    plain, mixed = ListSink(), ListSink()
    trained(built("preln"), plain)
    trained(built("preln", value_residual="fixed", value_weights=(0.0, 1.0)), mixed)
    assert plain.tables.keys() == mixed.tables.keys()
    for step, metrics, tables in plain.rows:
        found, own = mixed.row(step)
        assert metrics == pytest.approx(found, rel=0, abs=0, nan_ok=True)
        for name, cells in tables.items():
            np.testing.assert_array_equal(cells.values, own[name].values, err_msg=name)


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_each_norm_is_in_the_group_of_norms_and_nothing_else_is(arch) -> None:
    model = built(arch, qk_norm=not arch.startswith("hybridnorm"))
    parameters = Parameters(model, find_sites(model).place)
    names = [name for name, _ in model.named_parameters()]
    found = {names[piece.index] for piece in parameters.pieces if piece.group == "ln"}
    inside = {id(p) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for p in m.parameters()}
    expected = {name for name, p in model.named_parameters() if id(p) in inside or ".qk_norm." in name}
    assert found == expected
