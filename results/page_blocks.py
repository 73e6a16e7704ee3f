"""Holds pages against the tables that they speak of: blocks between ``<!-- MARK:NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Blocks = Mapping[str, Callable[[], list[str]]]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines]


def renewed(text: str, blocks: Blocks, mark: str = "results") -> str:
    """A page with its blocks of ``mark`` made anew; raises KeyError for one that nothing makes."""
    return re.sub(
        rf"<!-- {mark}:(\w+) -->\n.*?<!-- end -->",
        lambda match: f"<!-- {mark}:{match[1]} -->\n" + "\n".join(blocks[match[1]]()) + "\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def main(doc: str | None, pages: Iterable[Path], anew: Callable[[str], str]) -> int:
    """Compares each page with what ``anew`` makes of it, or writes it with ``--write``; 1 where a digit differs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages anew")
    given = parser.parse_args()
    changed = differing(pages, anew, given.write)
    if changed and not given.write:
        print(f"{', '.join(changed)}: the page differs from its tables; --write makes it anew", file=sys.stderr)
    return int(bool(changed) and not given.write)


def differing(pages: Iterable[Path], anew: Callable[[str], str], write: bool = False) -> list[str]:
    """The pages that ``anew`` changes, by name; written where ``write`` is set."""
    changed = []
    for page in pages:
        before = page.read_text(encoding="utf-8")
        if (after := anew(before)) != before:
            changed.append(page.name)
            if write:
                page.write_text(after, encoding="utf-8")
    return changed
