"""Each detector on made-up numbers with a known answer, just over its threshold and just under it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from diagnose_cases import Made, falling, found, kinds, layer_rows, made, only
from edited_runs import edit

from stabilitylab.diagnose import DETECTORS, Event, detector
from stabilitylab.diagnose.detectors.gradients import EXPLODED, VANISHED
from stabilitylab.diagnose.detectors.jumps import LR_JUMP, UPDATE_JUMP, WEIGHT_JUMP
from stabilitylab.diagnose.detectors.norm_inputs import LN_GROWTH, LN_JUMP
from stabilitylab.errors import InputError
from stabilitylab.schema import Row

STEPS = range(40)
AT = 30


def steady(step: int, rows: int, value: float = 1.0) -> np.ndarray:
    return np.full((rows, 1), value)


def jumping(factor: float, place: int = 2, rows: int = 4, at: int = AT):
    """1 everywhere; ``factor`` at ``place`` and above from step ``at`` on."""
    return lambda step: np.array([[factor if step >= at and n >= place else 1.0] for n in range(rows)])


@pytest.mark.parametrize(("factor", "seen"), [(1.01 * LR_JUMP, True), (0.99 * LR_JUMP, False)])
def test_a_learning_rate_jump_is_against_its_maximum_so_far(tmp_path: Path, factor: float, seen: bool) -> None:
    rates = [1e-4 if t < AT else 1e-4 * factor for t in STEPS]
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40), "lr": rates}))
    assert ("lr_jump" in kinds(diagnosis)) == seen
    if seen:
        event = only(diagnosis, "lr_jump")
        assert (event.step, event.after, event.strength) == (AT, AT - 1, pytest.approx(1.01))


def test_warm_up_from_nearly_zero_and_restarts_are_no_jumps(tmp_path: Path) -> None:
    warm = [1e-7 + (3e-4 - 1e-7) * t / 20 for t in range(20)]
    restarts = [3e-4 * (1 + math.cos(math.pi * (t % 10) / 10)) / 2 for t in range(40)]
    diagnosis = found(made(tmp_path / "run", {"loss": falling(60), "lr": [*warm, *restarts]}))
    assert "lr_jump" not in kinds(diagnosis)


@pytest.mark.parametrize(("factor", "seen"), [(1.01 * UPDATE_JUMP, True), (0.99 * UPDATE_JUMP, False)])
def test_an_update_jump_names_the_layer_with_the_largest(tmp_path: Path, factor: float, seen: bool) -> None:
    table = Made(layer_rows(4), ("value", "rms"), lambda t: np.hstack([jumping(factor, 3)(t)] * 2), STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"update_ratio": table}))
    assert ("update_jump" in kinds(diagnosis)) == seen
    if seen:
        event = only(diagnosis, "update_jump")
        assert (event.step, event.phase, event.place) == (AT, "update", layer_rows(4)[3])
        assert f"{factor:.3g} times the median of rows 0-29" in event.evidence


def test_an_update_that_grows_from_next_to_nothing_moves_nothing(tmp_path: Path) -> None:
    def values(t: int) -> np.ndarray:
        tiny = 1e-9 if t >= AT else 1e-12
        return np.array([[tiny, tiny], [1.0, 1.0]])

    diagnosis = found(
        made(
            tmp_path / "run",
            {"loss": falling(40)},
            {"update_ratio": Made(layer_rows(2), ("value", "rms"), values, STEPS)},
        )
    )
    assert kinds(diagnosis) == set()


@pytest.mark.parametrize(("factor", "seen"), [(1.01 * WEIGHT_JUMP, True), (0.99 * WEIGHT_JUMP, False)])
@pytest.mark.parametrize("down", [False, True])
def test_weights_are_judged_by_rms_over_ratio(tmp_path: Path, factor: float, seen: bool, down: bool) -> None:
    scale = 1 / factor if down else factor

    def values(t: int) -> np.ndarray:  # rms 1e-3; ||theta|| jumps at layer 2
        weights = np.array([1.0, scale if t >= AT else 1.0])
        return np.stack([1e-3 / weights, [1e-3, 1e-3]], axis=1)

    diagnosis = found(
        made(
            tmp_path / "run",
            {"loss": falling(40)},
            {"update_ratio": Made(layer_rows(2), ("value", "rms"), values, STEPS)},
        )
    )
    assert ("weight_jump" in kinds(diagnosis)) == seen
    if seen:
        event = only(diagnosis, "weight_jump")
        assert (event.step, event.place) == (AT, layer_rows(2)[1])
        assert event.numbers == pytest.approx({"rms_before": 1.0, "rms": scale})


@pytest.mark.parametrize(("factor", "seen"), [(1.01 * LN_JUMP, True), (0.99 * LN_JUMP, False)])
def test_sudden_growth_of_norm_inputs_names_the_lowest_layer(tmp_path: Path, factor: float, seen: bool) -> None:
    table = Made(layer_rows(4), ("value",), jumping(factor), STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"ln_input": table}))
    assert ("ln_growth" in kinds(diagnosis)) == seen
    if seen:
        event = only(diagnosis, "ln_growth")
        assert (event.step, event.place, event.places) == (AT, layer_rows(4)[2], 2)


def test_slow_growth_is_against_the_start_and_a_large_scale_alone_is_none(tmp_path: Path) -> None:
    """DeepNorm's alpha sqrt(d) is 100 from the start; 1.1^t passes 10 at t = 25."""
    table = Made(layer_rows(2), ("value",), lambda t: [[100.0], [1.1**t]], STEPS)
    event = only(found(made(tmp_path / "run", {"loss": falling(40)}, {"ln_input": table})), "ln_growth")
    first = math.ceil(math.log(LN_GROWTH) / math.log(1.1))
    assert (event.step, event.place, event.places) == (first, layer_rows(2)[1], 1)
    assert event.severity == "note"  # the loss falls on
    stands = [5.0 - 0.1 * min(t, first) for t in range(60)]
    event = only(found(made(tmp_path / "other", {"loss": stands}, {"ln_input": table})), "ln_growth")
    assert (event.step, event.severity) == (first, "warning")


