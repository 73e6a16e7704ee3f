"""The check before training: its passes, and the numbers of each layer that it keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError, StabilityLabError, UsageError, first_line
from ..probes import Mask, Watcher, random_states_kept
from ..probes.numerics import numerics
from ..probes.parameters.pieces import Parameters
from ..schema import Cells, Table
from .bounds import judge
from .questions import Questions
from .result import OneLayer, Preflight, failures_first
from .updates import Given, is_maker, named_once, optimizers_given
from .wiring import used_modules, without_gradient

# Left out: rank is the most expensive; some add nothing yet; curvature needs a second batch; few models have experts.
PROBES = (
    "all,-rank,-adam,-ln_gain,-attention_heads,-critical_sharpness,-preconditioned_sharpness,-sharpness,-router,"
    "-branch_variance"
)
SMALLEST_FP16 = 2.0**-24


def preflight(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Given = None,
    *,
    warmup: int = 0,
    classes: int | None = None,
    causal: bool | None = None,
    batch_first: bool | None = None,
    skip: Collection[str] = (),
    mask: Mask | None = None,
    sites: str | Mapping[str, str] | None = None,
    output_site: str | None = None,
) -> Preflight:
    """Check one training step of a copy of ``model``, layer by layer, and ask questions about the whole model.

    The step shows whether the model will train, which layer breaks first, and why. A question is, for example, whether
    an output depends on later inputs (:attr:`Preflight.checks`). The model, its gradients, the optimizer and the random
    states do not change.

    - ``loss_fn(model, batch)``: returns the scalar that is minimised.
    - ``optimizer``: the model's own optimizer, a list of several that share the model's parameters, or a function of
      the parameters (of the model, if its argument is called ``model``) that makes one or several. Without it, updates
      are not checked. The update is the step of all optimizers. It is judged at the learning rate of step one: each
      optimizer's present rate, which a scheduler may have set.
    - ``warmup``: the number of updates of a linear warm-up to the optimizer's rate. The rate of step one is then that
      rate / ``warmup``, for each of several optimizers.
    - ``classes``: the number of classes of the loss. Give it if the loss does not call torch's ``cross_entropy``.
    - ``causal``: True if outputs must not depend on later inputs. None: True if the labels are the next tokens.
    - ``batch_first``: True if samples lie along the first dimension of an output (samples, places, features). None: it
      is found from labels that are the next tokens.
    - ``skip``: the names of checks to leave out.
    - ``mask``, ``sites``, ``output_site``: as in :func:`stabilitylab.watch`.

    The check takes the memory of three models and an optimizer, and the time of at most eight forward passes and a
    dozen backward passes. If a gradient is all 0, it takes one more of each. If the update is too large, it takes up to
    eight more forward passes.

    Raises UsageError for a loss that is not a scalar with a gradient, a model that cannot be copied or a wrong
    argument; InputError if ``loss_fn`` fails.

    >>> result = preflight(model, batch, lambda model, batch: model(**batch).loss, optimizer)  # doctest: +SKIP
    >>> print(result), result.ok  # doctest: +SKIP
    """
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise UsageError(f"warmup = {warmup!r} must be the number of updates of the warm-up, 0 for none.")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 2):
        raise UsageError(f"classes = {classes!r} must be the number of classes that the loss chooses among, from 2 on.")
    model = getattr(model, "_orig_mod", model)
    twin, given = _copied(model, optimizer)
    rates, why_not = first_rates(given, warmup)
    own = [] if why_not else given
    sink = _Rows()

    def held_out() -> dict[str, torch.Tensor]:
        return {"held_out_loss": _asked(loss_fn, twin, batch, "in eval mode").detach()}

    with random_states_kept(twin):
        asked = Questions(
            twin, model, batch, loss_fn, classes=classes, causal=causal, batch_first=batch_first, skip=skip
        )
        asked.before()
        twin.train()
        with Watcher(
            twin, sink, probes=PROBES, every=1, update_every=1, optimizer=own or None, mask=mask, sites=sites,
            output_site=output_site, restore=True, reference=held_out,
        ) as watcher:  # fmt: skip
            twin.zero_grad()
            with used_modules(twin) as used:
                loss = _loss(loss_fn, twin, batch)
            loss.backward()
            still = without_gradient(twin)
            asked.held(given)
            shares = dict(_shares(twin, watcher.parameters, own))
            watcher.step(loss=loss.detach())
            _step(own)
            watcher.finish()
            zero = any(numbers["zero"] == 1 for numbers in shares.values())
            if zero or still:  # right at the start, as below a head of zeros
                watcher.close()
                twin.zero_grad()
                loss_fn(twin, batch).backward()
                for key, later in _shares(twin, watcher.parameters, own):
                    shares[key]["zero_later"] = later["zero"]
                later = without_gradient(twin)
                still = {name: missing and later[name] for name, missing in still.items() if name in later}
        asked.during(still, used, [site.name for site in watcher.sites.layers])
        asked.after(rates, why_not)
    layers = _layers(watcher, sink, shares)
    has_update, precision = bool(own), _precision(twin)
    numbers = _numbers(sink) | {"updated": has_update, "nats": asked.nats}
    numbers |= {"rate": max(rates.values()) if has_update else None, "rates": rates if has_update else {}}
    numbers |= {"no_update": why_not}
    found = judge(layers, numbers, watcher.incident, precision, numerics(watcher.parameters.device))
    found += [breach for check in asked.checks if (breach := check.breach) is not None]
    unmeasured = _unmeasured(watcher, has_update)
    return Preflight(layers, numbers, failures_first(found), precision, unmeasured, asked.checks)


def first_rates(optimizers: Sequence[torch.optim.Optimizer], warmup: int) -> tuple[dict[str, float], str]:
    """Set the rates of step one; return the largest of each optimizer by its name, and the reason if there is no
    update ("" if there is one).

    A rate above 0 that a scheduler has set is used. A schedule that begins at 0 does not show the rate of the first
    update that moves anything: ``warmup`` does. If the schedule of one of several optimizers begins at 0, there is no
    update, since that optimizer would leave its parameters as they are.
    """
    if not optimizers:
        return {}, "no optimizer was given"
    found = {name: _first_rate(one, warmup) for name, one in zip(named_once(optimizers), optimizers, strict=True)}
    rates = {name: rate for name, (rate, _) in found.items()}
    for name, (rate, peak) in found.items():
        if rate == 0 < peak:
            whose = f" of {name}" if len(found) > 1 else ""
            why = f"the schedule{whose} begins at a rate of 0: say warmup=, the number of updates of its warm-up"
            return rates, why
    return rates, ""


def _first_rate(optimizer: torch.optim.Optimizer, warmup: int) -> tuple[float, float]:
    """Set an optimizer's rates of step one; return the largest, and the largest after the warm-up."""
    rates, peaks = [], []
    for group in optimizer.param_groups:
        now, peak = float(group["lr"]), float(group.get("initial_lr", group["lr"]))
        scheduled = "initial_lr" in group and now > 0
        rate = peak / warmup if warmup and not scheduled else now
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.full_like(group["lr"], rate)
        else:
            group["lr"] = rate
        rates.append(rate)
        peaks.append(peak)
    return max(rates), max(peaks)


