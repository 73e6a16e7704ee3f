"""A pass over a fixed batch, run directly or replayed as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ...probes import DeviceRecorder, attempt

log = logging.getLogger(__name__)

Numbers = dict[str, Tensor]


class ReplayedPass:
    """``work``, recorded at its second call and replayed from then on. What depends on the row lies on the device.

    The first call runs directly, as it fills caches; a pass that gives nothing then is never recorded. If the recording
    fails, every call runs directly, with the same numbers, and one warning says so. ``name``: the name of the pass in
    that warning. ``around``: makes the context of ``work`` on the host, such as one that keeps random states. The
    context itself is not recorded, and replays run without it.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Numbers],
        recorder: DeviceRecorder,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._name, self._work, self._around = name, work, around
        self._recorder: DeviceRecorder | None = recorder
        self._ran = False
        self._recorded: tuple[Numbers, Callable[[], None]] | None = None

    def __call__(self) -> Numbers:
        if self._recorded is None:
            with self._around():
                direct = self._directly()
            if direct is not None:
                return direct
        assert self._recorded is not None, "a pass that did not run was recorded"
        numbers, replay = self._recorded
        replay()
        return {name: each.clone() for name, each in numbers.items()}  # the next replay overwrites what it gave

    def _directly(self) -> Numbers | None:
        """Run the pass; or record it, which computes nothing, and return None."""
        if self._recorder is None:
            return self._work()
        if not self._ran:
            self._ran = True
            numbers = self._recorder.warm_up(self._work)
            if not numbers:
                self._recorder = None
            return numbers
        found = attempt(self._recorder, self._work)
        if isinstance(found, str):
            log.warning("%s is not replayed: it cannot be recorded (%s).", self._name, found)
            self._recorder = None
            return self._work()
        self._recorded = found
        return None
