#!/usr/bin/env python
"""Makes a notebook of each tutorial: ``python docs/tutorials/notebooks.py --write``; without it, checks the ones here.

Text becomes text. A program that begins with its file's name becomes a cell that writes this file, other Python a cell
that runs, and the commands of a console block a cell of bash. What commands print is left to the notebook.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

HERE = Path(__file__).resolve().parent
FENCE = re.compile(r"^(?:<!-- long -->\n)?```(python|console)[^\n]*\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")
BASH = "%%bash --no-raise-error\n"  # an exit code of 1 is a result


def commands(block: str) -> str:
    """Return the commands of a console block, a line each, without what they print."""
    joined = re.sub(r"\\\n +", "", block)
    return "\n".join(line[2:] for line in joined.splitlines() if line.startswith("$ "))


def cell_of(kind: str, block: str) -> NotebookNode:
    """Return the cell of a fenced block."""
    if kind == "console":
        return v4.new_code_cell(BASH + commands(block))
    if named := NAMED.match(block):
        return v4.new_code_cell(f"%%writefile {named[1]}\n{block.rstrip()}")
    return v4.new_code_cell(block.rstrip())


def notebook_of(page: str) -> NotebookNode:
    """Return the notebook of a page, without outputs."""
    cells, start = [], 0
    for fence in FENCE.finditer(page):
        cells += [text for text in (page[start : fence.start()].strip(),) if text]
        cells.append(cell_of(fence[1], fence[2]))
        start = fence.end()
    cells += [text for text in (page[start:].strip(),) if text]
    whole = [v4.new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    for number, cell in enumerate(whole):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=whole, metadata={"kernelspec": kernel})


def written(page: Path) -> str:
    """Return the notebook's file for a page."""
    notebook = notebook_of(page.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them")
    given = parser.parse_args()
    old = []
    for page in sorted(HERE.glob("*.md")):
        path = page.with_suffix(".ipynb")
        if given.write:
            path.write_text(written(page), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != written(page):
            old.append(path.name)
    if old:
        print(f"{', '.join(old)}: not made of the page; run python docs/tutorials/notebooks.py --write")
    return bool(old)


if __name__ == "__main__":
    sys.exit(main())
