"""The estimate of a difference, the pairing of places, and the rules of what is over, on numbers made for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stabilitylab.bisect import Fingerprint, Gap, PlacePrint, gap
from stabilitylab.bisect.judging import ONE_ROUNDING, PlaceGap, first_over, judged, module_of
from stabilitylab.bisect.matching import matched
from stabilitylab.errors import UsageError

K = 16
ULP = 2.0**-23


def one(name: str, sums: np.ndarray, order: float = 0.0, norm: float = 1.0, **more: object) -> PlacePrint:
    return PlacePrint(name, order, norm, ULP, sums, **more)  # pyright: ignore


def of(label: str, **passes: list[PlacePrint]) -> Fingerprint:
    return Fingerprint(label, 0, {phase: {p.name: p for p in places} for phase, places in passes.items()})


def apart(by: float, name: str = "x:out", order: float = 0.0) -> PlacePrint:
    """A place that differs from that of zero sums by a relative error of ``by``."""
    return one(name, np.full(K, by), order)


def test_the_difference_is_that_of_the_sums_over_the_norm() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, K))
    found = gap(one("x", a, norm=4.0), one("x", b, norm=5.0))
    squares = (a - b) ** 2
    assert found.relative == pytest.approx(math.sqrt(squares.mean()) / 4, rel=1e-12)
    # the delta method, by hand: sd of the root of a mean of k squares
    error = squares.std(ddof=1) / math.sqrt(K) / (2 * math.sqrt(squares.mean())) / 4
    assert found.error == pytest.approx(error, rel=1e-12)


def test_the_standard_error_is_the_spread_over_signs() -> None:
    draw = np.random.default_rng(1)
    errors, found = [], []
    for _ in range(4000):
        z = draw.normal(size=K)  # sums of many entries are normal; their difference has the norm 1
        each = gap(one("x", z), one("x", np.zeros(K)))
        errors.append(each.error)
        found.append(each.relative)
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.1)
    assert np.mean(np.square(found)) == pytest.approx(1, rel=0.03), "unbiased in the square"


def test_equal_absent_and_infinite_places() -> None:
    zero = np.zeros(K)
    assert gap(one("x", zero), one("x", zero)) == Gap(0.0)
    assert gap(one("x", zero, absent=True), one("x", zero, absent=True)) == Gap(0.0)
    assert gap(one("x", zero, absent=True), one("x", zero)).relative == math.inf
    assert gap(one("x", zero, norm=0.0), one("x", zero + 1)).relative == math.inf
    broken = np.full(K, math.nan)
    assert gap(one("x", broken), one("x", broken)) == Gap(0.0)
    assert gap(one("x", zero), one("x", broken)).relative == math.inf


def places(errors: dict[str, float], controls: dict[str, float], phase: str = "forward") -> tuple[PlaceGap, ...]:
    zero = [one(name, np.zeros(K), at) for at, name in enumerate(errors)]
    other = [apart(error, name, at) for at, (name, error) in enumerate(errors.items())]
    control = [apart(error, name, at) for at, (name, error) in enumerate(controls.items())]
    a = of("a", **{phase: zero})
    return judged(matched(a, of("b", **{phase: other})), [matched(a, of("c", **{phase: control}))], made=True)


def test_the_added_error_is_what_the_control_and_the_input_do_not_explain() -> None:
    # gain of the control: 2; the input is 10 times the control, so that 0.4 of 0.5 is inherited
    found = places({"m:in": 0.2, "m:out": 0.5}, {"m:in": 0.02, "m:out": 0.04})
    assert found[1].inherited == pytest.approx(0.04 / 0.02 * 0.2, rel=1e-12)
    assert found[1].added == pytest.approx(math.sqrt(0.5**2 - 0.4**2), rel=1e-12)
    assert found[1].factor == pytest.approx(0.3 / 0.04, rel=1e-12)
    # an error below what is inherited adds nothing
    assert places({"m:in": 0.2, "m:out": 0.3}, {"m:in": 0.02, "m:out": 0.04})[1].added == 0.0


def test_the_first_over_the_limit_is_named_and_what_follows_inherits() -> None:
    errors = {"a:in": 1e-6, "a:out": 1e-6, "b.f:in": 1e-6, "b.f:out": 0.1, "c:in": 0.1, "c:out": 0.12}
    found = places(errors, dict.fromkeys(errors, 1e-6))
    first = first_over(found, 3.0)
    assert first is not None
    assert (first.name, first.blamed) == ("b.f:out", "b.f")
    assert not found[4].is_over(3.0), "what enters c is explained by what left b"
    # what enters a module already wrong is the fault of the module around it
    found = places(
        {"a.f:out": 1e-6, "a.g:in": 0.1, "a.g:out": 0.1}, dict.fromkeys(("a.f:out", "a.g:in", "a.g:out"), 1e-6)
    )
    first = first_over(found, 3.0)
    assert first is not None
    assert (first.name, first.blamed) == ("a.g:in", "a")


def test_the_control_is_never_below_one_rounding_and_grows_in_stored_runs() -> None:
    zero = [one(f"m{at}:out", np.zeros(K), at) for at in range(20)]
    a = of("a", forward=zero)
    pairs = matched(a, of("b", forward=[one(p.name, p.sums + 1e-7, p.order) for p in zero]))
    made, kept = judged(pairs, [], made=True), judged(pairs, [], made=False)
    assert {place.control for place in made} == {ONE_ROUNDING * ULP}
    assert kept[19].control == pytest.approx(ONE_ROUNDING * ULP * math.sqrt(1 + 20 / 4))
    assert [place.control for place in kept] == sorted(place.control for place in kept)


def test_the_limit_is_a_limit() -> None:
    errors, controls = {"m:out": 2.9e-3}, {"m:out": 1e-3}
    assert first_over(places(errors, controls), 3.0) is None
    assert first_over(places({"m:out": 3.1e-3}, controls), 3.0) is not None
    assert first_over(places(errors, controls), 2.0) is not None


def test_a_gradient_without_a_signal_is_not_judged() -> None:
    sums = np.zeros(K)
    a = of("a", gradients=[one("l.k.bias", sums, norm=1e-9, layer=1), one("l.k.weight", sums, norm=1.0, layer=1)])
    b = of("b", gradients=[one("l.k.bias", sums + 1e-9, norm=1e-9, layer=1), one("l.k.weight", sums, layer=1)])
    bias, weight = judged(matched(a, b), [], made=False)
    assert (bias.judged, weight.judged) == (False, True)
    assert first_over((bias, weight), 3.0) is None
    assert module_of("l.k.bias") == "l.k"


def test_a_gradient_that_two_modules_share_belongs_to_the_one_that_yields_it() -> None:
    shared, clean = np.full(K, 0.5), np.zeros(K)
    names = ["up:in", "norm:out", "mlp:in", "norm:in"]
    a = of("a", backward=[one(n, clean if n == "up:in" else shared, at) for at, n in enumerate(names)])
    b = of("b", backward=[one(n, clean if n == "up:in" else 2 * shared, at) for at, n in enumerate(names)])
    first = first_over(judged(matched(a, b), [], made=True), 3.0)
    assert first is not None
    assert first.blamed == "norm" or first.name == "mlp:in"
    assert first.name == "mlp:in"


def test_places_are_paired_by_name_then_by_structure() -> None:
    sums = np.zeros(K)
    ours = [
        one("emb:out", sums, 0),
        one("h.0.f:in", sums, 1, stack="h", layer=1, sublayer="f"),
        one("h.0.f:out", sums + 1, 2, stack="h", layer=1, sublayer="f"),
    ]
    theirs = [
        one("e:out", sums, 0),
        one("l.0.g:in", sums, 1, stack="l", layer=1, sublayer="f"),
        one("l.0.g:out", sums + 5, 2, stack="l", layer=1, sublayer="f"),
    ]
    found = matched(of("a", forward=ours), of("b", forward=theirs))
    assert [(p.a.name, p.b.name) for p in found.pairs] == list(
        zip([p.name for p in ours], [p.name for p in theirs], strict=True)
    )
    assert found.by == "structure"
    more = matched(
        of("a", forward=ours), of("b", forward=[*theirs, one("x:out", sums + 9, 3, stack="l", layer=1, sublayer="f")])
    )
    assert [p.a.name for p in more.pairs] == ["emb:out", "h.0.f:in"], "two places may not stand for one"
    assert more.only_b == {"forward": ["l.0.g:out", "x:out"]}
    named = matched(of("a", forward=ours), of("b", forward=theirs), [r"^l\.(\d)\.g=h.\1.f", "^e:=emb:"])
    assert (len(named.pairs), named.by) == (3, "map")
    with pytest.raises(UsageError, match="no place in common: pair them with --map"):
        matched(of("a", forward=ours), of("b", backward=theirs))
    for wrong in ("h", "=x", "(=x"):
        with pytest.raises(UsageError, match="--map"):
            matched(of("a", forward=ours), of("b", forward=theirs), [wrong])


def test_a_gradient_of_a_copy_is_not_compared_with_that_of_a_shared_tensor() -> None:
    shared, part = np.full(K, 0.5), np.full(K, 0.2)
    a = of("a", backward=[one("fc:in", shared, 0), one("norm:out", shared, 1)])
    b = of("b", backward=[one("fc:in", part, 0), one("norm:out", shared, 1)])  # of x.clone(), without the residual
    found = {place.name: place for place in judged(matched(a, b), [], made=True)}
    assert (found["fc:in"].judged, found["norm:out"].judged) == (False, True)
    c = of("c", backward=[one("fc:in", part, 0), one("norm:out", part, 1)])
    wrong = {place.name: place for place in judged(matched(a, c), [], made=True)}
    assert all(place.judged for place in wrong.values())
