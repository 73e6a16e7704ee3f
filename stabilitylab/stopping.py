"""Signals that ask a process to stop, and how many requests they are."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

APART = 1.0  # seconds between two Ctrl-C that are two
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Requests:
    """``signal``: the first one heard, None before; ``count``: how many requests all of them are.

    A scheduler signals a process and its group, a terminal everybody in it, so that one request arrives several times:
    only another Ctrl-C, more than a second after the one before, is another request.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.count = 0
        self._interrupted: float | None = None  # when the last Ctrl-C that counted came

    def hear(self, number: int) -> None:
        now = time.monotonic()
        first = self.signal is None
        if first:
            self.signal = number
        again = number == signal.SIGINT and self._interrupted is not None and now - self._interrupted > APART
        if number == signal.SIGINT and (again or self._interrupted is None):
            self._interrupted = now
        self.count += first or again


@contextmanager
def listening(at_once: bool = False) -> Iterator[Requests]:
    """Collects requests instead of dying of them, in the main thread, which alone gets signals. ``at_once``: the second
    raises KeyboardInterrupt. A hangup that is ignored (under nohup) stays so."""
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def catch(number: int, frame: object) -> None:
        requests.hear(number)
        if at_once and requests.count > 1:
            raise KeyboardInterrupt

    numbers = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
