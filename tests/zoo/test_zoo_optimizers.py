"""Families of the zoo with Muon for their matrices and AdamW for the rest, Muon stepping every second update."""

from __future__ import annotations

import pytest
import torch
from decoders import DECODERS
from entries import Entry
from experts import EXPERTS
from handmade import HANDMADE
from probe_toys import ListSink
from torch import Tensor
from translators import TRANSLATORS

from stabilitylab.probes import Watcher

FAMILIES = {
    "gemma2": DECODERS["gemma2: sandwich"],
    "whisper": TRANSLATORS["whisper: sound to text"],
    "qwen2-moe": EXPERTS["qwen2-moe: routed beside a shared expert"],
    "a tied head": HANDMADE["a tied head"],
}


def trained(entry: Entry, sink: ListSink | None) -> list[dict[str, Tensor]]:
    """The parameters at each row, and after the last."""
    model = entry.born()
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
    watcher = None
    if sink is not None:
        watcher = Watcher(model, sink, probes="update_ratio,grad_norm", every=1, optimizer=optimizers, strict=True)
    rows = []
    for row in range(3):
        rows.append({name: p.detach().clone() for name, p in model.named_parameters()})
        entry.loss(model).backward()
        if watcher is not None:
            watcher.step()
        for optimizer in optimizers[row % 2 :]:
            optimizer.step()
        model.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    return [*rows, {name: p.detach().clone() for name, p in model.named_parameters()}]


@pytest.mark.parametrize("name", FAMILIES)
def test_updates_of_both_are_right_and_training_is_unchanged(name: str) -> None:
    sink = ListSink()
    rows, plain = trained(FAMILIES[name], sink), trained(FAMILIES[name], None)
    assert all(torch.equal(one, plain[-1][key]) for key, one in rows[-1].items())
    for row in range(3):
        ratios = sink.column(row, "update_ratio", "value")
        own: dict[str, list[str]] = {site: [] for site in ratios}
        for parameter in rows[0]:  # in the row whose name is the longest that it begins with
            own[max((s for s in own if f"{parameter}.".startswith(f"{s}.") or not s), key=len)].append(parameter)
        for site, parameters in own.items():
            moved = sum(float((rows[row + 1][n] - rows[row][n]).square().sum()) for n in parameters)
            held = sum(float(rows[row][n].square().sum()) for n in parameters)
            nothing = float("inf") if moved else float("nan")  # Gemma's norms begin at 0
            assert ratios[site] == pytest.approx((moved / held) ** 0.5 if held else nothing, rel=1e-9, nan_ok=True)
    still = {s: v for s, v in sink.column(1, "update_ratio", "value").items() if v == 0}
    assert set(still) <= set(sink.column(0, "update_ratio", "value"))
