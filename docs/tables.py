#!/usr/bin/env python
"""Writes the tables of README.md, docs/detectors.md and docs/preflight.md from the registries and their sources.

    python docs/tables.py [--write]

A table stands between ``<!-- table:NAME -->`` and ``<!-- end -->``. Without ``--write`` the script compares, names the
pages that differ, and ends with 1. Whoever adds a command, a probe, an architecture, a detector or a bound
runs it with ``--write``; a plug-in of another package is not listed.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from stabilitylab.arch_notes import notes
from stabilitylab.check.bounds import BOUNDS
from stabilitylab.commands import COMMANDS
from stabilitylab.diagnose import DETECTORS, series
from stabilitylab.models import ARCHS
from stabilitylab.probes import PROBES

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "results"))  # page_blocks.py
from page_blocks import Blocks, table  # noqa: E402
from page_blocks import main as written  # noqa: E402
from page_blocks import renewed as with_blocks  # noqa: E402

PAGES = (DOCS.parent / "README.md", DOCS / "detectors.md", DOCS / "preflight.md")
RANKS = (
    (60, "architectures of the three papers"),
    (150, "of their tables"),
    (10**9, "in use today"),
)  # largest rank of each row


def is_ours(entry: object) -> bool:
    """True for an entry of this package; others are plug-ins."""
    return str(getattr(entry, "__module__", "")).startswith("stabilitylab.")


def commands() -> list[str]:
    """Every command with the first sentence of its help."""
    known = sorted((one for one in COMMANDS.values() if is_ours(one.function)), key=lambda one: one.rank)
    rows = [(f"`{one.name}`", one.help.split("\n\n")[0].split(". ")[0].rstrip(".")) for one in known]
    return table(("command", "what it does"), rows)


def nouns() -> list[str]:
    """The probes by the page of docs/probes that describes them, and the architectures in the order of their ranks."""
    rows = []
    brought = {name for probe in PROBES.values() for name in probe.brings}  # which come with another
    for page in sorted((DOCS / "probes").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        named = [name for name in re.findall(r"```{probe} (\w+)", text) if is_ours(PROBES[name])]
        names = [name for name in named if name not in brought]
        if names:
            title = text.splitlines()[0].lstrip("# ")
            rows.append((f"probes: [{title.lower()}](docs/probes/{page.name})", listed(names)))
    ours = [note for note in notes().values() if note.name in ARCHS and is_ours(ARCHS[note.name])]
    least = 0
    for most, words in RANKS:
        rows.append((words, listed(note.name for note in ours if least < note.rank <= most)))
        least = most
    return table(("what", "names"), rows)


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def detectors() -> list[str]:
    """Every kind of event with its rule and the advice."""
    known = [one for one in DETECTORS.values() if is_ours(one.find)]
    return table(("event", "rule", "what to do"), [(one.title, one.rule, one.remedy) for one in known])


def thresholds() -> list[str]:
    """Every threshold of the detectors: its value, and the comment behind it."""
    homes = [sys.modules[one.find.__module__] for one in DETECTORS.values() if is_ours(one.find)]
    rows = {}
    for module in dict.fromkeys([series, *homes]):
        for name, value, comment in constants(Path(str(module.__file__)).read_text(encoding="utf-8")):
            rows[name] = (f"`{name}`", f"{value:g}", comment)
    return table(("name", "value", "of"), rows.values())


def constants(source: str) -> Iterator[tuple[str, float, str]]:
    """Yield (name, value, comment) of every public number of a module; raises ValueError if one has no comment."""
    lines: dict[int, list[tokenize.TokenInfo]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines.setdefault(token.start[0], []).append(token)
    for tokens in lines.values():
        words = [token.string for token in tokens if token.type != tokenize.NEWLINE]
        found = re.fullmatch(r"([A-Z][A-Z_]*) = (-?[\d.e+-]+)", tokens[0].line.split("#")[0].rstrip())
        if found:
            if not words[-1].startswith("#"):
                raise ValueError(
                    f"{found[1]} = {found[2]} has no comment that says of what it is: write one behind it."
                )
            yield found[1], float(found[2]), words[-1].lstrip("# ")


def bounds() -> list[str]:
    """Every bound of ``check``, with its reason."""
    rows = [(b.name, b.statistic, f"{b.limit:g}", b.severity, b.reason) for b in BOUNDS.values()]
    return table(("bound", "statistic", "limit", "beyond it", "because"), rows)


TABLES: Blocks = {
    "commands": commands,
    "nouns": nouns,
    "detectors": detectors,
    "thresholds": thresholds,
    "bounds": bounds,
}


def renewed(text: str) -> str:
    """A page with its tables made anew; raises KeyError for one that nothing makes."""
    return with_blocks(text, TABLES, "table")


def main() -> int:
    return written(__doc__, PAGES, renewed)


if __name__ == "__main__":
    sys.exit(main())
