"""The reference pass: similarity, sparsity and ||dF|| against float64, and nothing left changed behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks, train
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.probes._engine.evaluation import evaluation
from stabilitylab.probes.parameters.copies import parameters_set

FIXED = batch(99, rows=5)


def watch(model: Toy, probes: str, **options: Any) -> tuple[ListSink, Watcher]:
    sink = ListSink()
    options = {"reference": lambda: model(**FIXED), "mask": masks(FIXED), "update_every": 1} | options
    return sink, Watcher(model, sink, probes=probes, **options)


def taken(model: nn.Module, paths: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Input and output of modules for the fixed batch, float64 model, real tokens only: (tokens, D)."""
    double = copy.deepcopy(model).double().eval()
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def keep(path: str) -> Callable[..., None]:
        real = masks(FIXED)[path.split(".")[0]].numpy()

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            found[path] = (args[0].numpy()[real], output.numpy()[real])

        return hook

    for path in paths:
        double.get_submodule(path).register_forward_hook(keep(path))
    with torch.no_grad():
        double(**FIXED)
    return found


def test_cosine_similarity_of_neighbouring_layers() -> None:
    model = Toy(dropout=0.5)
    sink, watcher = watch(model, "cosine_similarity")
    watcher.finish()
    paths = [f"{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in range(2)]
    raw, centred = {}, {}
    for path, (x, y) in taken(model, paths).items():
        raw[path] = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, y, strict=True)])
        x, y = x - x.mean(0), y - y.mean(0)
        centred[path] = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, y, strict=True)])
    assert sink.column(0, "cosine_similarity", "raw") == pytest.approx(raw, rel=2e-6)
    assert sink.column(0, "cosine_similarity", "centred") == pytest.approx(centred, rel=2e-6)
    assert [row.layer for row in sink.tables["cosine_similarity"].rows] == [1, 2, 1, 2]


def test_activation_sparsity_is_the_exact_share_of_positive_entries() -> None:
    model = Toy(dropout=0.5)
    sink, watcher = watch(model, "activation_sparsity")
    watcher.finish()
    paths = [f"{stack}.layers.{i}.linear2" for stack in ("encoder", "decoder") for i in range(2)]
    exact = {path: float((x > 0).mean()) for path, (x, _) in taken(model, paths).items()}
    assert sink.column(0, "activation_sparsity", "nonzero_fraction") == pytest.approx(exact, rel=1e-12)


def outputs(model: Toy, alpha: float) -> dict[str, np.ndarray]:
    """Each stack's output for the fixed batch, its final norm included, float64, at some alpha."""
    twin = copy.deepcopy(model)
    twin.alpha.set(alpha)
    return {stack: after for stack, (_, after) in taken(twin, ["encoder", "decoder"]).items()}


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    return {stack: float(np.linalg.norm(one[stack] - other[stack], axis=-1).mean()) for stack in one}


@pytest.mark.parametrize("probes", ["model_update", "model_update,cosine_similarity"])
def test_model_update_is_what_parameters_and_schedule_did(probes: str) -> None:
    def alpha(t: int) -> float:
        return (t + 1) / 8

    start, snapshots = Toy(), []
    model = copy.deepcopy(start)
    sink = ListSink()

    def reference() -> None:
        snapshots.append(copy.deepcopy(model))
        model(**FIXED)

    def watcher(optimizer: torch.optim.Optimizer) -> Watcher:
        options: dict[str, Any] = {"mask": masks(FIXED), "schedule": model.alpha, "reference": reference}
        return Watcher(model, sink, probes=probes, update_every=3, **options)

    train(model, 6, watcher, alpha)
    # rows 0, 3 and the last are due; 2 and 5 run for the row after; 3 and 6 once more with theta_0
    assert [row for row, _, tables in sink.rows if tables] == [0, 3, 6]
    at = dict(zip((0, 2, 3, "swapped 3", 5, 6, "swapped 6"), snapshots, strict=True))
    first = outputs(start, alpha(0))
    for row, before in ((3, 2), (6, 5)):
        now = outputs(at[row], alpha(row))
        expected = {
            "cumulative": distance(now, first),
            "one_update": distance(now, outputs(at[before], alpha(before))),
            "parameters": distance(now, outputs(start, alpha(row))),
            "schedule": distance(outputs(start, alpha(row)), first),
        }
        for column, exact in expected.items():
            assert sink.column(row, "model_update", column) == pytest.approx(exact, rel=1e-5), column
    zero = {"encoder": 0.0, "decoder": 0.0}
    assert all(sink.column(0, "model_update", c) == zero for c in ("cumulative", "parameters", "schedule"))
    assert np.isnan(list(sink.column(0, "model_update", "one_update").values())).all()  # there is no row before it
    assert all(torch.equal(a, b) for a, b in zip(at["swapped 3"].parameters(), start.parameters(), strict=True))


