"""The sums with random signs against an independent definition in numpy; what they add up over; what they estimate."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks, train
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import PROBES, Mean, Probe, Sketch, Watcher, probe
from stabilitylab.probes.parameters.pieces import Parameters
from stabilitylab.probes.places.sites import layers

K = 16
TABLES = (
    "fingerprint",
    "fingerprint_gradient",
    "fingerprint_weight",
    "fingerprint_weight_gradient",
    "fingerprint_weight_direction",
)


def splitmix(index: np.ndarray, stream: int) -> np.ndarray:
    """splitmix64 in unsigned arithmetic, as its authors wrote it: (n,) uint64."""
    with np.errstate(over="ignore"):
        z = (index.astype(np.uint64) + np.uint64((stream << 60) + 1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def signs(index: np.ndarray, stream: int, k: int = K) -> np.ndarray:
    bits = (splitmix(index, stream)[:, None] >> np.arange(k, dtype=np.uint64)) & np.uint64(1)
    return np.where(bits == 1, -1.0, 1.0)


def sketched(matrix: np.ndarray, rows: np.ndarray, first: int = 0, k: int = K) -> np.ndarray:
    """One entry after the other: sum_{i,f} r_j(i) c_j(f) x_{i,f}."""
    r, c = signs(rows, 0, k), signs(np.arange(first, first + matrix.shape[1]), 1, k)
    return np.einsum("if,ij,fj->j", matrix.astype(np.float64), r, c)


def tokens(real: np.ndarray, first: int = 0) -> np.ndarray:
    """Logical indices of a batch (B, T) of real tokens, one token after the other; padding gets what it may."""
    found = np.zeros(real.shape, dtype=np.int64)
    for sample, row in enumerate(real):
        place = 0
        for t, counts in enumerate(row):
            found[sample, t] = ((sample + first) << 40) + (place << 16)
            place += int(counts)
    return found


def watched(model: nn.Module, several: list[dict[str, Tensor]], tokens: int | None = None, **options: Any) -> ListSink:
    sink, state = ListSink(), {"now": several[0]}
    watcher = Watcher(
        model, sink, probes="fingerprint", every=1, reference=None, mask=lambda: masks(state["now"]), **options
    )
    for state["now"] in several:
        loss_of(model, state["now"], tokens).backward()
    watcher.step()
    watcher.flush()
    watcher.close()
    assert watcher.ended == {}, "no table ended before the run"
    return sink


def sums(sink: ListSink, table: str) -> dict[str, np.ndarray]:
    layout, cells = sink.tables[table], sink.rows[0][2][table]
    at = [layout.columns.index(f"s{j}") for j in range(K)]
    return {row.site: values[at] for row, values in zip(layout.rows, cells.values, strict=True)}


def column(sink: ListSink, table: str, name: str) -> dict[str, float]:
    return sink.column(0, table, name)


def real_of(given: dict[str, Tensor]) -> Tensor:
    return given["target_mask"]


def caught(model: Toy, given: dict[str, Tensor], path: str) -> tuple[Tensor, Tensor]:
    """What leaves a module, and the gradient there."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    handle = model.get_submodule(path).register_forward_hook(keep)
    loss_of(model, given).backward()
    handle.remove()
    assert kept[0].grad is not None
    return kept[0].detach(), kept[0].grad


@pytest.mark.parametrize("seed", [0, 1])
def test_the_rule_is_its_definition(seed: int) -> None:
    draw = np.random.default_rng(seed)
    matrix, rows = draw.normal(size=(13, 7)), draw.integers(0, 2**50, size=13)
    for k in (1, 16, 64):
        found = Sketch(k).sums(torch.tensor(matrix), torch.tensor(rows), 5)
        np.testing.assert_allclose(found.numpy(), sketched(matrix, rows, 5, k), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="1 to 64 sums, not 65"):
        Sketch(65)


