"""Questions about the whole model: each fault is told, and the same model without it passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from questioned import VOCABULARY, WIDTH, Decoder, adamw, cross_entropy, next_tokens, text
from test_first_update import check, failures
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stabilitylab import preflight
from stabilitylab.check.questions import NAMES, Questions, as_it_was
from stabilitylab.check.wiring import shared_memory
from stabilitylab.errors import UsageError
from stabilitylab.probes.state import snapshot


@pytest.fixture(scope="module")
def well() -> dict[str, Any]:
    """By name: the checks of a decoder without a fault."""
    model = Decoder()
    result = preflight(model, next_tokens(), cross_entropy, adamw(model))
    assert result.ok, str(result)
    return {one.name: one for one in result.checks}


def test_a_healthy_decoder_passes_every_check(well: dict[str, Any]) -> None:
    assert set(well) == set(NAMES)
    assert {one.state for one in well.values()} == {"ok"}


class Mixed(nn.Module):
    """y = x + ``later`` times the next place's x + ``others`` times the samples' mean, then a head without weights."""

    def __init__(self, later: float = 0.0, others: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.gain, self.later, self.others = nn.Parameter(torch.ones(8).double()), later, others
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        time, samples = (1, 0) if self.batch_first else (0, 1)
        following = torch.cat([x, torch.zeros_like(x)], dim=time).narrow(time, 1, x.shape[time])
        return self.gain * (x + self.later * following + self.others * x.mean(dim=samples, keepdim=True))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("later", [0.25, 4.0])
def test_a_future_leak_is_the_share_of_the_gradient_that_is_of_later_inputs(later: float) -> None:
    x = torch.randn(4, 6, 8).double()
    found = check(preflight(Mixed(later=later), x, squared, causal=True), "future leak")
    assert found.state == "fail"
    assert found.value == pytest.approx(later / max(1, later), rel=1e-12)
    assert check(preflight(Mixed(), x, squared, causal=True), "future leak").state == "ok"


@pytest.mark.parametrize("places", [2, 3, 4])
def test_leaks_are_found_in_short_sequences_too(places: int) -> None:
    x = torch.randn(4, places, 8).double()
    result = preflight(Mixed(later=0.25), x, squared, causal=True)
    assert check(result, "future leak").value == pytest.approx(0.25, rel=1e-12)
    assert check(result, "sample leak").state == "ok"
    assert check(preflight(Mixed(), x, squared, causal=True), "future leak").state == "ok"


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_sample_leak_is_the_share_of_the_gradient_that_is_of_other_samples(batch_first: bool) -> None:
    x = torch.randn(4, 6, 8).double()
    n = x.shape[0 if batch_first else 1]
    leaking = preflight(Mixed(others=0.5, batch_first=batch_first), x, squared, batch_first=batch_first)
    assert failures(leaking) == ["sample leak"]
    assert check(leaking, "sample leak").value == pytest.approx((0.5 / n) / (1 + 0.5 / n), rel=1e-12)
    well = preflight(Mixed(later=0.5, batch_first=batch_first), x, squared, batch_first=batch_first, causal=True)
    assert check(well, "sample leak").value == 0
    assert failures(well) == ["future leak"]


def test_a_leak_and_sequences_that_come_first_look_alike_where_no_label_tells() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)  # (place, sample, feature)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(6, 4, 8)
    asked = check(preflight(model, x, squared), "sample leak")
    assert asked.state == "not checked"
    assert "say batch_first=False if samples lie along the second; with batch_first=True" in asked.measured
    told = check(preflight(model, x, squared, batch_first=False), "sample leak")
    assert (told.state, told.value) == ("ok", 0)
    assert check(preflight(model, x, squared, batch_first=True), "sample leak").state == "fail"


class Tutorial(nn.Module):
    """nn.TransformerEncoderLayer, which takes places first unless it is told otherwise."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first)

    def forward(self, ids: Tensor) -> Tensor:
        places = ids.shape[1] if self.layer.self_attn.batch_first else ids.shape[0]
        mask = nn.Transformer.generate_square_subsequent_mask(places)
        return self.head(self.layer(self.embedding(ids), mask, is_causal=True))


def test_attention_over_samples_because_batch_first_was_forgotten_is_a_leak() -> None:
    batch = next_tokens()
    assert failures(preflight(Tutorial(False), batch, cross_entropy)) == ["sample leak"]
    assert preflight(Tutorial(True), batch, cross_entropy).ok
    turned = tuple(own.T.contiguous() for own in batch)
    well = preflight(Tutorial(False), turned, cross_entropy)
    assert well.ok, str(well)
    assert check(well, "sample leak").measured == "samples along dimension 1 of the output do not depend on each other"
    assert check(well, "future leak").state == "ok"


