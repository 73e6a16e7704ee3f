"""evaluation.tsv: the translations of a run, line by line, beside their references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError
from ..store.files import contents, replace_file

NAME = "evaluation.tsv"
HEAD = "reference\thypothesis"
BREAKS = str.maketrans("\t\r\n", "   ")  # every metric treats these as white space


def plain(lines: Sequence[str]) -> list[str]:
    """Return the lines as cells of the table: tabs and line breaks become spaces."""
    return [line.translate(BREAKS) for line in lines]


def write(run: Path, references: Sequence[str], hypotheses: Sequence[str]) -> None:
    rows = [HEAD, *map("\t".join, zip(plain(references), plain(hypotheses), strict=True))]
    replace_file(run / NAME, "".join(f"{row}\n" for row in rows).encode())


def read(run: Path) -> tuple[list[str], list[str]]:
    """Return (references, hypotheses). Raises InputError if the run was not evaluated or the table is damaged."""
    path = run / NAME
    try:
        text = contents(run, path).decode()
    except FileNotFoundError as error:
        raise InputError(f"{run} has not been evaluated: run stabilitylab evaluate {run} first.") from error
    except UnicodeDecodeError as error:
        raise _damaged(run) from error
    head, *lines = text.removesuffix("\n").split("\n")
    cells = [line.split("\t") for line in lines]
    if head != HEAD or not cells or any(len(row) != 2 for row in cells):
        raise _damaged(run)
    return [row[0] for row in cells], [row[1] for row in cells]


def _damaged(run: Path) -> InputError:
    return InputError(f"{run / NAME} is damaged: run stabilitylab evaluate {run} again.")
