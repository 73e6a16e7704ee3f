"""Errors that reach the user: one sentence that says what is wrong and what to do, and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["DamagedError", "DivergedError", "InputError", "ResourceError", "StabilityLabError", "UsageError"]


CUT = " [...]"


class StabilityLabError(Exception):
    """The base class of all errors that the command line prints as one sentence (exit code 1)."""

    exit_code = 1


def bounded(sentence: str, most: int = 1500) -> str:
    """Return one line, without its middle if it is too long."""
    line = " ".join(sentence.split())
    return line if len(line) <= most else f"{line[: 2 * most // 3]} [...] {line[-most // 4 :]}"


def meant(name: str, known: Iterable[str], spelling: Callable[[str], str] = str) -> str:
    """Return " Did you mean 'ready'?" with the known name that is spelled nearly so; "" if none is. ``spelling``: the
    form in which names are compared."""
    spelled = {spelling(one): one for one in known}
    close = difflib.get_close_matches(spelling(name), spelled, n=1)
    return f" Did you mean {spelled[close[0]]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, such as ``a, b and 4 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def own_words(message: str) -> str:
    """Return a message of pydantic, or of typer, which calls it, without its own words before those of a ValueError."""
    return message.replace("Value error, ", "")


def in_words(error: Exception) -> str:
    """Return one sentence about any error: the message of one of ours unchanged, that of another with its type."""
    text = " ".join(str(error).split())
    if isinstance(error, StabilityLabError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException, most: int = 400, otherwise: str | None = None) -> str:
    """Return the first line of an error's message that says something, of at most ``most`` characters: a longer one
    ends with a whole word and "[...]". Without such a line return ``otherwise``, the name of its class unless given."""
    lines = (line.strip() for line in str(error).splitlines())
    nothing = type(error).__name__ if otherwise is None else otherwise
    line = next(filter(None, lines), nothing)
    if len(line) <= most:
        return line
    words = line[: max(0, most - len(CUT) + 1)].rpartition(" ")[0]
    return f"{words}{CUT}" if words else line[:most]


class UsageError(StabilityLabError):
    """An error in an argument, a name or a configuration value (exit code 2)."""

    exit_code = 2


class DivergedError(StabilityLabError):
    """The error of a run that diverged under ``--fail-on-divergence`` (exit code 3)."""

    exit_code = 3


class InputError(StabilityLabError):
    """The error of input, data, a run or a checkpoint that is missing or cannot be read (exit code 4)."""

    exit_code = 4


class DamagedError(InputError):
    """The error of a damaged run: a file of the run at ``run`` is not what was written (exit code 4). Other runs are
    not affected."""

    def __init__(self, message: str, run: Path) -> None:
        super().__init__(bounded(message, 600))  # the message may quote anything
        self.run = run

    def __reduce__(self) -> tuple[type[DamagedError], tuple[str, Path]]:
        return DamagedError, (str(self), self.run)


class ResourceError(StabilityLabError):
    """The error of an environment that lacks something: CUDA, an optional package, disk space, write access (exit code
    5)."""

    exit_code = 5