@pytest.mark.slow
def test_the_estimate_of_the_squared_norm_is_unbiased_and_its_error_is_what_is_said() -> None:
    draw = np.random.default_rng(3)
    plain, rank_one = draw.normal(size=(24, 10)), np.outer(draw.normal(size=24), draw.normal(size=10))
    for matrix, most in ((plain, 2.6), (rank_one, 8.0)):
        estimates = []
        for trial in range(1500):  # other rows, other signs
            rows = torch.arange(24) + 1000 * trial
            z = Sketch(K).sums(torch.tensor(matrix), rows, 64 * trial).numpy()
            estimates.append((z**2).mean() / (matrix**2).sum())
        error = np.std(estimates)
        assert abs(np.mean(estimates) - 1) < 4 * error / 1500**0.5, "the mean over signs is the squared norm"
        assert error < 1.15 * (most / K) ** 0.5, "the relative standard error"
        assert error > 0.7 * (2 / K) ** 0.5, "no better than independent signs could be"


def test_signs_are_balanced_and_independent_of_each_other() -> None:
    found = Sketch(64).signs(torch.arange(4096), 0).numpy()
    assert set(np.unique(found)) == {-1.0, 1.0}
    assert np.abs(found.mean(0)).max() < 5 / 64, "five standard errors of a mean over 4096"
    products = found.T @ found / 4096 - np.eye(64)
    assert np.abs(products).max() < 6 / 64


def test_tables_hold_the_sums_of_values_gradients_and_parameters() -> None:
    given, model = batch(1), Toy()
    sink = watched(model, [given])
    assert set(sink.tables) == set(TABLES)
    plain = Toy()
    real = real_of(given).numpy()
    for path in ("decoder.layers.1.norm2", "decoder.layers.0.self_attn", "decoder.layers.0", "decoder.norm"):
        fresh = Toy()
        value, gradient = caught(fresh, given, path)
        for table, tensor in (("fingerprint", value), ("fingerprint_gradient", gradient)):
            zeroed = np.where(real[..., None], tensor.numpy(), 0)
            expected = sketched(zeroed.reshape(-1, 8), tokens(real).reshape(-1))
            np.testing.assert_allclose(sums(sink, table)[f"{path}:out"], expected, rtol=1e-5, atol=1e-7)
            norm = column(sink, table, "norm")[f"{path}:out"]
            assert norm == pytest.approx(np.linalg.norm(zeroed), rel=1e-6)
    # the keys of the cross-attention take the encoder's tokens, and their mask
    source = given["source_mask"].numpy()
    value, _ = caught(plain, given, "decoder.layers.0.cross_attn.k")
    zeroed = np.where(source[..., None], value.numpy(), 0)
    expected = sketched(zeroed.reshape(-1, 8), tokens(source).reshape(-1))
    np.testing.assert_allclose(sums(sink, "fingerprint")["decoder.layers.0.cross_attn.k:out"], expected, rtol=1e-5)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        direction = parameter.grad / (parameter.grad.double().abs() + 1e-8)
        for table, tensor in zip(TABLES[2:], (parameter.detach(), parameter.grad, direction), strict=True):
            matrix = tensor.numpy().reshape(tensor.shape[0], -1)
            np.testing.assert_allclose(
                sums(sink, table)[name], sketched(matrix, np.arange(len(matrix))), rtol=1e-4, atol=1e-7
            )


def test_the_calls_are_numbered_in_the_order_of_the_data() -> None:
    sink = watched(Toy(), [batch(1)])
    forward, backward = (column(sink, table, "call") for table in TABLES[:2])
    path = ["embed_source:out", "encoder.layers.0.self_attn:out", "encoder.layers.0.norm1:in", "encoder.norm:out"]
    path += ["decoder.layers.0.cross_attn:out", "decoder.layers.1.norm3:out", "head:in", "head:out"]
    assert sorted(path, key=forward.__getitem__) == path
    assert sorted(path, key=backward.__getitem__) == path[::-1]
    assert {column(sink, table, "ulp")["head.weight"] for table in TABLES[2:]} == {2.0**-23}


