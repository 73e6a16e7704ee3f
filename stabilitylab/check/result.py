"""The result of a check: the numbers of each layer, the broken bounds, and the layer to look at first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "gradient": "||dE/dtheta||",
    "activation_gradient": "||dE/dx||",
    "ln_input": "norm input",
    "branch": "branch/stream",
    "update": "|dtheta|/|theta|",
    "eps": "under eps",
    "zero": "gradient 0",
    "max_abs": "max |x|",
    "max_logit": "max logit",
    "fp16": "under fp16",
}
ENDS = 4  # layers at each end of a stack that a short table shows


@dataclass(frozen=True)
class OneLayer:
    """A layer (``number`` from 1), or a module outside the layers (0, with its ``site``); unknown numbers are NaN."""

    stack: str
    number: int
    site: str
    numbers: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.numbers.get(name, math.nan)

    @property
    def name(self) -> str:
        return f"{self.stack} {self.number}".strip() if self.number else self.site or "the model"


@dataclass(frozen=True)
class Breach:
    """A number beyond a bound: its place, its size in words, and the reason why it matters."""

    bound: str
    severity: Literal["fail", "warn"]
    stack: str
    layer: int
    site: str
    value: float
    limit: float
    text: str
    reason: str
    remedy: str = ""

    @property
    def place(self) -> str:
        return OneLayer(self.stack, self.layer, self.site, {}).name

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "place": self.place}

    def __str__(self) -> str:
        todo = f" To do: {self.remedy.rstrip('.')}." if self.remedy else ""
        why = f"limit {self.limit:g}; {self.reason}"
        return f"{self.severity.upper()}  {self.bound}: {self.place}: {self.text.rstrip('.')} ({why}).{todo}"


@dataclass(frozen=True)
class Check:
    """The answer to one question about the whole model.

    ``state``: "ok", "warn", "fail" or "not checked". ``measured``: the measurement in words, or the reason why there is
    none. ``value`` and ``limit``: the measured number and its limit; NaN if there is none. ``threshold``: the limit in
    words. ``reason``: why it matters. ``remedy``: the advice if the check did not pass.
    """

    name: str
    state: Literal["ok", "warn", "fail", "not checked"]
    measured: str
    threshold: str = ""
    value: float = math.nan
    limit: float = math.nan
    site: str = ""
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.name}: {self.measured}"

    @property
    def breach(self) -> Breach | None:
        """Return the check as a finding; None for a check that passed or was not made."""
        if self.state not in ("warn", "fail"):
            return None
        severity: Literal["fail", "warn"] = "fail" if self.state == "fail" else "warn"
        return Breach(
            bound=self.name,
            severity=severity,
            stack="",
            layer=0,
            site=self.site,
            value=self.value,
            limit=self.limit,
            text=self.measured,
            reason=self.reason,
            remedy=self.remedy,
        )


def failures_first(findings: Iterable[Breach]) -> list[Breach]:
    return sorted(findings, key=lambda one: one.severity != "fail")


def in_lines(checks: Sequence[Check], findings: Sequence[Breach]) -> list[str]:
    """Return a line for each check that passed, each finding, and each check that was not made, in this order."""
    passed, left = ([str(check) for check in checks if check.state == state] for state in ("ok", "not checked"))
    return [*passed, *map(str, findings), *left]


@dataclass(frozen=True)
class Preflight:
    """The result of :func:`~stabilitylab.preflight`; ``print`` shows it.

    - ``layers``: the table, one entry per layer.
    - ``numbers``: ``loss``; ``loss_before`` and ``loss_after``, before and after one update (in eval mode, on the same
      batch); ``moved``, ||dF|| / ||F|| of each stack; ``rate``, the largest learning rate of step one; ``rates``, the
      largest of each optimizer.
    - ``findings``: the broken bounds, failures first.
    - ``precision``: the precision of the parameters.
    - ``unmeasured``: probes that have no number, or none at some places -> the reason.
    - ``checks``: the answers to the questions about the whole model, unanswered questions included.
    """

    layers: Sequence[OneLayer]
    numbers: Mapping[str, Any]
    findings: Sequence[Breach]
    precision: str
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[Check] = ()

    @property
    def ok(self) -> bool:
        """True if no bound of the kind "fail" is broken."""
        return all(finding.severity != "fail" for finding in self.findings)

    @property
    def suspect(self) -> Breach | None:
        """Return the finding to look at first: the first failure, else the first warning."""
        return next(iter(self.findings), None)

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row per layer: stack_name, layer, site and the numbers."""
        from ..store.frame import Frame  # here, since pandas takes its time

        return Frame(self._rows()).rename(columns={"stack": "stack_name"})

    def _rows(self) -> list[dict[str, Any]]:
        return [{"stack": o.stack, "layer": o.number, "site": o.site, **self._shown(o)} for o in self.layers]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "suspect": self.suspect and self.suspect.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "numbers": dict(self.numbers),
            "precision": self.precision,
            "unmeasured": dict(self.unmeasured),
            "checks": [vars(check) for check in self.checks],
            "layers": self._rows(),
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, every: bool = False) -> str:
        """Return the table and the findings as text. ``every``: True for all layers; otherwise a long stack is shown by
        its ends and its layers with a finding."""
        known = [name for name in COLUMNS if any(math.isfinite(one[name]) for one in self.layers)]
        lines = [["layer", *(COLUMNS[name] for name in known)]]
        gap = False
        for one in self.layers:
            if every or self._is_shown(one):
                lines.append([one.name, *(_number(one[name], name) for name in known)])
                gap = False
            elif not gap:
                lines.append(["...", *("" for _ in known)])
                gap = True
        widths = [max(len(line[column]) for line in lines) for column in range(len(known) + 1)]
        table = [
            "  ".join([line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([*(line.rstrip() for line in table), "", *self._summary()])

    def _summary(self) -> list[str]:
        before, after = self.numbers["loss_before"], self.numbers["loss_after"]
        moved = ", ".join(f"{stack or 'model'} {share:.2%}" for stack, share in self.numbers["moved"].items())
        lines = []
        if self.numbers["updated"]:
            moved = f"; output moved by {moved} of its size" if moved else ""
            lines.append(f"one update: loss {before:.4g} -> {after:.4g}{self._rates()}{moved}")
        else:
            why = self.numbers.get("no_update") or "no optimizer was given"
            lines.append(f"updates: not checked, since {why}")
        lines += in_lines(self.checks, self.findings)
        lines += [f"not measured: {name}, {why}" for name, why in self.unmeasured.items()]
        if self.suspect is None:
            left = self.unmeasured or any(check.state == "not checked" for check in self.checks)
            measured = "every number that was measured" if left else "every number"
            return [*lines, f"ok: {measured} is within its bound"]
        verdict = "ok, with warnings" if self.ok else "not ready to train"
        return [*lines, f"{verdict}; look first at {self.suspect.place}: {self.suspect.bound}"]

    def _rates(self) -> str:
        """Return the learning rate of step one in words: that of each optimizer, if there are several."""
        rates = self.numbers.get("rates") or {}
        if len(rates) > 1:
            return " at lr " + ", ".join(f"{rate:.3g} ({name})" for name, rate in rates.items())
        return f" at lr {self.numbers['rate']:.3g}" if self.numbers.get("rate") else ""

    def _is_shown(self, one: OneLayer) -> bool:
        count = sum(other.number > 0 and other.stack == one.stack for other in self.layers)
        flagged = any((f.stack, f.layer, f.site) == (one.stack, one.number, one.site) for f in self.findings)
        return not one.number or one.number <= ENDS or one.number > count - ENDS or flagged

    @staticmethod
    def _shown(one: OneLayer) -> dict[str, float]:
        return {name: one[name] for name in COLUMNS}


def _number(value: float, name: str) -> str:
    if math.isnan(value):
        return "-"
    if name in ("eps", "zero", "fp16"):
        return f"{value:.0%}" if value in (0, 1) or value >= 0.001 else "<0.1%"
    return "0" if value == 0 else f"{value:.3g}"