class _Rows:
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.rows: dict[int, tuple[Mapping[str, float | None], Mapping[str, Cells]]] = {}

    def open(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self.rows[step] = (metrics, tables)

    def close(self) -> None: ...

    def column(self, table: str, column: str, step: int = 0) -> Iterator[tuple[Any, float]]:
        """Yield (row, number) of all recorded cells."""
        spec, cells = self.tables.get(table), self.rows.get(step, ({}, {}))[1].get(table)
        if spec is not None and cells is not None:
            for row, value, absent in zip(
                spec.rows, cells.values[:, spec.columns.index(column)], cells.absent, strict=True
            ):
                if not absent:
                    yield row, float(value)


def _copied(model: nn.Module, optimizer: Given) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    own = [] if is_maker(optimizer) else optimizers_given(optimizer, model)
    try:
        # together, so that the copies move the copied parameters
        twin, twins = copy.deepcopy((model, own))
    except (RuntimeError, TypeError, ValueError) as error:
        said = first_line(error)
        raise UsageError(
            f"the model cannot be copied ({said}): give the module as it is before DistributedDataParallel, "
            "fully_shard or a backward pass."
        ) from error
    return twin, optimizers_given(optimizer, twin) if is_maker(optimizer) else twins


def _step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        try:
            optimizer.step()
        except TypeError as error:
            which = "the optimizer" if len(optimizers) == 1 else "all optimizers"
            raise UsageError(
                f"{type(optimizer).__name__} needs a closure, which a check does not have: leave {which} out."
            ) from error


def _loss(loss_fn: Callable[[nn.Module, Any], torch.Tensor], model: nn.Module, batch: Any) -> torch.Tensor:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: call requires_grad_(True) on those to train.")
    loss = _asked(loss_fn, model, batch)
    _check(loss)
    return loss


def _asked(loss_fn: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, where: str = "") -> Any:
    try:
        return loss_fn(model, batch)
    except StabilityLabError:
        raise
    except Exception as error:
        where = where and f" {where}"
        raise InputError(f"loss_fn(model, batch) failed{where}: {type(error).__name__}: {error}") from error


def _check(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"loss_fn(model, batch) gave {kind}: it must return one number with a gradient.")


def _shares(
    model: nn.Module, parameters: Parameters, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[tuple[str, int, str], dict[str, float]]]:
    """Yield the counts of each layer's gradient entries: all, those that are 0, and others below fp16 and, of those
    that an optimizer with an eps updates, below that eps."""
    groups = [group for one in optimizers for group in one.param_groups]
    eps = {p: limit for group in groups if (limit := _eps(group)) is not None for p in group["params"]}
    counts: dict[tuple[str, int, str], dict[str, float]] = {}
    tensors = list(model.parameters())
    for piece in parameters.pieces:
        parameter = tensors[piece.index]
        if not parameter.requires_grad:
            continue
        own = counts.setdefault(
            _key(piece.row), dict.fromkeys(("entries", "zero", "eps", "has_eps", "fp16", "given"), 0.0)
        )
        own["entries"] += parameter.numel() if piece.part is None else parameter[piece.part].numel()
        if parameter.grad is None:
            continue
        gradient = parameter.grad if piece.part is None else parameter.grad[piece.part]
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        size, zero = gradient.abs(), float((gradient == 0).sum())
        own["given"] += gradient.numel()
        own["zero"] += zero
        own["fp16"] += float((size < SMALLEST_FP16).sum()) - zero
        if (limit := eps.get(parameter)) is not None:
            own["eps"] += float((size < limit).sum()) - zero
            own["has_eps"] += gradient.numel() - zero
    for key, own in counts.items():
        nonzero = own["given"] - own["zero"]
        yield (
            key,
            {
                "given": own["given"],
                "zero": own["zero"] / own["given"] if own["given"] else math.nan,
                "eps": own["eps"] / own["has_eps"] if own["has_eps"] else math.nan,
                "fp16": own["fp16"] / nonzero if nonzero else math.nan,
            },
        )


def _eps(group: Mapping[str, Any]) -> float | None:
    """Return the eps to whose size entries of a gradient are compared; None for an optimizer without one. Muon adds its
    eps to a norm, and Adafactor has two."""
    limit = group.get("eps")
    return limit if isinstance(limit, float) and "ns_steps" not in group else None


def _key(row: Any) -> tuple[str, int, str]:
    """Return the key of a layer; outside the layers, of the row itself."""
    return (row.stack, row.layer, "") if row.layer else (row.stack, 0, row.site)


def _layers(watcher: Watcher, sink: _Rows, shares: Mapping[tuple[str, int, str], dict[str, float]]) -> list[OneLayer]:
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    for stack in watcher.sites.stacks:
        found |= {(stack.name, number, ""): {} for number in stack.numbers}
    largest = {
        "ln_input": ("ln_input", "value"),
        "update": ("update_ratio", "value"),
        "max_abs": ("outliers", "max_abs"),
        "max_logit": ("attention", "max_logit"),
        "branch": ("layer_branch", "ratio"),
        "residual": ("residual_norm", "variance"),
    }
    for row, value in sink.column("grad_norm", "value"):
        own = found.setdefault(_key(row), {})
        own["gradient"] = math.hypot(own.get("gradient", 0.0), value)
    for name, (table, column) in largest.items():
        for row, value in sink.column(table, column):
            if (own := found.get(_key(row))) is not None and math.isfinite(value):
                own[name] = max(own.get(name, -math.inf), value)
    for row, value in sink.column("activation_grad_norm", "value"):  # the last of a layer's is that of its output
        if (own := found.get(_key(row))) is not None:
            own["activation_gradient"] = value
    return [
        OneLayer(stack, number, site, {**numbers, **shares.get((stack, number, site), {})})
        for (stack, number, site), numbers in found.items()
    ]


def _precision(model: nn.Module) -> str:
    kinds = {parameter.dtype for parameter in model.parameters()}
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _numbers(sink: _Rows) -> dict[str, Any]:
    """Return the losses of the two rows, and by how much of its size the update moved the output of each stack."""
    metrics = {step: numbers for step, (numbers, _) in sink.rows.items()}
    moved = {row.stack: value for row, value in sink.column("model_update", "one_update", step=1)}
    sizes = {row.stack: value for row, value in sink.column("output_norm", "value")}
    moved = {stack: value / sizes[stack] for stack, value in moved.items() if sizes.get(stack)}
    before, after = (metrics.get(step, {}).get("held_out_loss") for step in (0, 1))
    return {"loss": metrics[0].get("loss"), "loss_before": before, "loss_after": after, "moved": moved}


def _unmeasured(watcher: Watcher, has_update: bool) -> dict[str, str]:
    """Map probes that have no number, or none at some places, to the reason; without an update, but for those of
    updates."""
    needs_optimizer = set() if has_update else {"update_ratio"}
    dropped = {name: why for name, why in watcher.dropped if name not in needs_optimizer}
    return dropped | {
        name: (f"{dropped[name]}; " if name in dropped else "") + f"no number at {', '.join(places)}"
        for name, places in watcher.unseen.items()
    }