@pytest.mark.parametrize("table", ["grad_norm", "activation_grad_norm"])
def test_a_geometric_decay_gives_back_its_rate(tmp_path: Path, table: str) -> None:
    values = np.exp(0.7 * np.arange(20))[:, None]
    path = made(
        tmp_path / "run", {"loss": [3.0] * 40}, {table: Made(layer_rows(20), ("value",), lambda t: values, STEPS)}
    )
    event = only(found(path), "vanishing_gradient")
    assert event.numbers["nats_per_layer"] == pytest.approx(0.7)
    assert event.numbers["r_squared"] == pytest.approx(1)
    assert event.numbers["share_of_largest"] == pytest.approx(math.exp(-0.7 * 19))
    assert event.places == sum(math.exp(-0.7 * n) < VANISHED for n in range(20))
    assert (event.step, event.place, event.severity) == (0, layer_rows(20)[0], "warning")  # a plateau: it matters


def test_a_vanishing_gradient_of_a_run_that_learns_is_a_note(tmp_path: Path) -> None:
    values = np.exp(0.7 * np.arange(20))[:, None]
    table = Made(layer_rows(20), ("value",), lambda t: values, STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"grad_norm": table}))
    assert (only(diagnosis, "vanishing_gradient").severity, diagnosis.verdict) == ("note", "healthy")
    assert "Note: the gradient of layer 1" in str(diagnosis)


def test_a_gradient_that_grows_downwards_is_an_exploding_one(tmp_path: Path) -> None:
    values = np.exp(-0.7 * np.arange(20))[:, None]
    table = Made(layer_rows(20), ("value",), lambda t: values, STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": [3.0] * 40}, {"grad_norm": table}))
    assert "vanishing_gradient" not in kinds(diagnosis)
    assert only(diagnosis, "exploding_gradient").place == layer_rows(20)[0]


@pytest.mark.parametrize("flushed", [True, False])
def test_zeros_below_a_decay_have_vanished_and_are_no_dead_layers(tmp_path: Path, flushed: bool) -> None:
    values = np.exp(8.0 * np.arange(8))[:, None]
    values[:3] = 0
    table = Made(layer_rows(8), ("value",), lambda t: values, STEPS)
    path = made(tmp_path / "run", {"loss": [3.0] * 40}, {"grad_norm": table}, flush_denormal=flushed)
    diagnosis = found(path)
    assert kinds(diagnosis) == {"vanishing_gradient", "plateau"}
    assert ("0 (or below 1.2e-38)" in only(diagnosis, "vanishing_gradient").evidence) == flushed


def test_one_weak_row_is_noise_and_unevenness_within_bounds_is_none(tmp_path: Path) -> None:
    def values(t: int) -> list[list[float]]:
        return [[1e-6 if t == AT else 0.1], [0.2], [1.0]]

    table = Made(layer_rows(3), ("value",), values, STEPS)
    assert kinds(found(made(tmp_path / "run", {"loss": [3.0] * 40}, {"grad_norm": table}))) == {"plateau"}


@pytest.mark.parametrize(("factor", "seen"), [(1.01 * EXPLODED, True), (0.99 * EXPLODED, False)])
def test_an_exploding_gradient_is_seen_in_the_total_and_placed_by_the_table(
    tmp_path: Path, factor: float, seen: bool
) -> None:
    table = Made(layer_rows(4), ("value",), jumping(factor, 3), STEPS, total="norm")
    total = [1.0 if t < AT else factor for t in STEPS]
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40), "grad_norm_total": total}, {"grad_norm": table}))
    assert ("exploding_gradient" in kinds(diagnosis)) == seen
    if seen:
        first = diagnosis.cause.first
        assert first is not None
        assert first.place is not None
        assert (first.step, first.place.layer) == (AT, 4)