def test_micro_batches_and_padding_add_up_to_one_batch() -> None:
    whole = batch(2, 6)
    count = int(real_of(whole).sum())
    parts = [{name: tensor[at : at + 2] for name, tensor in whole.items()} for at in (0, 2, 4)]
    wider = {
        name: torch.cat((torch.zeros(6, 3, dtype=tensor.dtype), tensor, torch.zeros(6, 2, dtype=tensor.dtype)), 1)
        for name, tensor in whole.items()
    }
    model = Toy().double()
    one = watched(copy.deepcopy(model), [whole], count)
    for other in (watched(copy.deepcopy(model), parts, count), watched(copy.deepcopy(model), [wider], count)):
        for table in TABLES:
            expected, found = sums(one, table), sums(other, table)
            for place in expected:
                if not place.startswith(("embed", "head:")):  # outside the stacks no mask tells what is padding
                    atol = 1e-8 if table == TABLES[-1] else 1e-10  # a rounding of 1e-17 over an eps of 1e-8
                    np.testing.assert_allclose(found[place], expected[place], rtol=1e-9, atol=atol, err_msg=place)


def test_a_row_after_another_begins_its_samples_anew() -> None:
    model, sink = Toy(), ListSink()
    watcher = Watcher(model, sink, probes="fingerprint", every=1, reference=None)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch(1)).backward()
        watcher.step()
    watcher.flush()
    watcher.close()
    for table in TABLES:
        first, second = (rows[2][table].values for rows in sink.rows)
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_a_weight_that_is_stored_the_other_way_round_has_the_same_sums() -> None:
    class Conv1D(nn.Module):  # as Hugging Face's
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(linear.weight.detach().T.clone()), nn.Parameter(linear.bias.detach())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    plain, turned = Toy(), Toy()
    layer = turned.get_submodule("encoder.layers.1")
    layer.linear1 = Conv1D(plain.get_submodule("encoder.layers.1.linear1"))  # pyright: ignore
    one, other = watched(plain, [batch(1)]), watched(turned, [batch(1)])
    for table in TABLES:
        for place, expected in sums(one, table).items():
            np.testing.assert_allclose(sums(other, table)[place], expected, rtol=1e-4, atol=1e-7, err_msg=place)


def test_absent_gradients_stay_absent() -> None:
    model = Toy()
    model.head.bias.requires_grad_(False)
    sink = watched(model, [batch(1)])
    cells, layout = sink.rows[0][2]["fingerprint_weight_gradient"], sink.tables["fingerprint_weight_gradient"]
    absent = {row.site for row, gone in zip(layout.rows, cells.absent, strict=True) if gone}
    assert absent == {"head.bias"}


def test_watching_changes_nothing() -> None:
    def run(fingerprint: bool) -> dict[str, Any]:
        model, sink = Toy(dropout=0.2), ListSink()

        def watch(optimizer: torch.optim.Optimizer) -> Watcher:
            return Watcher(model, sink, probes="fingerprint", every=1)

        return train(model, 2, watch if fingerprint else None)

    plain, seen = run(False), run(True)
    for name in ("losses", "parameters"):
        assert all(torch.equal(a, b) for a, b in zip(plain[name], seen[name], strict=True)), name
    assert torch.equal(plain["rng"], seen["rng"])