def test_batch_norm_is_no_leak_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(6, 8), torch.arange(6) % 3
    assert check(preflight(model, batch, cross_entropy), "sample leak").state == "ok"


def without_a_mask(model: Decoder) -> None:
    for block in model.blocks:
        block.attention.is_causal = False


def copied_halves(model: Decoder) -> None:
    for block in model.blocks:
        for part, axis in ((block.mlp[0].weight, 0), (block.mlp[2].weight, 1)):
            one, other = part.data.chunk(2, dim=axis)
            other.copy_(one)


def tied_by_data(model: Decoder) -> None:
    model.head.weight.data = model.embedding.weight.data


def detached(model: Decoder) -> None:
    model.blocks[1].mlp.register_forward_hook(lambda module, args, output: output.detach())


def always_drops(model: Decoder) -> None:
    model.embedding.register_forward_hook(lambda module, args, output: F.dropout(output, 0.1))


def drops_in_training(model: Decoder) -> None:
    model.embedding.register_forward_hook(lambda module, args, output: F.dropout(output, 0.1, module.training))


def over_samples(model: Decoder) -> None:
    model.norm.register_forward_hook(lambda module, args, output: output * output.softmax(dim=0))


@pytest.mark.parametrize(
    ("fault", "name", "site"),
    [
        (without_a_mask, "future leak", ""),
        (over_samples, "sample leak", ""),
        (copied_halves, "duplicated units", "blocks.0.mlp.0.weight"),
        (tied_by_data, "shared memory", "head.weight"),
        (detached, "detached", "blocks.1.mlp.0.weight"),
        (always_drops, "dropout in eval mode", ""),
    ],
)
def test_a_fault_fails_by_its_name(
    fault: Callable[[Decoder], None], name: str, site: str, well: dict[str, Any]
) -> None:
    model = Decoder()
    fault(model)
    result = preflight(model, next_tokens(), cross_entropy, adamw(model))
    assert failures(result) == [name], str(result)
    assert result.suspect is not None
    assert result.suspect.bound == name
    assert result.suspect.remedy
    assert check(result, name).site == site
    assert well[name].state == "ok"


class Columns(nn.Module):
    """Linear maps whose weights are columns of one matrix."""

    def __init__(self, *columns: slice) -> None:
        super().__init__()
        whole = torch.randn(WIDTH, 3 * WIDTH, generator=torch.Generator().manual_seed(0))
        self.maps = nn.ParameterList(nn.Parameter(whole[:, own]) for own in columns)


@pytest.mark.parametrize(
    ("columns", "pairs"),
    [
        ((slice(0, 20), slice(20, 70), slice(70, 96)), []),
        ((slice(0, 20), slice(19, 70), slice(70, 96)), ["maps.0 and maps.1"]),
        ((slice(0, 20), slice(20, 96), slice(10, 15)), ["maps.0 and maps.2"]),
    ],
)
def test_columns_of_one_matrix_share_memory_where_they_overlap(columns: Any, pairs: list[str]) -> None:
    found = shared_memory(Columns(*columns))
    assert found.value == len(pairs)
    assert found.measured.endswith("; ".join(pairs) or "each its own memory")