def test_a_jump_after_rows_of_mostly_zeros_has_no_factor_over_their_median(tmp_path: Path) -> None:
    """A loss scaler skips the first updates: 0, 0, 0 and one small number, then one far above it."""
    course = [0.0, 0.0, 0.0, 1e-3, *[1.0] * 36]
    table = Made(layer_rows(2), ("value", "rms"), lambda t: np.full((2, 2), course[t]), STEPS)
    metrics = {"loss": falling(40), "grad_norm_total": course}
    diagnosis = found(made(tmp_path / "run", metrics, {"update_ratio": table}))
    for kind, what in (("exploding_gradient", "the gradient norm"), ("update_jump", "the rms of the update")):
        event = only(diagnosis, kind)
        assert event.step == 4
        assert event.evidence.startswith(what)
        assert event.evidence.endswith("is 1 at step 4, after a median of 0 in rows 0-3")
        assert event.numbers == {"value": 1.0, "times_largest_before": pytest.approx(1000)}


def test_absent_zero_and_unmoved_are_different_findings(tmp_path: Path) -> None:
    rows = [*layer_rows(3), Row("head", "", 0, "head")]
    gradients = Made(
        rows, ("value",), lambda t: [[np.nan], [0.0], [1.0], [1.0]], STEPS, absent=lambda t, row: row.layer == 1
    )
    updates = Made(rows, ("value", "rms"), lambda t: [[0, 0], [0, 0], [0, 0], [1, 1.0]], STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"grad_norm": gradients, "update_ratio": updates}))
    texts = [event.evidence for event in diagnosis.events if event.kind == "dead_layer"]
    assert len(texts) == 3
    assert any("layer 1 of encoder has no gradient" in text for text in texts)
    assert any("layer 2 of encoder has a gradient of exactly 0" in text for text in texts)
    assert any("layer 3 of encoder has a gradient but no update" in text for text in texts)


@pytest.mark.parametrize(("share", "seen"), [(0.049, True), (0.051, False)])
def test_attention_entropy_is_read_where_it_is_recorded(tmp_path: Path, share: float, seen: bool) -> None:
    def values(t: int) -> list[list[float]]:
        return [[2.0, 3.0, 10.0], [3.0 * share if t >= AT else 2.0, 3.0, 10.0]]

    table = Made(layer_rows(2), ("entropy", "ceiling", "max_logit"), values, STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"attention": table}))
    assert ("attention_collapse" in kinds(diagnosis)) == seen
    assert "attention_collapse" in diagnosis.checked
    if seen:
        assert only(diagnosis, "attention_collapse").place == layer_rows(2)[1]


def test_large_attention_logits_are_an_event_of_their_own(tmp_path: Path) -> None:
    table = Made(layer_rows(2), ("entropy", "ceiling", "max_logit"), lambda t: [[2, 3, 1], [2, 3, 10.0 * t]], STEPS)
    event = only(found(made(tmp_path / "run", {"loss": falling(40)}, {"attention": table})), "attention_logits")
    assert (event.step, event.place) == (11, layer_rows(2)[1])


