"""The bounds that a model has to keep before it is trained, their reasons, and the remedies.

The bounds were set before any model was checked, except those on updates and those of the checks of the whole model.
The size of an update over that of the weights was a failure at first. It measures the initialiser's width: of the
healthy runs of results/alarm it failed 18 of 51 GPT-2 and LLaMA, whose weights start at a standard deviation of .02,
and no other. The change of the model's output by an update, at the rate of step one, took its place.
results/check/README.md says how the limits of the checks of the whole model were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..kernels import suspected
from ..probes.incidents.report import Incident
from .result import Breach, Check, OneLayer, failures_first

Numbers = Mapping[str, Any]
FP16_MAX = 65504.0
COPIES = "share of a matrix's rows (or columns) that are copies of another up to sign"
RISE = "nats a prediction by which one update raises the loss on its own batch (of another loss: share of its size)"


@dataclass(frozen=True)
class Bound:
    """A bound: ``statistic`` beyond ``limit`` is a finding; "fail" makes the check fail, "warn" does not. ``remedy``:
    the advice, as far as one holds for any model."""

    name: str
    statistic: str
    limit: float
    severity: Literal["fail", "warn"]
    reason: str
    remedy: str = ""


def _bounds(*bounds: Bound) -> dict[tuple[str, str], Bound]:
    return {(bound.name, bound.severity): bound for bound in bounds}


BOUNDS = _bounds(
    Bound("not finite", "numbers that are NaN or inf", 0, "fail", "nothing trains after it",
          "look at the initialisation and the inputs of the layer that is named"),
    Bound("no gradient", "trainable layers without any gradient that is not 0", 0, "fail", "they will not be trained",
          "look for a detach(), a no_grad or an unused layer, or freeze it with requires_grad_(False)"),
    Bound("no update", "layers with a gradient that one update leaves as they were", 0, "fail",
          "they are not in the optimizer, its rate is 0, or updates are below the rounding of the weights",
          "give the optimizer all parameters, and a rate above 0"),
    Bound("exploding gradient", "growth of ||dE/dx|| from a stack's top to a layer", 1e3, "fail",
          "the lowest layers then decide the norm that clipping sees, and the others stand still",
          "scale the branches down by depth, or normalise before each branch"),
    Bound("exploding gradient", "growth of ||dE/dx|| from a stack's top to a layer", 30, "warn",
          "lower layers learn at another rate than upper ones"),
    Bound("vanishing gradient", "||dE/dx|| of a layer over the largest of its stack (beyond: below)", 1e-6, "fail",
          "it is of the size of float32's rounding of the largest (6e-8 of each entry)",
          "add residual connections, scale the branches (DeepNorm, Admin), or normalise before each branch"),
    Bound("vanishing gradient", "||dE/dx|| of a layer over the largest of its stack (beyond: below)", 1e-3, "warn",
          "Adam evens out sizes, but not the noise that comes with them"),
    Bound("under eps", "share of a layer's gradient entries, not 0, below the optimizer's eps", 0.5, "fail",
          "Adam divides by sqrt(v) + eps, so that such entries hardly move", "lower eps or scale the loss"),
    Bound("output moved", "||dF|| of one update over ||F||, at the learning rate of step one", 1.3, "warn",
          "a linear picture of the loss does not hold for such a step", "lengthen the warm-up, or lower the rate"),
    Bound("loss rises", RISE, 0.5, "fail",
          "the step overshoots even the batch that it was taken on", "lower the rate of step one, or warm up"),
    Bound("loss rises", RISE, 0.0, "warn",
          "the step overshoots even the batch that it was taken on", "lower the rate of step one, or warm up"),
    Bound("branch", "variance that a layer adds over that of what enters it", 100, "warn",
          "the layer overwrites the residual stream"),
    Bound("norm input", "largest input of a layer's norms over that of its stack's first layer", 100, "warn",
          "the gradient through a norm is divided by the size of its input"),
    Bound("attention logit", "largest logit", 50, "warn",
          "attention puts everything on one key, and no gradient comes through the softmax",
          "scale queries and keys down, or normalise them"),
    Bound("fp16 overflow", "largest |x| of a layer", FP16_MAX / 8, "warn", "fp16 ends at 65504; bf16 does not",
          "train in bf16"),
    Bound("fp16 underflow", "share of gradient entries, not 0, below 2^-24", 0.5, "warn",
          "fp16 makes them 0 without a loss scale; bf16 does not", "use a GradScaler, or train in bf16"),
    Bound("output change", "mean KL divergence of the predictions before one update from those after it [nats]", 4.0,
          "fail", "the first step discards the initialisation, and Adam's moments then belong to another model",
          "lower the rate of step one, or warm up"),
    Bound("loss at start", "nats by which the cross-entropy exceeds ln(classes)", 3.0, "fail",
          "the loss of an untrained model should be ln(classes), as for a uniform guess: first steps unlearn the rest"),
    Bound("loss at start", "nats by which the cross-entropy exceeds ln(classes)", 2.0, "warn",
          "the loss of an untrained model should be ln(classes), as for a uniform guess: first steps unlearn the rest"),
    Bound("label shift", "places by which the labels are off", 0, "fail",
          "the model learns another task than to predict the next token"),
    Bound("labels in the input", "share of the labels that stand in the input at their own place", 0.95, "warn",
          "an answer that stands in the input needs no model", "mask what is to be predicted, if that is the task"),
    Bound("future leak", "share of an output's gradient that is with respect to inputs after it", 1e-5, "fail",
          "the answer stands in the input, and what is learned from it is of no use when text is generated",
          "mask attention (is_causal=True, or a lower triangular mask), and pad convolutions on the left alone"),
    Bound("sample leak", "share of an output's gradient that is with respect to other samples' inputs, in eval mode",
          1e-5, "fail", "a prediction depends on what else is in the batch",
          "look for a mean, norm or softmax over the dimension of samples, or a wrong reshape"),
    Bound("duplicated units", COPIES, 0.1, "fail",
          "units that are alike get alike gradients and stay copies: the layer is as wide as its distinct units",
          "draw each part from another seed (tensor-parallel ranks have one each), or initialise the whole and cut it"),
    Bound("duplicated units", COPIES, 0.0, "warn",
          "units that are alike get alike gradients and stay copies"),
    Bound("detached", "matrices of layers that were used and that the loss does not depend on", 0, "fail",
          "they will not be trained, and the rest learns around them",
          "look for a detach(), a .data, a no_grad or an argmax between them and the loss, or freeze them"),
    Bound("unused parameters", "other matrices that the loss does not depend on", 0, "warn",
          "they will not be trained", "freeze them with requires_grad_(False) if this is meant"),
    Bound("gradient of zeros", "matrices whose gradient is exactly 0, in the first step and after it", 0, "warn",
          "they will not be trained", "look for a softmax over one entry, a factor of 0 or units that never fire"),
    Bound("shared memory", "pairs of parameters that are not one but share memory", 0, "fail",
          "the optimizer updates such numbers twice, with two sets of moments",
          "tie by assignment of the parameter (head.weight = embedding.weight), not of its .data"),
    Bound("not in the optimizer", "trainable parameters with a gradient that no optimizer holds", 0, "warn",
          "they stay as they are", "give each of them to an optimizer, or freeze them"),
    Bound("optimizer doubles", "parameters that optimizers hold twice", 0, "fail",
          "each update moves them twice", "give each parameter to one optimizer once; tied ones have several names"),
    Bound("dropout in eval mode", "calls of dropout that are active in eval mode", 0, "fail",
          "validation and generation are random, and worse than they could be",
          "pass training=self.training to F.dropout, and 0 as dropout_p to scaled_dot_product_attention in eval mode"),
    Bound("evaluation repeats", "relative difference of the loss between two passes in eval mode", 1e-5, "warn",
          "if no dropout is active, inputs are drawn at random or an operator is not deterministic"),
    # of several processes (docs/setups.md)
    Bound("replicas", "parameters whose copies differ between ranks", 0, "fail",
          "replicas that start apart stay apart, and rank 0 alone is saved",
          "draw the weights of copies from one seed, or broadcast them (HSDP does not do it by itself)"),
    Bound("buffers", "buffers that differ between data ranks", 0, "fail",
          "each data rank computes another function, and rank 0 alone is saved",
          "broadcast buffers after they are made, also those that no checkpoint holds"),
    Bound("copied shards", "parameters of which two ranks drew the same part", 0, "fail",
          "the layer is as wide as its distinct parts",
          "give each tensor rank a seed of its own for the parts that it draws, or draw the whole and cut it"),
    Bound("same batch", "share of a rank's samples that another data rank has too", 0.5, "fail",
          "several ranks do the work of one, and the batch is smaller than it seems",
          "give the sampler rank and number of data ranks (DistributedSampler), and one seed on all of them"),
    Bound("same batch", "share of a rank's samples that another data rank has too", 0.1, "warn",
          "some samples count several times", "give all ranks' samplers one seed, and call set_epoch on each"),
    Bound("tensor batch", "tensor ranks with other samples than the ranks beside them", 0, "fail",
          "each of them computes a part of another sample's output",
          "give the sampler the number of the data rank, not of the process"),
    Bound("optimizer misses", "trainable parameters with a gradient that no optimizer holds", 0, "fail",
          "they stay as they are",
          "make the optimizer after wrapping, sharding and parallelize_module, and before any forward of fully_shard"),
    Bound("dropout on data ranks", "data ranks that draw the same masks", 0, "warn",
          "samples of different ranks lose the same units", "add the number of the data rank to the seed"),
    Bound("dropout on tensor ranks", "calls that drop other entries of an activation that tensor ranks hold alike", 0,
          "fail", "tensor ranks then work on different activations",
          "give the tensor ranks of a data rank one seed, and keep loaders from drawing numbers on one of them"),
    Bound("gradient copies", "gradients that differ between ranks that hold the parameter", 0, "fail",
          "the copies train apart from the first update on"),
    Bound("gradient scale", "kinds of parameters whose gradient is off by a number of ranks", 0, "fail",
          "the learning rate and clipping then depend on the number of processes",
          "average once, as DistributedDataParallel does; multiply a loss over all ranks' tokens by that number"),
    Bound("update", "parameters whose copies or parts move differently", 0, "fail",
          "the copies train apart from the first update on",
          "give all ranks the same optimizer settings; look at what splits or broadcasts the update"),
    Bound("evaluation", "relative difference that an evaluation before the update makes to the loss after it", 0.0,
          "fail", "training goes on with weights of before the update",
          "call reshard() on the model after the evaluation, or give fully_shard reshard_after_forward=True"),
)  # fmt: skip


def weigh(name: str, value: float, measured: str, *, site: str = "", remedy: str = "") -> Check:
    """Compare a number with the bounds of its name; ``remedy`` takes the place of the bound's own."""
    known = [BOUNDS[name, severity] for severity in ("fail", "warn") if (name, severity) in BOUNDS]
    broken = next((bound for bound in known if not value <= bound.limit), None)
    bound = broken or known[0]
    verb = {"fail": "fails", "warn": "warns"}[bound.severity]
    threshold = f"{verb} beyond {bound.limit:g}: {bound.statistic}"
    if broken is None:
        return Check(name, "ok", measured, threshold, value, bound.limit, site)
    todo = remedy or bound.remedy
    return Check(name, bound.severity, measured, threshold, value, bound.limit, site, bound.reason, todo)


