"""The registration of subcommands: a decorator, and the registry that the command line reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..registry import Registry, Room

EXIT_CODES = (
    "Exit codes: 0 ok; 1 a check failed or internal error; 2 usage or configuration; 3 diverged under "
    "--fail-on-divergence; 4 input, data or run missing or unreadable; 5 environment (no CUDA, space or memory, a "
    "missing extra); 129 / 130 / 143 stopped by SIGHUP / Ctrl-C / SIGTERM, after a flush and a checkpoint."
)
REPLACED = {  # commands that are gone -> what took their place
    "forecast": "'lr-find' finds the best and the largest safe rate of any model by trials, and docs/edges.md has the "
    "rates up to which the reference designs train.",
    "recommend": "'lr-find --arch NAME' finds the rates of one architecture, and docs/edges.md has those up to which "
    "all of them train.",
}
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Command:
    """A subcommand: a function that typer reads, its position in ``--help``, and True if its own help has the exit
    codes."""

    name: str
    function: Callable[..., Any]
    rank: int
    exit_codes: bool = False

    @property
    def help(self) -> str:
        """Return the function's docstring, a paragraph a line for the terminal to wrap; a paragraph with indented lines
        is unchanged."""
        paragraphs = inspect.cleandoc(self.function.__doc__ or "").split("\n\n")
        return "\n\n".join(one if "\n " in one else one.replace("\n", " ") for one in paragraphs)


COMMANDS: Registry[Command] = Registry("command", Room("stabilitylab.commands", "stabilitylab.commands"))


def command(name: str, *, rank: int = 1000, exit_codes: bool = False) -> Callable[[F], F]:
    """Register a function as ``stabilitylab NAME``: its parameters are the options, its docstring the help."""

    def decorate(function: F) -> F:
        entry = Command(name, function, rank, exit_codes)
        COMMANDS.register(name, module=function.__module__)(entry)
        return function

    return decorate
