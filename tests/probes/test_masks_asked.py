"""A function ``mask=`` is asked once a forward pass, and the first batch keeps the mask of its own pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import Probe, Site, Watcher, probe
from stabilitylab.probes.places import layers

WIDTH, TOKENS, ROWS = 6, 5, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if fails:
            raise MemoryError
        return x


def data(seed: int) -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def first_tokens(number: int) -> Tensor:
    """A mask (B, T) that is True on the first tokens of each row."""
    return (torch.arange(TOKENS) < number).expand(ROWS, TOKENS)


def norm_of_input(seed: int, mask: Tensor) -> float:
    return float(data(seed).norm(dim=-1)[mask].mean())


class Asked:
    """Hands out one mask a call: that of the first token, of the first two, and so on."""

    def __init__(self) -> None:
        self.masks: Iterator[Tensor] = map(first_tokens, range(1, TOKENS + 1))
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return next(self.masks)


@pytest.mark.parametrize("reference", [None, "first batch"])
@pytest.mark.parametrize("parts", [1, 2])
def test_each_forward_has_the_mask_that_was_meant_for_it(reference: str | None, parts: int) -> None:
    model, sink, asked = Net().double(), ListSink(), Asked()
    options = {
        "probes": "ln_input,output_norm" if reference else "ln_input",
        "every": 1,
        "reference": reference,
        "mask": asked,
    }
    with Watcher(model, sink, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **options) as watcher:
        for t in range(2):
            for part in range(parts):
                model(data(t * parts + part)).square().mean().backward()
            watcher.step()
            assert asked.calls == (t + 1) * parts
            watcher._watched.optimizers[0].step()
            model.zero_grad()
    masks = [first_tokens(number) for number in range(1, 2 * parts + 1)]
    for t in range(2):
        own = range(t * parts, (t + 1) * parts)
        tokens = [int(masks[at].sum()) for at in own]
        sums = [norm_of_input(at, masks[at]) * count for at, count in zip(own, tokens, strict=True)]
        found = sink.column(t, "ln_input", "value")["layers.0.0"]
        assert found == pytest.approx(sum(sums) / sum(tokens), rel=1e-9)


@pytest.mark.parametrize("every", [1, 5])
def test_the_first_batch_keeps_the_mask_of_its_own_pass(every: int) -> None:
    """The first forward raises, after the probes have asked for its mask: that of the second is kept. With every=5 no
    probe looks at the pass of row 1, which is the first that ends."""
    model, sink, calls = Net().double(), ListSink(), []
    masks = {0: first_tokens(1), 1: first_tokens(3)}

    def mask() -> Tensor:
        calls.append(len(calls))
        return masks[coming]

    options = {"probes": "ln_input,output_norm", "every": every, "update_every": 1, "mask": mask}
    with Watcher(model, sink, reference="first batch", **options) as watcher:
        coming = 0
        with pytest.raises(MemoryError):
            model(data(0), fails=True)
        if every > 1:
            watcher.step()  # the row of the pass that failed
        asked, coming = len(calls), 1
        model(data(1)).square().mean().backward()
        assert len(calls) == asked + 1
        watcher.step()
    with torch.no_grad():
        wanted = float(model(data(1)).norm(dim=-1)[masks[1]].mean())
    found = sink.column(0 if every == 1 else 1, "output_norm", "value")
    assert list(found.values()) == pytest.approx([wanted], rel=1e-9)


@pytest.mark.usefixtures("scratch")
def test_gradients_of_two_forwards_and_one_backward_have_the_mask_of_their_forward() -> None:
    @probe("token_gradient", on="backward", at=layers, unit="L2 norm")
    class TokenGradient(Probe):
        """The gradient norm of each token."""

        def measure(self, site: Site, x: Any, y: Tensor, weight: Tensor) -> Tensor:
            return y.norm(dim=-1)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).double()
    real = [torch.tensor([[True, True, False], [True, False, False]]), torch.tensor([[False, False, True]] * 2)]
    asked, sink = iter(real), ListSink()
    with Watcher(model, sink, probes="token_gradient", mask=lambda: next(asked)) as watcher:
        first, second = (model(torch.randn(2, 3, 4, dtype=torch.float64)) for _ in range(2))
        first.retain_grad()
        second.retain_grad()
        (first * second).square().sum().backward()  # as a contrastive loss of two views
        watcher.step()
    norms = [y.grad.norm(dim=-1)[mask] for y, mask in zip((first, second), real, strict=True)]
    assert sink.column(0, "token_gradient", "value")["1"] == pytest.approx(torch.cat(norms).mean().item(), rel=1e-9)


def watched_with_reference(rows: int = 3, **options: Any) -> tuple[ListSink, Watcher, Net]:
    """Each update's batch has a mask of its own; the reference runs another batch, whose mask has four tokens."""
    model, sink, coming = Net().double(), ListSink(), 0
    every = [first_tokens(1 + t) for t in range(rows)]
    given: dict[str, Any] = {"mask": lambda: every[coming], "reference": lambda: model(data(9)), **options}
    watcher = Watcher(model, sink, probes="ln_input,output_norm", every=1, update_every=1, **given)
    with watcher:
        for coming in range(rows):
            model(data(coming)).square().mean().backward()
            watcher.step()
            model.zero_grad()
    return sink, watcher, model


@pytest.mark.parametrize("called", [False, True])
def test_the_reference_pass_has_a_mask_of_its_own(called: bool) -> None:
    own = first_tokens(4)
    sink, watcher, model = watched_with_reference(reference_mask=(lambda: own) if called else own)
    with torch.no_grad():
        wanted = float(model(data(9)).norm(dim=-1)[own].mean())
    for t in range(3):
        found = sink.column(t, "output_norm", "value")
        assert list(found.values()) == pytest.approx([wanted], rel=1e-9)
        entered = sink.column(t, "ln_input", "value")["layers.0.0"]
        assert entered == pytest.approx(norm_of_input(t, first_tokens(1 + t)), rel=1e-9)
    assert not watcher.loop_warnings


def test_a_reference_pass_with_the_mask_of_training_is_told() -> None:
    _, watcher, _ = watched_with_reference()
    (told,) = watcher.loop_warnings
    assert told.startswith("row 1: mask= gave the reference pass the mask of the batch that was trained on")
    assert "give reference_mask=" in told


def test_one_mask_for_all_batches_is_not_told() -> None:
    only = first_tokens(2)
    _, watcher, _ = watched_with_reference(mask=lambda: only)
    assert not watcher.loop_warnings
    _, watcher, _ = watched_with_reference(mask=only)
    assert not watcher.loop_warnings


def test_a_mask_of_another_shape_in_the_reference_pass_names_its_own() -> None:
    model = Net().double()
    other = torch.randn(ROWS, TOKENS + 1, WIDTH, dtype=torch.float64)
    options: dict[str, Any] = {"mask": lambda: first_tokens(2), "reference": lambda: model(other)}
    watcher = Watcher(model, ListSink(), probes="ln_input,output_norm", every=1, update_every=1, **options)
    model(data(0)).square().mean().backward()
    with pytest.raises(UsageError, match="hidden states, or reference_mask=, the mask"):
        watcher.step()
    watcher.close()


@pytest.mark.parametrize("reference", [None, "first batch"])
def test_a_mask_of_a_reference_that_is_no_function_is_refused(reference: Any) -> None:
    with pytest.raises(UsageError, match="reference_mask= is the mask of the batch that the function reference= runs"):
        Watcher(Net(), ListSink(), probes="ln_input", reference=reference, reference_mask=first_tokens(1))
