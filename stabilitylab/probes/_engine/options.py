"""The options of a watcher: each with its type and its default, once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args

import torch

from ...errors import UsageError
from ..parameters.ranks import Parallel
from ..parameters.sharing import Share
from .cadence import Cadence, CurvatureCadence, checked, checked_curvature
from .device_recorder import DeviceRecorder
from .masks import Mask
from .selection import Names
from .tap_places import Place
from .watchable import Optimizers

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

CurvatureBatch = Literal["fixed", "update"]
Self_ = TypeVar("Self_")
A = TypeVar("A")
B = TypeVar("B")
Made = TypeVar("Made")
P = ParamSpec("P")


class AlphaSchedule(Protocol):
    """A constant of the residual formula that changes in time (BranchNorm's alpha)."""

    def get(self) -> float: ...


class FlightRecording(Protocol):
    """The settings of a flight recorder (:class:`stabilitylab.Recorder`), which makes its own instruments."""

    def instruments(self) -> Sequence[Any]: ...


Record = Literal["ledger", "off"] | FlightRecording | None


def _never(row: int) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of a watcher; :class:`~stabilitylab.probes.Watcher` says what each of them means.

    Raises UsageError for a cadence or a batch that does not exist.
    """

    probes: Names = "default"
    every: Cadence = "log"
    update_every: Cadence = "log"
    optimizer: Optimizers = None
    scaler: torch.amp.GradScaler | None = None
    mask: Mask | Callable[[], Mask | None] | None = None
    reference_mask: Mask | Callable[[], Mask | None] | None = None
    batch_first: bool | None = None
    schedule: AlphaSchedule | None = None
    reference: Callable[[], Any] | Literal["first batch"] | None = None
    output_site: str | None = None
    sites: str | Mapping[str, str] | None = None
    total_every_step: bool = True
    parallel: Parallel | PipelineScheduleSingle = "auto"
    share: Share | None = None
    recorder: DeviceRecorder | None = None
    measured: Callable[[int], bool] = _never
    curvature_every: CurvatureCadence = "auto"
    curvature_loss: Callable[[], torch.Tensor] | None = None
    curvature_batch: CurvatureBatch = "fixed"
    restore: bool = False
    stateless: bool = False
    record: Record = None
    strict: bool = False
    tapped: Sequence[Place] = ()

    def __post_init__(self) -> None:
        checked(self.every, "every")
        checked(self.update_every, "update_every")
        checked_curvature(self.curvature_every)
        if self.reference_mask is not None and not callable(self.reference):
            raise UsageError(
                "reference_mask= is the mask of the batch that the function reference= runs: give that function too, "
                "or leave reference_mask out. The first training batch has the mask that mask= gave for it."
            )
        if self.batch_first not in (True, False, None):
            raise UsageError(f"batch_first = {self.batch_first!r} must be True, False or None.")
        if self.curvature_batch not in get_args(CurvatureBatch):
            known = " or ".join(map(repr, get_args(CurvatureBatch)))
            raise UsageError(f"curvature_batch = {self.curvature_batch!r} must be {known}.")
        if self.record not in (None, "ledger", "off") and not hasattr(self.record, "instruments"):
            known = "stabilitylab.Recorder(loss_fn), 'ledger', 'off' or None"
            raise UsageError(f"record = {self.record!r} must be {known}.")

    def keywords(self) -> dict[str, Any]:
        """Return the options by name, for a function that takes them as keywords."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def takes(
    options: Callable[P, Made],
) -> Callable[[Callable[[Self_, A, B, Made], None]], Callable[Concatenate[Self_, A, B, P], None]]:
    """Make an ``__init__`` whose last argument is a dataclass of options take the options as keywords.

    Type checkers and ``inspect.signature`` see each option by name.
    """

    def decorated(init: Callable[[Self_, A, B, Made], None]) -> Callable[Concatenate[Self_, A, B, P], None]:
        @functools.wraps(init)
        def taking(self: Self_, first: A, second: B, /, *args: P.args, **given: P.kwargs) -> None:
            init(self, first, second, options(*args, **given))

        *own, _ = inspect.signature(init).parameters.values()
        named = inspect.signature(options).parameters.values()
        taking.__signature__ = inspect.Signature([*own, *named])  # pyright: ignore[reportAttributeAccessIssue]
        return taking

    return decorated
