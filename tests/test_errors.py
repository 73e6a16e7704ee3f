"""The words for errors that are not ours."""

from __future__ import annotations

import pytest

from stabilitylab.errors import InputError, first_line


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


def test_an_error_without_a_message_is_said_to_be_one() -> None:
    assert first_line(RuntimeError("\n"), otherwise="without a message") == "without a message"
