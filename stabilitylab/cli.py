"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer

from ._version import __version__
from .commands.check import check
from .commands.claims import claims
from .commands.compare import compare
from .commands.diagnose import diagnose
from .commands.evaluate import evaluate
from .commands.export import export
from .commands.listing import list_, runs
from .commands.onestep import onestep
from .commands.options import EXIT_CODES
from .commands.probe import probe
from .commands.recommend import recommend
from .commands.report import report
from .commands.sweep import sweep
from .errors import StabilityLabError

INTERRUPTED = 130
app = typer.Typer(
    name="stabilitylab",
    help="Will a deep Transformer train, which layer breaks first, and why.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
CommandLineError: Any = typer.BadParameter.__mro__[
    2
]  # click's own base class, which typer vendors from some version on


def main() -> None:
    """Entry point: errors of ours become one sentence on stderr and their exit code."""
    verbose = any(flag in sys.argv[1:] for flag in ("-v", "--verbose"))
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer makes a KeyboardInterrupt this code; a command that caught it returns it
            code = _complain("stopped by Ctrl-C; what was recorded is kept.", INTERRUPTED, False)
    except StabilityLabError as error:
        code = _complain(error, error.exit_code, verbose)
    except (KeyboardInterrupt, typer.Abort):  # other versions of typer let it through
        code = _complain("stopped by Ctrl-C; what was recorded is kept.", INTERRUPTED, verbose)
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except Exception as error:
        if isinstance(error, CommandLineError):
            message = error.format_message()  # type: ignore[attr-defined]
            code = _complain(f"{message} (see --help)", 2, verbose) if message else 2  # a bare call showed its help
        else:
            code = _complain(f"internal error: {type(error).__name__}: {error} (-v shows where).", 1, verbose)
    sys.exit(code or 0)


def _complain(message: object, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    print(f"stabilitylab: {message}", file=sys.stderr)
    return code


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", help="Print the version.", callback=lambda value: _version(value), is_eager=True),
    ] = None,
) -> None: ...


def _version(asked: bool | None) -> None:
    if asked:
        print(f"stabilitylab {__version__}")
        raise typer.Exit


app.command(epilog=EXIT_CODES)(probe)
app.command()(check)
app.command()(sweep)
app.command()(onestep)
app.command()(recommend)
app.command()(report)
app.command()(claims)
app.command()(evaluate)
app.command()(diagnose)
app.command()(compare)
app.command()(export)
app.command("list")(list_)
app.command()(runs)
