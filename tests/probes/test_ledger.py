"""The ledger of updates: facts that changed, by kind and name; and training that does not notice it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.probes.instruments.ledger import MOST_CHANGES, UpdateLedger

AdamW = torch.optim.AdamW


class Ledgers(ListSink):
    """Keeps the facts too."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, Any]] = []

    def ledger(self, facts: Any) -> None:
        self.facts += facts


class Asked:
    def __init__(self, digests: int) -> None:
        self.digests = digests

    def instruments(self) -> list[UpdateLedger]:
        return [UpdateLedger(self.digests)]


Act = Callable[[int, Toy, torch.optim.Optimizer], object]


def trained(
    act: Act = lambda t, model, optimizer: None,
    steps: int = 6,
    digests: int | None = 1,
    strict: bool = True,
    sparse: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train with a ledger (None: without; ``sparse``: that of every run); ``act`` comes before update t."""
    model, sink = Toy(dropout=0.1), Ledgers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    record = None if sparse else "off" if digests is None else Asked(digests)
    losses = []
    with Watcher(model, sink, probes="none", optimizer=optimizer, record=record, strict=strict) as watcher:
        for t in range(steps):
            act(t, model, optimizer)
            loss = loss_of(model, batch(t))
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    state = {"losses": losses, "parameters": [*model.parameters()], "rng": torch.get_rng_state()}
    return sink.facts, state


def of(facts: list[dict[str, Any]], *kinds: str) -> list[tuple[int, str, Any, Any]]:
    """The facts of some kinds, without the first values of a run."""
    return [
        (f["step"], f["name"], f["before"], f["after"])
        for f in facts
        if f["kind"] in kinds and (f["before"] is not None or f["kind"] == "write")
    ]


@pytest.mark.parametrize("given", [{"digests": 1}, {"sparse": True}])
def test_training_is_bit_for_bit_that_without_a_ledger(given: dict[str, Any]) -> None:
    (nothing, plain), (facts, watched) = trained(digests=None), trained(**given)
    assert facts
    assert not nothing
    for name in plain:
        pairs = zip(plain[name], watched[name], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{name} differ under the ledger"


def test_a_healthy_run_has_its_first_settings_and_no_change() -> None:
    facts, _ = trained()
    assert of(facts, "setting", "state", "flag", "attribute", "write") == []
    settings = {f["name"]: f["after"] for f in facts if f["kind"] == "setting"}
    assert settings["optimizer 0 group 0 lr"] == 1e-2
    assert settings["optimizer 0 group 0 betas"] == [0.9, 0.999]
    assert settings["optimizer 0 group 0 weight_decay"] == 1e-2
    assert settings["optimizer 0 group 0 eps"] == 1e-8


def test_settings_flags_and_numbers_that_change_are_named_with_their_update() -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        if t == 2:
            group["lr"] *= 2
            group["betas"] = (0.9, 0.9)
        if t == 3:
            model.encoder.layers[0].dropout.eval()
            model.head.weight.requires_grad_(False)
        if t == 4:
            model.decoder.layers[1].norm1.eps = 1e-3

    facts, _ = trained(act)
    assert of(facts, "setting", "flag", "attribute") == [
        (2, "optimizer 0 group 0 lr", 0.01, 0.02),
        (2, "optimizer 0 group 0 betas", [0.9, 0.999], [0.9, 0.9]),
        (3, "training of encoder.layers.0.dropout", True, False),
        (3, "requires_grad of head.weight", True, False),
        (4, "decoder.layers.1.norm1.eps", 1e-5, 1e-3),
    ]


def test_every_watched_run_with_an_optimizer_has_a_sparse_ledger() -> None:
    """Exact names and steps without a digest; and no ledger without an optimizer, or with record="off"."""

    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        group["lr"] = 1e-2 if t < 4 else 3e-1
        if t == 2:
            group["betas"] = (0.5, 0.999)
            model.head.weight.requires_grad_(False)
        if t == 3:
            with torch.no_grad():
                model.encoder.layers[0].linear1.weight.mul_(2)
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()

    facts, _ = trained(act, sparse=True)
    assert of(facts, "setting", "flag") == [
        (2, "requires_grad of head.weight", True, False),
        (2, "optimizer 0 group 0 betas", [0.9, 0.999], [0.5, 0.999]),
        (4, "optimizer 0 group 0 lr", 0.01, 0.3),
    ]
    written = {(step, name) for step, name, before, _ in of(facts, "write") if before is None}
    assert (3, "encoder.layers.0.linear1.weight") in written
    assert (3, "exp_avg_sq of head.bias") in written
    assert {step for step, _ in written} == {3}
    zeros = {f["name"]: (f["step"], f["after"]) for f in facts if "share of zeros" in f["name"]}
    assert zeros["optimizer 0 group 0 share of zeros in exp_avg_sq"] == (3, 1.0)
    assert zeros["optimizer 0 group 0 share of zeros in exp_avg"][1] < 0.5


def test_a_sparse_ledger_stores_gradual_rates_by_5_per_cent_and_jumps_exactly() -> None:
    rates = [1e-3 * 0.99**t for t in range(60)]
    rates[40:] = [30 * rate for rate in rates[40:]]

    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rates[t]
        model.head.counter = t

    facts, _ = trained(act, steps=60, sparse=True)
    found = of(facts, "setting")
    assert (40, "optimizer 0 group 0 lr", rates[39], rates[40]) in found
    assert 8 <= len(found) <= 13, "a fall of 1 % an update is stored every sixth"
    known, at = [(0, rates[0]), *((step, after) for step, _, _, after in found)], dict(enumerate(rates))
    for step, rate in at.items():
        stored = [value for since, value in known if since <= step][-1]
        assert abs(stored - rate) <= 0.0501 * max(stored, rate), f"the stored rate at step {step} is off"


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_sparse_ledger_stores_the_end_of_a_rate_that_was_not_finite(lost: float) -> None:
    name = "optimizer 0 group 0 lr"

    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = lost if t in (2, 3) else 1e-2

    facts, _ = trained(act, sparse=True)
    found = [fact for fact in of(facts, "setting") if fact[1] == name]
    assert [repr(fact) for fact in found] == [repr((2, name, 1e-2, lost)), repr((4, name, lost, 1e-2))]


def test_weights_that_are_written_in_each_update_are_stored_a_few_times() -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            model.head.weight.clamp_(-1, 1)

    facts, _ = trained(act, steps=30, sparse=True)
    assert len(of(facts, "write")) == MOST_CHANGES


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does: it was never made as an optimizer itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.register_step_post_hook = inner.register_step_post_hook
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_the_optimizer_inside_a_wrapper_has_its_ledger() -> None:
    model, sink = Toy(), Ledgers()
    optimizer = Wrapping(AdamW(model.parameters(), lr=1e-2))
    with Watcher(model, sink, probes="none", optimizer=optimizer, strict=True) as watcher:
        for t in range(3):
            optimizer.param_groups[0]["lr"] = 1e-2 if t < 2 else 1e-1
            loss_of(model, batch(t)).backward()
            watcher.step(loss=1.0)
            optimizer.step()
    assert of(sink.facts, "setting") == [(2, "optimizer 0 group 0 lr", 0.01, 0.1)]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("digests", [0, 1])
def test_a_step_with_a_closure_is_read_once_its_gradients_are_there(by_name: bool, digests: int) -> None:
    """As Lightning does: forward, backward and the row lie inside the optimizer's step."""
    model, plain, sink = Toy(), Toy(), Ledgers()
    plain.load_state_dict(model.state_dict())
    optimizer, other = AdamW(model.parameters(), lr=1e-2), AdamW(plain.parameters(), lr=1e-2)
    with Watcher(model, sink, probes="none", optimizer=optimizer, record=Asked(digests), strict=True) as watcher:
        for t in range(6):
            if t == 3:
                optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.1
                with torch.no_grad():
                    next(model.parameters()).mul_(2.0)
                    next(plain.parameters()).mul_(2.0)

            def closure(t: int = t) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch(t))
                loss.backward()
                watcher.step(loss=loss)
                return loss

            stepped = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            other.zero_grad()
            loss = loss_of(plain, batch(t))
            loss.backward()
            other.step()
            assert torch.equal(stepped, loss), "the optimizer returns what its closure did"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    changed = [(f["step"], f["kind"], f["name"]) for f in sink.facts if f["before"] is not None or f["kind"] == "write"]
    first = next(iter(dict(model.named_parameters())))
    assert changed == [(3, "setting", "optimizer 0 group 0 lr"), (3, "write", first)], sink.facts