@pytest.mark.parametrize(
    ("modules", "since", "severity"),
    [
        (2, 16, "warning"),  # of four modules, and in 24 of 40 rows: half of them and three fifths
        (2, 17, "note"),
        (1, 0, None),  # spent from the start, in fewer than half
        (1, 10, "note"),
        (3, 0, "warning"),
        (4, 39, None),  # in the last row alone, which does not last
    ],
)
def test_sharp_attention_is_trouble_where_most_modules_had_it_early(
    tmp_path: Path, modules: int, since: int, severity: str | None
) -> None:
    def values(t: int) -> list[list[float]]:
        return [[0.01 if place < modules and t >= since else 2.0, 3.0] for place in range(4)]

    table = Made(layer_rows(4), ("entropy", "ceiling"), values, STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"attention": table}))
    severities = [event.severity for event in diagnosis.events if event.kind == "attention_collapse"]
    assert severities == ([] if severity is None else [severity])
    if severity == "warning":
        (event,) = (event for event in diagnosis.events if event.kind == "attention_collapse")
        assert f"{modules} of 4 attention modules are below 0.05 at the end, and half or more are " in event.evidence
        assert (event.step, event.usual, event.consequence) == (since, False, "still so at the last row")
        assert diagnosis.verdict == "warning"
    else:
        assert diagnosis.verdict == "healthy"


@pytest.mark.parametrize(("loss", "severity"), [("falls", "note"), ("stays", "warning")])
def test_late_sharp_attention_and_large_logits_are_judged_by_the_loss(tmp_path: Path, loss: str, severity: str) -> None:
    def values(t: int) -> list[list[float]]:
        return [[2.0, 3.0, 10.0]] * 2 + [[0.1 if t >= 20 else 2.0, 3.0, 120.0 if t >= 20 else 10.0]]

    course = falling(60)
    losses = course if loss == "falls" else [*course[:20], *[course[19] + 0.2 * (t % 2) for t in range(40)]]
    table = Made(layer_rows(3), ("entropy", "ceiling", "max_logit"), values, range(60))
    diagnosis = found(made(tmp_path / "run", {"loss": losses}, {"attention": table}))
    for kind in ("attention_collapse", "attention_logits"):
        (event,) = (event for event in diagnosis.events if event.kind == kind)
        assert (event.step, event.severity, event.usual) == (20, severity, True)
        assert event.consequence == f"the loss reached {'a' if severity == 'note' else 'no'} new minimum after it"


def test_what_the_run_wrote_down_itself_goes_before_what_is_read_from_rows(tmp_path: Path) -> None:
    path = made(tmp_path / "run", {"loss": [1.0, 1.0, math.nan]})
    incident = {
        "step": 1,
        "micro_batch": 2,
        "phase": "backward",
        "kind": "gradient",
        "name": "head.weight",
        "stack": "",
        "paragraph": "Step 1, micro-batch 2: the gradient of head.weight is infinite.",
    }
    edit(path / "incident.json", incident, layer=0, sublayer="", value="inf")
    event = only(found(path), "non_finite")
    assert (event.step, event.phase, event.probe) == (1, "backward", "incident.json")
    assert event.evidence == incident["paragraph"]
    assert (event.place, event.numbers) == (Row("head.weight"), {"value": "inf", "kind": "gradient"})
    (path / "incident.json").write_text("{}")
    with pytest.raises(InputError, match=r"incident.json is damaged"):
        found(path)


def test_non_finite_places_are_the_lowest_on_the_way_up_and_the_highest_on_the_way_down(tmp_path: Path) -> None:
    def broken(t: int) -> list[list[float]]:
        return [[1.0], [math.inf if t >= AT else 1.0], [math.nan if t >= AT else 1.0], [1.0]]

    rows = layer_rows(4)
    up = found(made(tmp_path / "up", {"loss": falling(40)}, {"ln_input": Made(rows, ("value",), broken, STEPS)}))
    down = found(made(tmp_path / "down", {"loss": falling(40)}, {"grad_norm": Made(rows, ("value",), broken, STEPS)}))
    assert only(up, "non_finite").place == rows[1]
    assert only(down, "non_finite").place == rows[2]
    assert "layer 1 of encoder (ffn) before it is finite" in only(up, "non_finite").evidence
    assert "layer 4 of encoder (ffn) before it is finite" in only(down, "non_finite").evidence


def test_a_table_that_is_finite_in_the_step_clears_itself(tmp_path: Path) -> None:
    loss = [*falling(AT), *[math.nan] * 10]
    path = made(
        tmp_path / "run", {"loss": loss}, {"ln_input": Made(layer_rows(2), ("value",), lambda t: [[1], [1]], STEPS)}
    )
    assert "every number of ln_input is finite in that step before it" in only(found(path), "non_finite").evidence


