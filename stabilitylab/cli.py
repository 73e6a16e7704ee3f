"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from ._version import __version__
from .commands import COMMANDS, EXIT_CODES, REPLACED
from .errors import StabilityLabError, UsageError, bounded, own_words
from .inputs import shown
from .printable import printable, printing
from .registry import PLUGINS, add_plugin
from .stopping import Stopped

INTERRUPTED = 130
# click's own base class, which typer vendors from some version on
CommandLineError: Any = typer.BadParameter.__mro__[2]
BY_HAND = "stopped by Ctrl-C; no earlier result is lost."


def main() -> None:
    """Run the command line. An error of ours becomes one sentence on stderr and its own exit code."""
    verbose = any(flag in sys.argv[1:] for flag in ("-v", "--verbose"))
    try:
        if any("\0" in argument for argument in sys.argv):
            raise UsageError("an argument holds a NUL character: remove it, since no path and no name can hold one.")
        arguments = without_plugins(sys.argv[1:])
        if instead := REPLACED.get(next(iter(arguments), "")):
            raise UsageError(f"'{arguments[0]}' is gone: {instead}")
        code = build()(args=arguments, standalone_mode=False)
        if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code, and commands that catch one return it
            code = _complain(BY_HAND, INTERRUPTED, False)
    except StabilityLabError as error:
        code = _complain(error, error.exit_code, verbose)
    except (KeyboardInterrupt, typer.Abort):  # other versions of typer raise these
        code = _complain(BY_HAND, INTERRUPTED, verbose)
    except Stopped as stop:
        code = _complain(f"stopped by {stop}; the earlier files are unchanged.", 128 + stop.signal, False)
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except MemoryError as error:
        told = str(error).strip() or "an allocation failed"
        code = _complain(f"out of memory ({told}): give fewer or smaller runs, or use a larger machine.", 5, verbose)
    except OSError as error:  # not explained by other code: a name that is too long, a folder in place of a file
        named = shown(str(error.filename), 300) if error.filename else "a file"
        code = _complain(f"cannot use {named} ({error.strerror or error}): check the path.", 4, verbose)
    except Exception as error:
        if isinstance(error, CommandLineError):
            message = own_words(error.format_message())  # type: ignore[attr-defined]
            code = _complain(f"{message} (see --help)", 2, verbose) if message else 2  # a bare call showed its help
        else:
            code = _complain(f"internal error: {type(error).__name__}: {error} (-v shows where).", 1, verbose)
    sys.exit(code or 0)


def _complain(message: object, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    print(printable(f"stabilitylab: {bounded(str(message))}"), file=sys.stderr)
    return code


class _Plain:
    """A mixin that hides the type of a flag in help, since a flag takes no value; newer versions of typer print it."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.display_type = lambda ctx: ""
        return parameters


class _Command(_Plain, typer.core.TyperCommand): ...


class _Group(_Plain, typer.core.TyperGroup): ...


def build() -> typer.Typer:
    """Return the command line of all registered commands."""
    app = typer.Typer(
        name="stabilitylab",
        cls=_Group,
        help="Find out if a deep Transformer will train, which layer breaks first, and why.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for entry in sorted(COMMANDS.values(), key=lambda entry: (entry.rank, entry.name)):
        epilog = EXIT_CODES if entry.exit_codes else None
        app.command(entry.name, cls=_Command, help=entry.help, epilog=epilog)(printing(entry.function))
    return app


def without_plugins(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` without ``--plugin MODULE``, which may stand anywhere and takes effect before anything is
    imported."""
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        option, equals, module = argument.partition("=")
        if option != "--plugin":
            rest.append(argument)
            continue
        module = module if equals else next(waiting, "")
        if not module or module.startswith("-"):
            raise UsageError("--plugin needs the name of a module: --plugin mypackage.myarch.")
        add_plugin(module)
    return rest


def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", help="Print the version.", callback=lambda value: _version(value), is_eager=True),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Import this module first, and use the archs, probes, figures, detectors, signals, data sources and "
            "commands that it adds. It may stand before or after the command, is repeatable, and may stand in the "
            f"environment variable {PLUGINS} instead.",
        ),
    ] = None,
) -> None: ...


def _version(asked: bool | None) -> None:
    if asked:
        print(f"stabilitylab {__version__}")
        raise typer.Exit