def test_the_name_brings_its_companions_and_no_default_row_has_them() -> None:
    from stabilitylab.probes import PROBES, chosen

    assert chosen("fingerprint") == {name: name == "fingerprint" for name in TABLES}
    assert set(chosen("fingerprint,-fingerprint_gradient")) == {*TABLES} - {"fingerprint_gradient"}
    assert not {*TABLES} & set(chosen("default"))
    assert not any(PROBES[name].default for name in TABLES)


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("staged", "does not know how the stages of a pipeline share a batch"),
        ("split", "does not know parameters that share= says are split"),
    ],
)
def test_stages_and_layouts_of_the_caller_have_none(
    monkeypatch: pytest.MonkeyPatch, attribute: str, reason: str
) -> None:
    """A sentence where it is named; the group "all" leaves it out anyway."""
    monkeypatch.setattr(Parameters, attribute, True)
    with pytest.raises(UsageError, match=f"probe 'fingerprint' {reason}"):
        Watcher(Toy(), ListSink(), probes="fingerprint")
    with Watcher(Toy(), ListSink(), probes="all") as watcher:
        assert not any(name.startswith("fingerprint") for name in watcher.tables)


def test_rows_that_do_not_count_add_nothing_whatever_is_in_them() -> None:
    draw = np.random.default_rng(5)
    matrix, counted = draw.normal(size=(200, 3000)), draw.random(200) < 0.7  # several parts of bounded size
    torn = np.where(counted[:, None], matrix, np.nan)
    signs_of_rows = Sketch(K).signs(torch.arange(200), 0)
    sums, square = Sketch(K).sums_and_square(torch.tensor(torn), signs_of_rows, torch.tensor(counted))
    left = np.where(counted[:, None], matrix, 0)
    np.testing.assert_allclose(sums.numpy(), sketched(left, np.arange(200)), rtol=1e-10, atol=1e-9)
    assert square.item() == pytest.approx((left**2).sum(), rel=1e-12)


class Writes(nn.Module):
    """Writes into what it gets, as a kernel does that counts no version, before its inner module reads it."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.inner, self.write = nn.Linear(8, 8, bias=False), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.inner(x)


class Layers(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Writes(write), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.data.copy_(x.data.flip(-1)),  # other places, the same numbers
        lambda x: x.data[1].mul_(-1),
        lambda x: x.data[:, 3].add_(1e-3),
    ],
    ids=["channels turned", "a sample's sign", "one channel"],
)
def test_what_is_written_between_two_modules_is_seen_though_the_tensor_is_the_same(write: Any) -> None:
    """What leaves a module is not read again where it enters the next, unless something wrote into it meanwhile."""
    torch.manual_seed(0)
    model, sink, x = Layers(write), ListSink(), torch.randn(4, 5, 8)
    seen: dict[str, Tensor] = {}
    for name, at in (("left", model.layers[0]), ("entered", model.get_submodule("layers.1.inner"))):
        at.register_forward_hook(
            lambda module, args, y, name=name: seen.update({name: (y, args[0])[name == "entered"].detach().clone()})
        )
    with Watcher(model, sink, probes="fingerprint", every=1, reference=None) as watcher:
        model(x).square().mean().backward()
        watcher.step()
        watcher.flush()
    found = sums(sink, "fingerprint")
    index = tokens(np.ones((4, 5), dtype=bool)).reshape(-1)
    for name, place in (("left", "layers.0:out"), ("entered", "layers.1.inner:in")):
        np.testing.assert_allclose(
            found[place], sketched(seen[name].numpy().reshape(-1, 8), index), rtol=1e-5, atol=1e-5
        )
    assert not np.allclose(found["layers.0:out"], found["layers.1.inner:in"], rtol=1e-5, atol=1e-5)


def test_a_probe_may_be_one_for_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with PROBES.restored():

        @probe("alone", on="forward", at=layers, unit="1", columns={"value": Mean()})
        class Alone(Probe):
            """A number that does not add up over ranks."""

            in_one_process = True

            def measure(self, site: Any, x: Any, y: Tensor, weight: Tensor) -> Tensor:
                return y.mean(-1)

        Watcher(Toy(), ListSink(), probes="alone").close()
        monkeypatch.setattr(Parameters, "alone", False)
        with pytest.raises(UsageError, match="probe 'alone' is taken in a single process"):
            Watcher(Toy(), ListSink(), probes="alone")