def test_steps_that_a_loop_skips_do_not_set_the_count_back() -> None:
    """A GradScaler skips steps: their count then stands behind that of rows, and nothing is lost."""
    model, sink = Toy(), Ledgers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with Watcher(model, sink, probes="none", optimizer=optimizer, strict=True) as watcher:
        for t in range(8):
            loss_of(model, batch(t)).backward()
            watcher.step(loss=1.0)
            if t not in (3, 4, 5):
                optimizer.step()
            optimizer.zero_grad()
    assert of(sink.facts, "state") == []


def test_a_reset_optimizer_is_named() -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        if t == 3:
            optimizer.state.clear()

    count = len(list(Toy().parameters()))
    assert of(trained(act)[0], "state") == [
        (3, "optimizer 0 group 0 parameters with state", count, 0),
        (4, "optimizer 0 group 0 parameters with state", 0, count),
        (4, "optimizer 0 group 0 updates without a step", 0, 3),
    ]


def test_moments_set_to_zero_are_a_write_and_a_share() -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        if t == 3:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()

    facts, _ = trained(act)
    written = {name for step, name, *_ in of(facts, "write")}
    assert written <= {f"exp_avg of {name}" for name, _ in Toy().named_parameters()}
    assert "exp_avg of head.weight" in written
    before, after = next((b, a) for step, name, b, a in of(facts, "state") if step == 3 and "in exp_avg" in name)
    assert before < 0.5
    assert after == 1.0