def weigh_names(name: str, names: Sequence[str], measured: str, *, remedy: str = "") -> Check:
    """Compare the number of ``names``, such as wrong parameters, with the bounds of a check; the first is its place."""
    return weigh(name, float(len(names)), measured, site=names[0] if names else "", remedy=remedy)


def not_checked(name: str, why: str) -> Check:
    return Check(name, "not checked", why)


def judge(
    layers: Sequence[OneLayer],
    numbers: Numbers,
    incident: Incident | None,
    precision: str,
    computed: Mapping[str, Any],
) -> list[Breach]:
    """Return all findings beyond a bound, failures first, each kind at the first layer where it occurs. ``computed``:
    the numeric modes (:func:`stabilitylab.probes.numerics.numerics`)."""
    return failures_first(
        [
            *_not_finite(incident, computed),
            *_no_gradient(layers),
            *_along_stacks(layers),
            *_single(layers, precision),
            *_update(layers, numbers),
        ]
    )


def _finding(name: str, severity: str, layer: OneLayer | None, value: float, text: str) -> Breach:
    bound = BOUNDS[name, severity]
    where = layer or OneLayer("", 0, "", {})
    return Breach(
        bound=name,
        severity=bound.severity,
        stack=where.stack,
        layer=where.number,
        site=where.site,
        value=value,
        limit=bound.limit,
        text=text,
        reason=bound.reason,
        remedy=bound.remedy,
    )