def test_without_a_schedule_all_of_the_update_is_the_parameters() -> None:
    model = Toy()
    calls = []
    sink = ListSink()
    reference = {"reference": lambda: calls.append(model(**FIXED)), "mask": masks(FIXED)}
    train(model, 3, lambda o: Watcher(model, sink, probes="model_update", update_every=1, **reference))
    assert len(calls) == 4  # no second forward
    for row in (1, 2, 3):
        assert sink.column(row, "model_update", "parameters") == sink.column(row, "model_update", "cumulative")
        assert set(sink.column(row, "model_update", "schedule").values()) == {0.0}
        assert min(sink.column(row, "model_update", "one_update").values()) > 0


def test_a_schedule_that_stands_still_costs_no_second_forward() -> None:
    model = Toy()
    calls = []
    sink = ListSink()
    reference = {"reference": lambda: calls.append(model(**FIXED)), "schedule": model.alpha}
    train(model, 3, lambda o: Watcher(model, sink, probes="model_update", update_every=1, **reference))
    assert len(calls) == 4


@pytest.mark.parametrize(("steps", "known"), [(4, True), (5, True), (6, False)])
def test_the_last_row_knows_one_update_only_if_the_row_before_was_run(steps: int, known: bool) -> None:
    model, sink = Toy(), ListSink()  # rows 0 and 4 are due, so row 3 is run as well

    def watcher(optimizer: torch.optim.Optimizer) -> Watcher:
        return Watcher(model, sink, probes="model_update", update_every=4, reference=lambda: model(**FIXED))

    train(model, steps, watcher)
    assert np.isfinite(sink.column(steps, "model_update", "one_update")["decoder"]) == known
    assert np.isfinite(sink.column(steps, "model_update", "cumulative")["decoder"])


def test_a_reference_of_several_batches_counts_all_their_tokens() -> None:
    model, start, current = Toy(), Toy(), {}
    parts = [batch(seed) for seed in (11, 12)]

    def reference() -> None:
        nonlocal current
        for current in parts:
            model(**current)

    def tokens(net: Toy) -> Tensor:
        with torch.no_grad():
            hidden = []
            handle = net.decoder.register_forward_hook(lambda m, a, y: hidden.append(y.double()))
            for part in parts:
                net(**part)
            handle.remove()
        return torch.cat([h[part["target_mask"]] for h, part in zip(hidden, parts, strict=True)])

    sink, watcher = watch(model, "model_update,activation_sparsity", reference=reference, mask=lambda: masks(current))
    watcher.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    exact = (tokens(model) - tokens(start)).norm(dim=-1).mean().item()
    watcher.step()
    watcher.flush()
    assert sink.column(1, "model_update", "cumulative")["decoder"] == pytest.approx(exact, rel=1e-4)


def test_outputs_that_are_written_to_later_are_compared_as_they_were() -> None:
    model = Toy()

    def reference() -> None:
        model.encoder(model.embed_source(FIXED["source"]), FIXED["source_mask"]).zero_()

    sink, watcher = watch(model, "model_update", reference=reference)
    watcher.step()
    with torch.no_grad():
        model.encoder.norm.bias.add_(1.0)
    watcher.step()
    watcher.flush()
    assert sink.column(1, "model_update", "cumulative")["encoder"] == pytest.approx(8**0.5, rel=1e-6)
    assert sink.absent(1, "model_update") == {"decoder"}


def test_output_site_replaces_the_stacks() -> None:
    model = Toy()
    sink, watcher = watch(model, "model_update", output_site="decoder.layers.1")
    watcher.step()
    with torch.no_grad():
        model.decoder.norm.weight.mul_(2)  # behind the site
    watcher.step()
    watcher.flush()
    assert sink.column(1, "model_update", "cumulative") == {"decoder.layers.1": 0.0}