@pytest.mark.parametrize("wrap", [lambda module: module, checkpoint_wrapper])
def test_a_detached_layer_is_found_under_a_wrapper_around_its_stack(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Decoder()
    detached(model)
    model.body = wrap(nn.Sequential(*model.blocks))
    del model.blocks
    model.blocks = [model.body]
    found = check(preflight(model, next_tokens(), cross_entropy, adamw(model)), "detached")
    assert (found.state, found.site) == ("fail", "body.1.mlp.0.weight")


def test_dropout_that_follows_the_mode_passes() -> None:
    model = Decoder()
    drops_in_training(model)
    assert preflight(model, next_tokens(), cross_entropy, adamw(model)).ok


def test_what_the_optimizer_does_not_hold_is_said(well: dict[str, Any]) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW([own for name, own in model.named_parameters() if name != "places.weight"], lr=1e-3)
    found = check(preflight(model, next_tokens(), cross_entropy, optimizer), "not in the optimizer")
    assert (found.state, found.site) == ("warn", "places.weight")
    assert well["not in the optimizer"].state == "ok"


# label shift


def shifted(logits: Tensor, labels: Tensor, shift: int) -> float:
    """The mean cross-entropy where the labels are moved by ``shift``, in float64, over places that have both."""
    length = labels.shape[1]
    here, there = (slice(0, length - 1), slice(1, length)) if shift > 0 else (slice(1, length), slice(0, length - 1))
    here, there = (here, there) if shift else (slice(0, length), slice(0, length))
    return float(F.cross_entropy(logits[:, here].double().flatten(0, 1), labels[:, there].flatten()))


@pytest.mark.parametrize(
    ("first", "remedy"),
    [(0, "shift the labels by one"), (2, "shift the labels once"), (-1, "give as labels[t] the token t + 1")],
)
def test_labels_that_are_other_tokens_fail(first: int, remedy: str) -> None:
    ids = text(15)
    batch = ids[:, 1:13], ids[:, 1 + first : 13 + first]
    model = Decoder().double()
    result = preflight(model, batch, cross_entropy)
    assert failures(result) == ["label shift"]
    found = check(result, "label shift")
    assert found.value == abs(first - 1)
    assert found.remedy.startswith(remedy)
    logits = model(batch[0]).detach()
    losses = ", ".join(f"{shifted(logits, batch[1], shift):.4g} at {shift:+d}" for shift in (-1, 0, 1))
    assert found.measured.endswith(f"losses by shift of the labels: {losses}")


class Knows(nn.Module):
    """Predicts class ``token + 1`` of the place's own token: a model that was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)
        with torch.no_grad():
            self.embedding.weight.copy_(5 * torch.eye(VOCABULARY).roll(1, dims=1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_of_a_trained_model_the_lowest_loss_tells_the_shift(shift: int) -> None:
    """Labels that are no tokens of the input: of each place, moved by ``shift``."""
    ids = text(14, samples=8)
    right = (ids + 1) % VOCABULARY
    batch = ids[:, 1:13], right[:, 1 - shift : 13 - shift]
    found = check(preflight(Knows(), batch, cross_entropy), "label shift")
    assert found.state == ("fail" if shift else "ok")
    assert found.value == abs(shift)
    if shift:
        assert found.remedy == f"move the labels by {-shift:+d}: the model predicts the labels 1 place away"


def sentences(changed: float) -> tuple[Tensor, Tensor]:
    """Twelve of 5 tokens, one place of padding, and the next tokens; of these a share is not in the input."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (12, 6), generator=draw)
    ids[:, 5] = 0
    labels = torch.cat([ids[:, 1:5], torch.full((12, 1), 2), torch.full((12, 1), -100)], dim=1)
    return ids, labels.masked_fill((torch.rand(labels.shape, generator=draw) < changed) & (labels > 2), 1)


@pytest.mark.parametrize("copied", [False, True])
def test_views_of_one_batch_of_tokens_are_its_tokens(copied: bool) -> None:
    """One tensor holds inputs and labels, any number of places apart, in rows or in columns."""

    def loss(ahead: int, turned: bool = False) -> Callable[[nn.Module, Tensor], Tensor]:
        def own(model: nn.Module, batch: Tensor) -> Tensor:
            ids, labels = (batch[:-ahead], batch[ahead:]) if turned else (batch[:, :-ahead], batch[:, ahead:])
            ids = ids.clone() if copied and not turned else ids
            return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

        return own

    assert preflight(Decoder(), text(), loss(1)).ok
    found = preflight(Decoder(), text(15), loss(2))
    assert failures(found) == ["label shift"]
    assert check(found, "sample leak").state == "ok"
    assert "the labels are the tokens after the next ones" in check(found, "label shift").measured
    turned = preflight(Tutorial(False), text().T.contiguous(), loss(1, turned=True))
    assert check(turned, "sample leak").state == check(turned, "label shift").state == "ok"


def test_tokens_that_are_not_recognised_are_not_denied() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        ids = (batch + 3) % VOCABULARY
        return F.cross_entropy(model(ids[:, :-2]).flatten(0, 1), ids[:, 2:].flatten())

    found = preflight(Decoder(), text(15), loss)
    for name in ("sample leak", "label shift"):
        assert check(found, name).state == "not checked"
        assert check(found, name).measured.startswith("no embedding was seen to take tokens of the batch")


def test_the_end_of_a_short_sentence_is_no_shift() -> None:
    """Of 5 labels one is the end, which no input has."""
    result = preflight(Decoder(), sentences(0.0), cross_entropy)
    assert result.ok, str(result)
    assert check(result, "label shift").measured.startswith("the labels are the next tokens of the input")
    assert check(result, "future leak").state == "ok"


def test_a_model_that_names_its_own_token_tells_no_shift() -> None:
    """As tied embeddings do before any training: the loss is lowest where the label is the input."""
    model = Knows()
    model.embedding.weight.data = 5 * torch.eye(VOCABULARY)
    found = check(preflight(model, sentences(0.3), cross_entropy), "label shift")
    assert "the labels are no tokens of the input" in found.measured
    assert found.state != "fail", found.measured


def test_labels_at_their_own_places_are_the_task_of_a_model_that_sees_all() -> None:
    """Masked language models, taggers: no next token, so that nothing is said of the future."""
    model, ids = Decoder(), text(12)
    without_a_mask(model)
    labels = ids.masked_fill(torch.arange(12) % 3 > 0, -100)
    result = preflight(model, (ids.masked_fill(labels != -100, 0), labels), cross_entropy)
    assert result.ok, str(result)
    assert check(result, "future leak").state == "not checked"
    copied = preflight(model, (ids, labels), cross_entropy)
    assert [(one.bound, one.severity) for one in copied.findings] == [("labels in the input", "warn")]


# duplicated units


@pytest.mark.parametrize("copies", [0, 1, 4])
def test_the_share_of_copies_counts_rows_that_are_equal_up_to_sign(copies: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight[16 : 16 + copies] = -2 * model[0].weight[:copies]
    found = check(preflight(model, (torch.randn(6, 24), torch.arange(6) % 3), cross_entropy), "duplicated units")
    assert found.value == 2 * copies / 32
    assert found.state == {0: "ok", 1: "warn", 4: "fail"}[copies]
    rows = F.normalize(model[0].weight.detach().double(), dim=1)
    largest = float((rows @ rows.T).fill_diagonal_(0).abs().max())
    if copies:
        assert "the largest |cosine| between two units of a matrix is 1, and" in found.measured
    else:
        assert largest < 0.95


def test_gains_that_start_as_ones_are_no_copies() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Unflatten(1, (2, 8)), nn.LayerNorm([2, 8]), nn.Flatten())
    assert check(preflight(model, torch.randn(4, 16), squared), "duplicated units").state == "ok"


# how it is asked


def test_skip_leaves_checks_out_and_refuses_unknown_names() -> None:
    model = Decoder()
    without_a_mask(model)
    result = preflight(model, next_tokens(), cross_entropy, skip=["future leak"])
    assert result.ok
    assert check(result, "future leak").measured == "skip= leaves it out"
    with pytest.raises(UsageError, match=r"'future leek', which is no question\. Did you mean 'future leak'\?"):
        preflight(model, next_tokens(), cross_entropy, skip=["future leek"])


def test_a_question_that_raises_is_not_checked_and_the_rest_is() -> None:
    model = Decoder()

    def in_training(model: nn.Module, batch: Any) -> Tensor:
        if not model.training and torch.is_grad_enabled():
            raise KeyError("no gradients here")
        return cross_entropy(model, batch)

    result = preflight(model, next_tokens(), in_training)
    assert "it raised KeyError" in check(result, "future leak").measured
    assert check(result, "loss at start").state == "ok"
    assert "every number that was measured is within its bound" in str(result)


def test_what_a_forward_writes_is_taken_back() -> None:
    """A model that counts its forwards: no pass of a check stays in it."""

    class Counting(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(ids)

    model = Counting()
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert preflight(model, next_tokens(), cross_entropy, adamw(model)).ok
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    assert math.prod(model.embedding.weight.shape) == VOCABULARY * WIDTH


class Keeps(Decoder):
    """A model that keeps something of its first forward in an attribute."""

    kept: Tensor | None = None
    firsts: ClassVar[list[bool]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.firsts.append(self.kept is None)
        self.kept = torch.zeros(()) if self.kept is None else self.kept + 1
        return super().forward(ids)


def test_what_a_forward_keeps_in_an_attribute_is_taken_back() -> None:
    model = Keeps()
    Questions(
        *(model, model, next_tokens(), cross_entropy), classes=None, causal=None, batch_first=None, skip=()
    ).before()
    assert len(model.firsts) == 4
    assert all(model.firsts)
    assert model.kept is None


def test_a_write_that_cannot_be_taken_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "free_memory", lambda: 0)
    model = Decoder()
    model.register_buffer("calls", torch.zeros(()))
    with pytest.raises(MemoryError, match="no room for a copy of calls"), as_it_was(model, training=True):
        model.calls += 1
