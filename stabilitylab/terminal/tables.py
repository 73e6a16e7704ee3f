"""Tables that fit the terminal: the least needed columns are dropped. If names alone are too long, rows become blocks.
No name is cut, and no word is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .words import state_style

GAP = 2  # between columns
NARROWEST = 24  # width of a column of sentences, which wraps


@dataclass(frozen=True)
class Field:
    """A column of a table. ``need``: columns of smaller need are dropped first, columns of need 0 never. ``prose``: its
    cells are sentences, which wrap between words. ``state``: its cells are states, which have colours."""

    name: str
    right: bool = False
    need: int = 0
    prose: bool = False
    state: bool = False


def print_table(console: Console, columns: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
    """Print the columns that fit, and name those that were left out. Empty columns do not count."""
    kept = [i for i, _ in enumerate(columns) if any(row[i] for row in rows)]
    dropped: list[str] = []
    while _width(columns, rows, kept) > console.width and (spare := [i for i in kept if columns[i].need]):
        least = min(spare, key=lambda i: (columns[i].need, -i))
        kept.remove(least)
        dropped.append(columns[least].name)
    if _width(columns, rows, kept) > console.width:
        _blocks(console, columns, rows, [i for i, _ in enumerate(columns) if any(row[i] for row in rows)])
        return
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", pad_edge=False)
    for i in kept:
        column = columns[i]
        justify = "right" if column.right else "left"
        least = min(_natural(columns, rows, i), NARROWEST) if column.prose else None
        table.add_column(column.name, justify=justify, no_wrap=not column.prose, min_width=least)
    for row in rows:
        table.add_row(*(_cell(columns[i], row[i]) for i in kept))
    console.print(table, highlight=False, soft_wrap=False)
    if dropped:
        left = ", ".join(reversed(dropped))
        console.print(Text(f"not shown at this width: {left} (--json has all)", style="dim"))


def fitted(
    console: Console, columns: Sequence[Field], rows: Sequence[Sequence[str]]
) -> tuple[list[Field], list[list[str]]]:
    """Return the table, with rows and columns exchanged if only then everything fits: a few rows of many columns."""
    table = list(columns), [list(row) for row in rows]
    kept = [i for i, _ in enumerate(columns) if any(row[i] for row in rows)]
    if _width(columns, rows, kept) <= console.width:
        return table
    turned = [Field(columns[0].name), *(Field(row[0], prose=True) for row in rows)]
    body = [[columns[i].name, *(row[i] for row in rows)] for i in kept[1:]]
    return (turned, body) if _width(turned, body, range(len(turned))) <= console.width else table


def _cell(column: Field, text: str) -> Text:
    return Text(text, style=state_style(text) if column.state else "")


def _natural(columns: Sequence[Field], rows: Sequence[Sequence[str]], i: int) -> int:
    return max(len(columns[i].name), *(len(row[i]) for row in rows), 0)


def _width(columns: Sequence[Field], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    def own(i: int) -> int:
        natural = _natural(columns, rows, i)
        return min(natural, max(NARROWEST, len(columns[i].name))) if columns[i].prose else natural

    return sum(own(i) for i in kept) + GAP * max(0, len(kept) - 1)


def _blocks(console: Console, columns: Sequence[Field], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> None:
    """Print each row as its first cell and, below it, a line for each other cell."""
    label = max((len(columns[i].name) for i in kept[1:]), default=0)
    for row in rows:
        console.print(Text(row[kept[0]], style="bold"), soft_wrap=True)
        for i in kept[1:]:
            if row[i]:
                line = Table.grid(padding=(0, GAP, 0, 0))
                line.add_column(min_width=label + 2, no_wrap=True)
                line.add_column(overflow="fold")
                line.add_row(f"  {columns[i].name}", _cell(columns[i], row[i]))
                console.print(line, highlight=False)