@pytest.mark.parametrize("strict", [False, True])
def test_a_reference_that_changes_its_batch_ends_its_table_and_not_training(strict: bool) -> None:
    model = Toy()
    sizes = iter((5, 4, 4))
    sink, watcher = watch(
        model,
        "model_update,cosine_similarity",
        reference=lambda: model(**batch(1, rows=next(sizes))),
        mask=None,
        strict=strict,
    )
    watcher.step()
    if strict:
        with pytest.raises(UsageError, match="the same fixed batch each time"):
            watcher.step()
        return
    watcher.step()
    watcher.finish()
    assert list(watcher.ended) == ["model_update"]
    assert "the same fixed batch each time" in watcher.ended["model_update"]
    assert [sorted(tables) for _, _, tables in sink.rows] == [["cosine_similarity", "model_update"]] + [
        ["cosine_similarity"]
    ] * 2


def test_scalars_of_a_dict_become_metrics_of_due_rows() -> None:
    model = Toy()
    for returned, expected in (
        ({"nll": torch.tensor(2.5), "share": 0.25, "logits": torch.ones(2, 3)}, {"nll": 2.5, "share": 0.25}),
        (torch.tensor(1.0), {}),
        (type("ModelOutput", (dict,), {})(loss=torch.tensor(1.0)), {}),
    ):
        sink, watcher = watch(model, "none", reference=lambda r=returned: r, update_every=2, total_every_step=False)
        for _ in range(2):
            watcher.step()
        assert dict(watcher.finish()) == expected
        watcher.close()
        assert [(step, metrics) for step, metrics, _ in sink.rows] == [(0, expected), (1, {}), (2, expected)]


def test_flags_gradients_and_random_state_are_as_before_also_after_an_error() -> None:
    model = Toy(dropout=0.3)
    model.encoder.layers[0].eval()  # a part that the user froze
    loss_of(model, batch()).backward()
    flags = [module.training for module in model.modules()]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    seen = []

    def reference() -> None:
        torch.rand(3)
        seen.append((any(m.training for m in model.modules()), torch.is_grad_enabled()))
        raise ArithmeticError

    _, watcher = watch(model, "cosine_similarity,model_update", reference=reference)
    with pytest.raises(ArithmeticError):
        watcher.step()
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    watcher.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_parameters_come_back_bit_for_bit_and_a_kept_graph_still_works() -> None:
    model = Toy()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model.encoder.norm.weight.pow(2).sum()

    def pass_that_fails() -> None:
        with parameters_set(list(model.parameters()), [torch.zeros_like(parameter) for parameter in before]):
            assert not any(parameter.any() for parameter in model.parameters())
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        pass_that_fails()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.view(torch.int32), new.detach().view(torch.int32))
    loss.backward()
    assert torch.equal(model.encoder.norm.weight.grad, 2 * model.encoder.norm.weight)


def test_evaluation_leaves_each_flag_as_it_was() -> None:
    model = Toy()
    model.decoder.eval()
    flags = [module.training for module in model.modules()]
    with evaluation(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == flags
    assert len(set(flags)) == 2


def test_a_reference_that_sets_training_mode_leaves_frozen_parts_in_eval_mode() -> None:
    model = Toy()
    model.decoder.eval()
    flags = [module.training for module in model.modules()]

    def reference() -> None:  # as many loops evaluate
        model.eval()
        model(**FIXED)
        model.train()

    _, watcher = watch(model, "cosine_similarity", reference=reference)
    watcher.step()
    assert [module.training for module in model.modules()] == flags


def test_a_step_inside_of_autocast_compares_with_the_parameters_of_the_start() -> None:
    found = []
    for inside in (False, True):
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sink, watcher = watch(model, "model_update", schedule=model.alpha)
        for row in range(2):
            model.alpha.set((1 + row) / 2)
            with torch.autocast("cpu", torch.bfloat16):
                loss_of(model, batch(row)).backward()
                if inside:
                    watcher.step()
            if not inside:
                watcher.step()
            optimizer.step()
            optimizer.zero_grad()
        watcher.finish()
        found.append(sink)
    for column in ("parameters", "schedule"):
        outside, inside = (sink.column(1, "model_update", column) for sink in found)
        assert inside == pytest.approx(outside, rel=0.1)  # bfloat16
        assert min(outside.values()) > 0
