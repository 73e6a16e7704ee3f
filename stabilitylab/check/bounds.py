"""The bounds that a model has to keep before it is trained, and what breaks them.

Set before any model was checked, but for those on updates: ||dF|| over ||F|| above .5 was a failure until a GPT-2
with its usual initialisation, which trains well at lr 1e-3, moved its output by 115 % with its first Adam update
(behind a norm, 140 % is a right angle). It is a warning since, and an update that is larger than the weights is the
failure. At .5 it warned of 65 % of the healthy runs of results/alarm, training half; at 1.3, 80 degrees behind a
norm, of 18 % of 130 healthy ones and of 54 % of 65 that failed from within.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..kernels import suspected
from ..probes.incidents.report import Incident
from .result import Breach, OneLayer

Numbers = Mapping[str, Any]
FP16_MAX = 65504.0


@dataclass(frozen=True)
class Bound:
    """``statistic`` beyond ``limit`` is a finding: "fail" makes the check fail, "warn" does not."""

    name: str
    statistic: str
    limit: float
    severity: Literal["fail", "warn"]
    reason: str


def _bounds(*bounds: Bound) -> dict[tuple[str, str], Bound]:
    return {(bound.name, bound.severity): bound for bound in bounds}


BOUNDS = _bounds(
    Bound("not finite", "numbers that are NaN or inf", 0, "fail", "nothing trains after it"),
    Bound("no gradient", "trainable layers without any gradient that is not 0", 0, "fail", "they will not be trained"),
    Bound("no update", "layers with a gradient that one update leaves as they were", 0, "fail",
          "they are not in the optimizer, its rate is 0, or updates are below the rounding of the weights"),
    Bound("exploding gradient", "growth of ||dE/dx|| from a stack's top to a layer", 1e3, "fail",
          "the lowest layers then decide the norm that clipping sees, and the others stand still"),
    Bound("exploding gradient", "growth of ||dE/dx|| from a stack's top to a layer", 30, "warn",
          "lower layers learn at another rate than upper ones"),
    Bound("vanishing gradient", "||dE/dx|| of a layer over the largest of its stack (beyond: below)", 1e-6, "fail",
          "it is of the size of float32's rounding of the largest (6e-8 of each entry)"),
    Bound("vanishing gradient", "||dE/dx|| of a layer over the largest of its stack (beyond: below)", 1e-3, "warn",
          "Adam evens out sizes, but not the noise that comes with them"),
    Bound("under eps", "share of a layer's gradient entries, not 0, below the optimizer's eps", 0.5, "fail",
          "Adam divides by sqrt(v) + eps, so that such entries hardly move: lower eps or scale the loss"),
    Bound("update", "||dtheta|| over ||theta|| of a sub-layer, at the learning rate that was given", 1.0, "fail",
          "one step replaces the weights: warm up, or lower the learning rate"),
    Bound("output moved", "||dF|| of one update over ||F||, at the learning rate that was given", 1.3, "warn",
          "a linear picture of the loss does not hold for such a step: warm up if training starts with it"),
    Bound("loss rises", "nats by which one update raises the loss on its own batch", 0.5, "fail",
          "the step overshoots even the batch that it was taken on"),
    Bound("loss rises", "nats by which one update raises the loss on its own batch", 0.0, "warn",
          "the step overshoots even the batch that it was taken on"),
    Bound("branch", "variance that a layer adds over that of what enters it", 100, "warn",
          "the layer overwrites the residual stream"),
    Bound("norm input", "largest input of a layer's norms over that of its stack's first layer", 100, "warn",
          "the gradient through a norm is divided by the size of its input"),
    Bound("attention logit", "largest logit", 50, "warn",
          "attention puts everything on one key, and no gradient comes through the softmax"),
    Bound("fp16 overflow", "largest |x| of a layer", FP16_MAX / 8, "warn", "fp16 ends at 65504; bf16 does not"),
    Bound("fp16 underflow", "share of gradient entries, not 0, below 2^-24", 0.5, "warn",
          "fp16 makes them 0 without a loss scale; bf16 does not"),
)  # fmt: skip


def judge(
    layers: Sequence[OneLayer],
    numbers: Numbers,
    incident: Incident | None,
    precision: str,
    computed: Mapping[str, Any] | None = None,
) -> list[Breach]:
    """All that is beyond a bound, failures first, each kind at the layer where it is met first. ``computed``: how
    (:func:`stabilitylab.probes.numerics.numerics`)."""
    checks: tuple[Callable[[], Iterator[Breach]], ...] = (
        lambda: _not_finite(incident, computed),
        lambda: _no_gradient(layers),
        lambda: _along_stacks(layers),
        lambda: _single(layers, precision),
        lambda: _update(layers, numbers),
    )
    found = [finding for check in checks for finding in check()]
    return sorted(found, key=lambda finding: finding.severity != "fail")


def _finding(name: str, severity: str, layer: OneLayer | None, value: float, text: str) -> Breach:
    bound = BOUNDS[name, severity]
    where = layer or OneLayer("", 0, "", {})
    return Breach(name, bound.severity, where.stack, where.number, where.site, value, bound.limit, text, bound.reason)


def _worse(name: str, value: float, below: bool = False) -> Literal["fail", "warn"] | None:
    for severity in ("fail", "warn"):
        bound = BOUNDS.get((name, severity))
        if bound is not None and (value < bound.limit if below else value > bound.limit):
            return severity
    return None


def _not_finite(incident: Incident | None, computed: Mapping[str, Any] | None) -> Iterator[Breach]:
    if incident is not None:
        layer = OneLayer(incident.stack, incident.layer, incident.name, {})
        first = incident.step == 0 and incident.phase != "backward"  # no backward pass came before it
        how = "call torch.backends.cuda.enable_cudnn_sdp(False)"  # under autocast nobody knows the type of attention
        kernel = "" if first else suspected(computed, None, how)
        yield _finding("not finite", "fail", layer, math.nan, "; ".join(filter(None, (incident.paragraph, kernel))))


def _no_gradient(layers: Sequence[OneLayer]) -> Iterator[Breach]:
    still = [one for one in layers if one.number and "zero" in one.numbers and not one["zero"] < 1]
    still = [one for one in still if not one["zero_later"] < 1]
    for one in still[:1]:
        what = "no parameter of it has a gradient" if not one["given"] else "every entry of its gradient is exactly 0"
        others = f", and so in {len(still) - 1} others" if len(still) > 1 else ""
        yield _finding("no gradient", "fail", one, 0.0, f"{what}{others}")


def _along_stacks(layers: Sequence[OneLayer]) -> Iterator[Breach]:
    for stack in dict.fromkeys(one.stack for one in layers if one.number):
        own = [one for one in layers if one.number and one.stack == stack]
        flowing = [one for one in own if math.isfinite(one["activation_gradient"])]
        if len(flowing) > 1:
            yield from _exploding(stack, flowing)
            yield from _vanishing(stack, flowing)
        norms = [one for one in own if math.isfinite(one["ln_input"])]
        grown = [one for one in norms if _worse("norm input", _ratio(one["ln_input"], norms[0]["ln_input"]))]
        for one in grown[:1]:
            times = _ratio(one["ln_input"], norms[0]["ln_input"])
            yield _finding("norm input", "warn", one, times, f"{times:.3g} times the input of layer {norms[0].number}")


def _exploding(stack: str, flowing: Sequence[OneLayer]) -> Iterator[Breach]:
    top = flowing[-1]["activation_gradient"]
    growth = [(_ratio(one["activation_gradient"], top), one) for one in reversed(flowing)]
    severity = _worse("exploding gradient", max(times for times, _ in growth))
    if severity:
        times, one = next(pair for pair in growth if pair[0] > BOUNDS["exploding gradient", severity].limit)
        largest = max(times for times, _ in growth)
        text = f"||dE/dx|| is {times:.3g} times that at the top of {stack}; it grows to {largest:.3g} times"
        yield _finding("exploding gradient", severity, one, times, text)


def _vanishing(stack: str, flowing: Sequence[OneLayer]) -> Iterator[Breach]:
    largest = max(one["activation_gradient"] for one in flowing)
    shares = [(_ratio(one["activation_gradient"], largest), one) for one in reversed(flowing)]
    least = min(share for share, _ in shares)
    severity = _worse("vanishing gradient", least, below=True)
    if severity:
        share, one = next(pair for pair in shares if pair[0] < BOUNDS["vanishing gradient", severity].limit)
        text = f"||dE/dx|| is {share:.2g} of the largest in {stack} and falls to {least:.2g} of it"
        yield _finding("vanishing gradient", severity, one, share, text)


def _single(layers: Sequence[OneLayer], precision: str) -> Iterator[Breach]:
    """Bounds on one number of one layer; of fp16 only where the model is in it."""
    texts = {
        "under eps": ("eps", "{:.0%} of its gradient entries are below eps"),
        "branch": ("branch", "it adds {:.3g} times the variance of what enters it"),
        "attention logit": ("max_logit", "its largest attention logit is {:.3g}"),
        "fp16 overflow": ("max_abs", "its largest |x| is {:.3g}"),
        "fp16 underflow": ("fp16", "{:.0%} of its gradient entries would be 0 in fp16"),
    }
    for name, (column, text) in texts.items():
        if name.startswith("fp16") and "float16" not in precision.split(", "):
            continue
        beyond = [(one, severity) for one in layers if one.number and (severity := _worse(name, one[column]))]
        for one, severity in beyond[:1]:
            others = f"; so in {len(beyond) - 1} others" if len(beyond) > 1 else ""
            yield _finding(name, severity, one, one[column], text.format(one[column]) + others)


def _update(layers: Sequence[OneLayer], numbers: Numbers) -> Iterator[Breach]:
    layers = [one for one in layers if one.number] or layers  # a model without stacks is judged module by module
    learning = [one for one in layers if one["gradient"] > 0 and one["zero"] < 1]
    if numbers["updated"] and (same := [one for one in learning if one["update"] == 0]):
        others = f", and so in {len(same) - 1} others" if len(same) > 1 else ""
        text = f"it has a gradient, and one update of the optimizer leaves every parameter of it as it was{others}"
        yield _finding("no update", "fail", same[0], 0.0, text)
    moving = [one for one in layers if math.isfinite(one["update"])]
    if beyond := [one for one in moving if _worse("update", one["update"])]:
        others = f"; so in {len(beyond) - 1} others" if len(beyond) > 1 else ""
        text = f"one update is {beyond[0]['update']:.2g} times as large as the weights that it changes{others}"
        yield _finding("update", "fail", beyond[0], beyond[0]["update"], text)
    for stack, share in numbers["moved"].items():
        if severity := _worse("output moved", share):
            own = [one for one in moving if one.stack == stack]
            most = max(own, key=lambda one: one["update"], default=None)
            text = f"one update moves the output of {stack or 'the model'} by {share:.0%} of its size"
            most_text = f"; its parameters move most, by {most['update']:.2g} of their size" if most else ""
            yield _finding("output moved", severity, most, share, text + most_text)
    before, after = numbers["loss_before"], numbers["loss_after"]
    if before is not None and after is not None and numbers["updated"]:
        rise = after - before
        if severity := _worse("loss rises", rise):
            text = f"the loss on this batch goes from {before:.4g} to {after:.4g} with one update"
            yield _finding("loss rises", severity, None, rise, text)


def _ratio(a: float, b: float) -> float:
    return a / b if b else (math.inf if a else 1.0)
