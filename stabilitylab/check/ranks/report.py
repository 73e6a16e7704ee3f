"""The result of a check of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..result import Breach, Check, failures_first, in_lines


@dataclass(frozen=True)
class RankCheck:
    """The result of :func:`stabilitylab.check_ranks`, the same on every rank; ``print`` shows it.

    ``ranks``: the number of processes. ``data_ranks``: the number of ranks with different batches. ``tensor_ranks``:
    the number of ranks that share one batch. ``checks``: the answers, unanswered questions included.
    """

    ranks: int
    data_ranks: int
    tensor_ranks: int
    checks: Sequence[Check]

    @property
    def findings(self) -> list[Breach]:
        """The broken bounds, failures first."""
        return failures_first(breach for check in self.checks if (breach := check.breach) is not None)

    @property
    def ok(self) -> bool:
        """True if no bound of the kind "fail" is broken."""
        return all(finding.severity != "fail" for finding in self.findings)

    @property
    def suspect(self) -> Breach | None:
        """Return the finding to look at first: the first failure, else the first warning."""
        return next(iter(self.findings), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "ranks": self.ranks,
            "data_ranks": self.data_ranks,
            "tensor_ranks": self.tensor_ranks,
            "suspect": self.suspect and self.suspect.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "checks": [vars(check) for check in self.checks],
        }

    def __str__(self) -> str:
        return "\n".join([self._head(), *in_lines(self.checks, self.findings), self._verdict()])

    def _head(self) -> str:
        if self.ranks == 1:
            return "1 process"
        data = "data ranks" if self.data_ranks > 1 else "data rank"
        each = f", each of {self.tensor_ranks} tensor ranks" if self.tensor_ranks > 1 else ""
        return f"{self.ranks} processes: {self.data_ranks} {data}{each}"

    def _verdict(self) -> str:
        if self.suspect is not None:
            verdict = "ok, with warnings" if self.ok else "not ready to train"
            place = f", {self.suspect.site}" if self.suspect.site else ""
            return f"{verdict}; look first at {self.suspect.bound}{place}"
        if all(check.state == "not checked" for check in self.checks):
            return "nothing was checked"
        return "ok: the processes fit together in everything that was checked"
