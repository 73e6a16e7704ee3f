"""The words for errors that are not ours."""

from __future__ import annotations

import pytest

from stabilitylab.errors import InputError, UsageError, first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("size mismatch\nat layer 3"), "size mismatch"),
        (InputError("\n  why  \nmore"), "why"),
        (RuntimeError(), "RuntimeError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("x" * 900), "x" * 400),
    ],
)
def test_the_first_line_that_says_something(error: Exception, said: str) -> None:
    assert first_line(error) == said
    assert first_line(error, 3) == said[:3]


def test_a_long_line_ends_with_a_whole_word() -> None:
    error = UsageError("leave out the probes that look at one of them")
    assert first_line(error, 30) == "leave out the probes [...]"
    assert first_line(error, 26) == "leave out the probes [...]"
    assert first_line(error, 25) == "leave out the [...]"
    assert first_line(error, 45) == str(error)


def test_an_error_without_a_message_is_said_to_be_one() -> None:
    assert first_line(RuntimeError("\n"), otherwise="without a message") == "without a message"
