"""The findings of an audit: one sentence each, with the evidence and what to do. Their kinds and words are frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

Kind = Literal[
    "rate", "setting", "schedule", "optimizer reset", "frozen", "mode", "attribute", "state written", "forward", "loss",
    "gradients added", "gradient sign", "gradient scale", "gradient zero", "gradient", "clipping", "update scale",
    "update sign", "update zero", "update", "derivative", "bad batch", "labels", "mask", "replicas", "unexplained",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
REMEDIES: dict[Kind, str] = {
    "rate": "set the learning rate as before, or declare the schedule (Recorder(scheduler=...))",
    "setting": "set it as before, or declare it",
    "schedule": "look for a second writer of the rate, or declare the scheduler that the loop steps",
    "optimizer reset": "keep the optimizer, or restore its state after a restart, and warm the rate up again",
    "frozen": "call requires_grad_(True) on it, or leave it out of the optimizer on purpose",
    "mode": "call model.train() after each evaluation",
    "attribute": "look at what sets it during training",
    "state written": "find the code that writes to it between two steps of the optimizer",
    "forward": "look for a hook, a patch or another kernel in this module",
    "loss": "give loss_fn as the loop computes the loss, and w.batch() the batch as the loss sees it",
    "gradients added": "call optimizer.zero_grad() in each update, or declare accumulate=",
    "gradient sign": "look for code that negates it between backward and the optimizer's step",
    "gradient scale": "look for a factor on the loss or on gradients, and declare it",
    "gradient zero": "look for a detach(), a no_grad block, or code that clears it",
    "gradient": "look for code that changes gradients between backward and the optimizer's step",
    "clipping": "declare it: Recorder(clip=...)",
    "update scale": "look for a second rate: a wrapper of the optimizer, or a step that is made twice",
    "update sign": "look for maximize=True, or a rate below 0",
    "update zero": "give the parameters to the optimizer",
    "update": "look for what changes parameters as the optimizer steps",
    "derivative": "look for a custom backward, a detach() or a straight-through estimator in it",
    "bad batch": "leave the batches out, or mend them",
    "labels": "shift labels by one against the inputs, once",
    "mask": "build the mask of each batch anew",
    "replicas": "look for code that writes to the model on some processes alone",
    "unexplained": "record with digests=1, so that the next run shows which quantity parts",
}


@dataclass(frozen=True)
class AuditFinding:
    """A difference between the updates that a loop made and those that it declared, or a recorded change.

    ``kind``: the kind of the finding. ``place``: a module, a tensor, a parameter group or batches. ``step``: the
    update; ``until``: the last update of a series, or None. ``sentence`` and ``evidence``: the finding in words.
    ``accused``: False for a note, such as a clipping that was not declared. ``factor``: the size of the difference as a
    factor, if it has one.
    """

    kind: Kind
    place: str
    step: int
    sentence: str
    evidence: str = ""
    until: int | None = None
    accused: bool = True
    factor: float | None = None

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]

    @property
    def last(self) -> int:
        """The last update of a series; that of a single one is ``step``."""
        return self.until or self.step

    def with_evidence(self, more: str) -> AuditFinding:
        """Return the finding with more evidence behind its own."""
        return replace(self, evidence=f"{self.evidence}; {more}".lstrip("; "))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "remedy": self.remedy}

    def __str__(self) -> str:
        head = "Finding" if self.accused else "Note"
        more = f" Evidence: {self.evidence.rstrip('.')}." if self.evidence else ""
        todo = f" To do: {self.remedy}." if self.accused or self.kind == "clipping" else ""
        return f"{head}: {self.sentence.rstrip('.')}.{more}{todo}"


def first_of_each(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """Return the earliest finding of each kind and place, by step; what is accused comes first at one step."""
    found: dict[tuple[str, str], AuditFinding] = {}
    for one in sorted(findings, key=lambda one: (one.step, not one.accused)):
        found.setdefault((one.kind, one.place), one)
    return list(found.values())
