"""Text of a run, which a stranger may have written, on a terminal, without control characters.

A label, a reason or the name of a directory may hold escape sequences (which rename a window, write to the clipboard or
wipe printed lines), or marks that reverse the direction of writing. Each is shown as Python writes it.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from typing import Any, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.control import Control
from rich.segment import Segment

KEPT = "\n\t\u200c\u200d"  # the last two join letters of Persian, of Indian scripts, and emoji
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # control, format, surrogate, separators of lines and paragraphs
F = TypeVar("F", bound=Callable[..., Any])


def printable(text: str) -> str:
    """Return ``text`` with each control and format character as its escape (``\\x1b``, ``\\u202e``); lines and tabs
    stay."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign in KEPT or unicodedata.category(sign) not in HIDDEN else _escaped(sign) for sign in text
    )


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")


class Stream:
    """A text stream in front of ``below`` that makes all letters printable."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        self.below.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


class _Printable:
    """Renders an object, and shows the control characters of its text; those of rich itself pass."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


class _Hook:
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [one if isinstance(one, Control) else _Printable(one) for one in renderables]


def screen(*, stderr: bool = False, piped: int | None = None, soft_wrap: bool = False) -> Console:
    """Return a console of rich on standard output, or ``stderr``, that prints text as it is: printable, without markup,
    and in no colour of its own. ``piped``: its columns if the output is no terminal.

    FORCE_COLOR, which notebooks and CI set, colours the output; it does not let progress on ``stderr`` move where there
    is no terminal.
    """
    stream: Any = sys.stderr if stderr else sys.stdout
    file = stream.below if isinstance(stream, Stream) else stream
    is_piped = not file.isatty()
    console = Console(
        file=file,
        width=piped if is_piped else None,
        soft_wrap=soft_wrap,
        emoji=False,
        markup=False,
        highlight=False,
        force_terminal=False if stderr and is_piped else None,
    )
    console.push_render_hook(_Hook())  # pyright: ignore[reportArgumentType]
    return console


@contextmanager
def printable_output() -> Iterator[None]:
    """Make all text to standard output and error printable within this context."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(Stream(sys.stdout)))  # pyright: ignore[reportArgumentType]
        stack.enter_context(redirect_stderr(Stream(sys.stderr)))  # pyright: ignore[reportArgumentType]
        yield


def printing(function: F) -> F:
    """Return ``function`` with printable output."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with printable_output():
            return function(*args, **options)

    return call  # pyright: ignore[reportReturnType]
