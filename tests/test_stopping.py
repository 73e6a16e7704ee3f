"""What asks a process to stop, and how often: one request that arrives several times is one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from stabilitylab import stopping
from stabilitylab.stopping import Requests, listening

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("heard", "count", "first"),
    [
        ([(0, TERM)], 1, TERM),
        ([(0, TERM), (0.001, TERM), (9, TERM)], 1, TERM),
        ([(0, TERM), (5, HUP), (9, TERM)], 1, TERM),
        ([(0, INT), (0.5, INT), (0.9, INT)], 1, INT),
        ([(0, INT), (1.5, INT)], 2, INT),
        ([(0, INT), (0.6, INT), (1.2, INT), (1.7, INT)], 2, INT),
        ([(0, TERM), (3, INT)], 1, TERM),  # the first Ctrl-C asks for what was asked already
        ([(0, TERM), (3, INT), (5, INT)], 2, TERM),
        ([(0, INT), (2, INT), (4, INT)], 3, INT),
        ([], 0, None),
    ],
)
def test_requests_are_counted(heard, count, first, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests()
    for time, number in heard:
        monkeypatch.setattr(stopping.time, "monotonic", lambda now=time: now)
        requests.hear(number)
    assert (requests.count, requests.signal) == (count, first)


def test_handlers_are_put_back_and_an_ignored_hangup_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with listening() as requests:
            os.kill(os.getpid(), HUP)
            assert requests.signal is None
            os.kill(os.getpid(), TERM)
            assert requests.signal == TERM
        assert signal.getsignal(TERM) is signal.SIG_DFL
        assert signal.getsignal(HUP) is signal.SIG_IGN
        monkeypatch.setattr(stopping, "APART", -1.0)
        with pytest.raises(KeyboardInterrupt), listening(at_once=True):  # noqa: PT012
            os.kill(os.getpid(), INT)
            os.kill(os.getpid(), INT)
    finally:
        signal.signal(HUP, before)


def test_work_that_saves_nothing_is_stopped_once() -> None:
    done = []
    with pytest.raises(stopping.Stopped, match="SIGTERM") as caught, stopping.stopping():  # noqa: PT012
        try:
            os.kill(os.getpid(), TERM)
        finally:
            os.kill(os.getpid(), TERM)  # while it cleans up
            done.append(True)
    assert (caught.value.signal, done) == (TERM, [True])
    with stopping.undisturbed():
        assert {*signal.pthread_sigmask(signal.SIG_BLOCK, [])} >= {INT, TERM, HUP}
    assert TERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_request_whose_exception_was_lost_is_obeyed_at_the_next_step() -> None:
    with pytest.raises(stopping.Stopped, match="SIGINT"), stopping.stopping() as obey:  # noqa: PT012
        obey()
        with contextlib.suppress(stopping.Stopped):  # as compiled code does that clears errors
            os.kill(os.getpid(), INT)
        obey()


def test_another_thread_gets_no_signals() -> None:
    heard = []
    thread = threading.Thread(target=lambda: heard.append(listening().__enter__().signal))
    thread.start()
    thread.join()
    assert heard == [None]