def test_a_table_whose_nan_is_excused_does_not_clear_itself(tmp_path: Path) -> None:
    """The cosine of a zero vector, 0 / 0, is no broken number; but it is no finite one either."""
    loss = [*falling(AT), *[math.nan] * 10]

    def said(name: str, nan_at: int) -> bool:
        cosine = Made(layer_rows(2), ("raw",), lambda t: [[math.nan if t == nan_at else 1.0]] * 2, STEPS)
        event = only(found(made(tmp_path / name, {"loss": loss}, {"cosine_similarity": cosine})), "non_finite")
        assert (event.step, event.place) == (AT, None)
        return "every number of cosine_similarity is finite in that step before it" in event.evidence

    assert not said("then", AT)
    assert said("before", AT - 1)


@pytest.mark.parametrize(
    ("last", "end", "severity"),
    [(AT + 3, "falling", "note"), (None, "falling", "warning"), (AT + 3, "flat", "warning")],
)
def test_a_jump_of_the_rate_that_was_taken_back_and_healed_is_a_note(
    tmp_path: Path, last: int | None, end: str, severity: str
) -> None:
    rates = [1e-2 if t >= AT and (last is None or t < last) else 1e-4 for t in range(60)]
    losses = falling(60)
    if end == "flat":
        losses = [*losses[:AT], *[losses[AT - 1] + 0.5] * 30]
    event = only(found(made(tmp_path / "run", {"loss": losses, "lr": rates})), "lr_jump")
    assert (event.step, event.severity) == (AT, severity)


@pytest.mark.parametrize(("later", "severity"), [(-0.2, "note"), (0.3, "warning")])
def test_slow_growth_is_judged_by_the_level_of_the_loss_not_by_a_row_that_was_low(
    tmp_path: Path, later: float, severity: str
) -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.02, 80)
    losses = [4.0 - 0.01 * min(t, 40) + (later if t > 40 else 0.0) + noise[t] for t in range(80)]
    losses[20] -= 1.0  # one easy batch, which no level comes below
    table = Made(layer_rows(2), ("value",), lambda t: np.full((2, 1), 1.3 ** max(t - 36, 0)), tuple(range(80)))
    event = only(found(made(tmp_path / "run", {"loss": losses}, {"ln_input": table})), "ln_growth")
    assert event.severity == severity


@pytest.mark.parametrize(("forward", "place"), [(False, None), (True, 3)])
def test_a_nan_loss_is_not_laid_to_the_gradients_that_it_breaks(
    tmp_path: Path, forward: bool, place: int | None
) -> None:
    """Every gradient is NaN after a NaN loss, which arose in the loss or in the forward pass before it."""
    nan = [*falling(AT), *[math.nan] * 10]
    norms = Made(layer_rows(4), ("value",), jumping(math.nan if forward else 1.0), STEPS)
    gradients = Made(layer_rows(4), ("value",), lambda t: steady(t, 4, math.nan if t >= AT else 1.0), STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": nan}, {"ln_input": norms, "grad_norm": gradients}))
    event = only(diagnosis, "non_finite")
    assert (event.step, event.place and event.place.layer, event.strength) == (AT, place, None)
    if not forward:
        assert diagnosis.layers == []
        assert "numbers that depend on it broke after it in the same step: grad_norm.value of layer 4" in event.evidence
        assert "every number of ln_input is finite in that step before it" in event.evidence


@pytest.mark.parametrize(("metric", "place"), [("loss", None), ("grad_norm_total", 4)])
def test_a_number_lost_between_probed_rows_is_placed_by_what_it_depends_on(
    tmp_path: Path, metric: str, place: int | None
) -> None:
    """A frozen layer has no gradient, so that not every place breaks: that tells nothing of a loss."""
    metrics = {"loss": falling(40), metric: [1.0] * AT + [math.nan] * 10}
    probed = range(2, 40, 4)  # the next is 30 + 4
    rows = layer_rows(4)
    gradients = Made(rows, ("value",), lambda t: steady(t, 4, math.nan if t > AT else 1.0), probed,
                     absent=lambda t, row: row.layer == 1)  # fmt: skip
    event = only(found(made(tmp_path / "run", metrics, {"grad_norm": gradients})), "non_finite")
    assert (event.step, event.place and event.place.layer) == (AT, place)


def test_a_detector_of_a_plug_in_that_fails_is_named_and_the_others_are_asked(tmp_path: Path) -> None:
    path = made(tmp_path / "run", {"loss": falling(60)})
    before = found(path)
    with DETECTORS.restored():

        @detector("mine", "mine", reads={"loss": "w.step(loss=loss)"})
        def _(evidence: object) -> list[Event]:
            raise ValueError("my bug")

        after = found(path)
    assert after.unchecked["mine"] == f"the detector 'mine' of {__name__} failed: ValueError: my bug"
    assert (after.verdict, after.events, after.checked) == (before.verdict, before.events, before.checked)