@pytest.mark.parametrize("through", ["no_grad", "data", "swap"])
def test_a_write_between_updates_is_named_with_its_tensor(through: str) -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        weight = model.decoder.layers[0].linear1.weight
        if t == 3 and through == "no_grad":
            with torch.no_grad():
                weight[[0, 1]] = weight[[1, 0]]  # two rows changed places
        elif t == 3 and through == "data":
            weight.data.neg_()
        elif t == 3:
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.zero_()  # as an evaluation with averaged weights does
                weight.copy_(kept)

    found = [(step, name) for step, name, *_ in of(trained(act)[0], "write")]
    assert found == ([] if through == "swap" else [(3, "decoder.layers.0.linear1.weight")])


def test_without_digests_autograds_counts_name_the_tensor() -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        if t == 3:
            with torch.no_grad():
                model.head.bias.add_(1)

    assert of(trained(act, digests=0)[0], "write") == [(3, "head.bias", None, "written, bits not compared")]


def test_a_counter_is_stored_a_few_times_and_a_rate_always() -> None:
    def act(t: int, model: Toy, optimizer: torch.optim.Optimizer) -> None:
        model.seen_batches = t
        optimizer.param_groups[0]["lr"] = 1e-3 * (t + 1)

    model_counts = trained(lambda t, m, o: setattr(m.head, "eps_used", t), steps=3)[0]
    assert of(model_counts, "attribute") == [], "an attribute that came later is not followed"
    facts, _ = trained(act, steps=30, digests=0)
    assert len([name for _, name, *_ in of(facts, "setting") if name.endswith("lr")]) == 29


def test_it_fails_like_any_other_instrument(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(self: UpdateLedger, number: int) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(UpdateLedger, "_read", broken)
    plain = trained(digests=None)[1]
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        _, watched = trained(strict=False)
    assert all(torch.equal(a, b) for a, b in zip(plain["parameters"], watched["parameters"], strict=True))
    assert [one for one in caplog.messages if "UpdateLedger" in one] == [
        "no more of UpdateLedger, which raised ZeroDivisionError (broken). Training goes on."
    ]
    with pytest.raises(ZeroDivisionError):
        trained(strict=True)


def test_it_needs_the_optimizer_and_a_known_setting() -> None:
    with pytest.raises(UsageError, match="record= needs optimizer="):
        Watcher(Toy(), ListSink(), record="ledger")
    with pytest.raises(UsageError, match="record = 'all' must be"):
        Watcher(Toy(), ListSink(), record="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="digests = -1"):
        UpdateLedger(-1)


def test_a_resumed_ledger_knows_the_former_settings() -> None:
    model, sink = Toy(), Ledgers()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def one(watcher: Watcher) -> None:
        loss_of(model, batch()).backward()
        watcher.step(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()

    with Watcher(model, sink, probes="none", optimizer=optimizer, record="ledger") as watcher:
        one(watcher)
        state = watcher.state_dict()
    optimizer.param_groups[0]["lr"] = 3e-2
    with Watcher(model, sink, probes="none", optimizer=optimizer, record="ledger") as watcher:
        watcher.load_state_dict(state)
        one(watcher)
    assert of(sink.facts, "setting") == [(1, "optimizer 0 group 0 lr", 0.01, 0.03)]


@pytest.mark.parametrize("digests", [0, 1])
@pytest.mark.parametrize("turns", [[(0, 1)], [(1, 0)], [(0,), (0, 1)], [(1,), (1, 0)]], ids=str)
def test_what_one_of_several_optimizers_writes_is_no_write_of_something_else(
    turns: list[tuple[int, ...]], digests: int
) -> None:
    model, sink = Toy(), Ledgers()
    optimizers = [AdamW(stack.parameters(), lr=1e-2) for stack in (model.encoder, model.decoder)]
    bias = model.decoder.layers[0].linear1.bias
    with Watcher(model, sink, probes="none", optimizer=optimizers, record=Asked(digests), strict=True) as watcher:
        for t in range(6):
            if t == 4:
                with torch.no_grad():
                    bias.add_(1)
            loss = loss_of(model, batch(t))
            loss.backward()
            watcher.step(loss=loss)
            for number in turns[t % len(turns)]:
                optimizers[number].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    found = [(step, name) for step, name, *_ in of(sink.facts, "write")]
    assert found == [(4, "decoder.layers.0.linear1.bias")]
