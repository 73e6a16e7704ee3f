"""Signals that ask a process to stop, and the number of requests that they are."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

APART = 1.0  # seconds after a Ctrl-C; only a later one is another request
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Requests:
    """The requests to stop. ``signal``: the first one, None before; ``count``: their number.

    A scheduler signals a process and its group, a terminal every process in it, so one request arrives several times.
    Only another Ctrl-C, more than a second after the one before, is another request.
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


class Stopped(BaseException):
    """A request to stop, by ``signal``, of work that has nothing to save: the work is undone on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """Raise :class:`Stopped` at the first request, once: the same request does not interrupt clean-up again.

    An exception out of a signal handler can be lost where it strikes: compiled code that clears errors, a callback of
    the garbage collector. What this yields raises it again, for the work to call between its steps.
    """
    with listening(raising=lambda requests: Stopped(requests.signal or signal.SIGINT)) as requests:

        def obey() -> None:
            if requests.signal is not None:
                raise Stopped(requests.signal)

        yield obey


@contextmanager
def undisturbed() -> Iterator[None]:
    """Start processes within this context that are never asked to stop: the caller ends them.

    They inherit the blocked signals, also while they still start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def listening(at_once: bool = False, raising: Callable[[Requests], BaseException] | None = None) -> Iterator[Requests]:
    """Collect requests instead of dying of them, in the main thread, which alone gets signals.

    ``at_once``: the second request raises KeyboardInterrupt; ``raising``: each request raises the exception that this
    returns. A hangup that is ignored (nohup) stays ignored.
    """
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def catch(number: int, frame: object) -> None:
        before = requests.count
        requests.hear(number)
        if raising is not None and requests.count > before:
            raise raising(requests)
        if at_once and requests.count > 1:
            raise KeyboardInterrupt

    numbers = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