def _worse(name: str, value: float, below: bool = False) -> Literal["fail", "warn"] | None:
    for severity in ("fail", "warn"):
        bound = BOUNDS.get((name, severity))
        if bound is not None and (value < bound.limit if below else value > bound.limit):
            return severity
    return None


def _not_finite(incident: Incident | None, computed: Mapping[str, Any]) -> Iterator[Breach]:
    if incident is not None:
        layer = OneLayer(incident.stack, incident.layer, incident.name, {})
        first = incident.step == 0 and incident.phase != "backward"  # no backward pass came before it
        how = "call torch.backends.cuda.enable_cudnn_sdp(False)"  # under autocast nobody knows the type of attention
        kernel = "" if first else suspected(computed, None, how)
        found = _finding("not finite", "fail", layer, math.nan, "; ".join(filter(None, (incident.paragraph, kernel))))
        if incident.kind == "loss":
            remedy = "look at loss_fn, and at what stands between the model's output and the loss"
            found = replace(found, remedy=remedy)
        yield found


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
    """Yield findings about one number of one layer; those about fp16 only if the model is in it."""
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
    for stack, share in numbers["moved"].items():
        if severity := _worse("output moved", share):
            own = [one for one in moving if one.stack == stack]
            most = max(own, key=lambda one: one["update"], default=None)
            text = f"one update moves the output of {stack or 'the model'} by {share:.0%} of its size"
            most_text = f"; its parameters move most, by {most['update']:.2g} of their size" if most else ""
            yield _finding("output moved", severity, most, share, text + most_text)
    before, after = numbers["loss_before"], numbers["loss_after"]
    if before is not None and after is not None and numbers["updated"]:
        # per prediction for a loss that sums over predictions; over its size for one that is no cross-entropy
        rise = (after - before) / max(1.0, abs(before) / numbers.get("nats", 1.0))
        if severity := _worse("loss rises", rise):
            text = f"the loss on this batch goes from {before:.4g} to {after:.4g} with one update"
            yield _finding("loss rises", severity, None, rise, text)


def _ratio(a: float, b: float) -> float:
    return a / b if b else (math.inf if a else 1.0)
