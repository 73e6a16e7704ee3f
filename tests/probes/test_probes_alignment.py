"""The cosines of the gradient with the weight and with Adam's first moment, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, train

from stabilitylab.probes import Watcher
from stabilitylab.probes.parameters import squares

Arrays = dict[str, np.ndarray]


def cosine(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    a, b = (np.concatenate([pair[side].ravel() for pair in pairs]).astype(np.float64) for side in (0, 1))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def watched(model: Toy, optimizer: torch.optim.Optimizer, steps: int = 3) -> tuple[ListSink, list[dict[str, Arrays]]]:
    """What was recorded, and at each step the gradients, the weights and the moments before the update."""
    sink, held = ListSink(), []
    with Watcher(
        model, sink, probes="gradient_alignment", every=1, optimizer=optimizer, reference=None, strict=True
    ) as watcher:
        for t in range(steps):
            for part in range(2):
                loss_of(model, batch(2 * t + part)).backward()
            known = dict(model.named_parameters())
            moments = {n: optimizer.state[p]["exp_avg"] for n, p in known.items() if "exp_avg" in optimizer.state[p]}
            arrays = (
                {n: p.grad for n, p in known.items() if p.grad is not None}, {n: p.detach() for n, p in known.items()},
                moments,
            )  # fmt: skip
            names = ("gradient", "weight", "moment")
            held.append(
                {k: {n: v.numpy().copy() for n, v in own.items()} for k, own in zip(names, arrays, strict=True)}
            )
            watcher.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
    return sink, held


@pytest.mark.parametrize("dotted", [squares.DOTTED, 5])
def test_both_cosines_of_every_place(dotted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with products a few entries at a time."""
    monkeypatch.setattr(squares, "DOTTED", dotted)
    model = Toy()
    model.head.requires_grad_(False)
    sink, held = watched(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    rows = [row.site for row in sink.tables["gradient_alignment"].rows]
    assert sink.tables["gradient_alignment"].columns == ("weight", "moment")
    for step, arrays in enumerate(held):
        for column, other in (("weight", arrays["weight"]), ("moment", arrays["moment"])):
            found = sink.column(step, "gradient_alignment", column)
            for site in rows:
                names = [name for name in arrays["gradient"] if name.startswith(f"{site}.") and name in other]
                if names:
                    expected = cosine([(arrays["gradient"][name], other[name]) for name in names])
                    assert found[site] == pytest.approx(expected, rel=1e-9, abs=1e-12), (step, column, site)
                else:
                    assert np.isnan(found[site]), (step, column, site)
    cells = sink.row(0)[1]["gradient_alignment"]
    assert cells.missing is not None
    frozen = np.array([site == "head" for site in rows])
    assert cells.absent.tolist() == frozen.tolist()
    assert cells.missing[:, 1].all()  # no moment before the first update
    later = sink.row(1)[1]["gradient_alignment"]
    assert later.missing is not None
    assert later.missing.all(1).tolist() == frozen.tolist()


def test_a_gradient_that_repeats_itself_has_a_moment_of_cosine_1() -> None:
    """And its negative -1; a weight along the gradient has its sign."""
    line = torch.nn.Linear(3, 1, bias=False)
    direction = torch.tensor([[1.0, -2.0, 0.5]])
    with torch.no_grad():
        line.weight.copy_(-3 * direction)
    optimizer, sink = torch.optim.Adam(line.parameters(), lr=0.0), ListSink()
    with Watcher(line, sink, probes="gradient_alignment", every=1, optimizer=optimizer, reference=None) as watcher:
        for sign in (1, 1, -1):
            optimizer.zero_grad()
            (line(direction) * sign).sum().backward()
            watcher.step()
            optimizer.step()
    moments = [sink.row(step)[1]["gradient_alignment"].values[0, 1] for step in range(3)]
    weights = [sink.row(step)[1]["gradient_alignment"].values[0, 0] for step in range(3)]
    assert weights == pytest.approx([-1, -1, 1])
    assert moments[1:] == pytest.approx([1, -1])


def test_without_adam_there_is_no_moment_and_a_sparse_gradient_counts() -> None:
    model = Toy()
    model.embed_source = torch.nn.Embedding(23, 8, sparse=True)
    sink, optimizer = ListSink(), torch.optim.SGD(model.parameters(), lr=0.1)
    with Watcher(model, sink, probes="gradient_alignment", every=1, optimizer=optimizer, reference=None) as watcher:
        loss_of(model, batch()).backward()
        weight = model.embed_source.weight
        assert weight.grad is not None
        assert weight.grad.is_sparse
        expected = cosine([(weight.grad.to_dense().numpy(), weight.detach().numpy())])
        watcher.step()
    assert sink.tables["gradient_alignment"].columns == ("weight",)
    assert sink.column(0, "gradient_alignment", "weight")["embed_source"] == pytest.approx(expected, rel=1e-9)


def test_a_watched_run_equals_an_unwatched_one() -> None:
    model, sink = Toy(dropout=0.2), ListSink()

    def watch(optimizer: torch.optim.Optimizer) -> Watcher:
        return Watcher(model, sink, probes="gradient_alignment", every=1, optimizer=optimizer, strict=True)

    seen: dict[str, Any] = train(model, 3, watch, accumulate=2)
    bare = train(Toy(dropout=0.2), 3, accumulate=2)
    assert all(map(torch.equal, seen["parameters"], bare["parameters"]))
    assert torch.equal(seen["rng"], bare["rng"])
