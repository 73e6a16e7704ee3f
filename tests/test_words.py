"""Docstrings of the package start with a verb or a noun phrase, and their first sentence is no question."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from imports import PACKAGE

FORBIDDEN = ("What", "Whether", "Is", "Of", "Those", "That", "How", "Which", "Where")
OPENING = re.compile(rf"(?:{'|'.join(FORBIDDEN)})\b")
# File below stabilitylab/ -> docstrings that still break the rule. Numbers only go down; a new file has none.
REMAINING: dict[str, int] = {
    "probes/_engine/__init__.py": 1,
    "probes/_engine/board.py": 4,
    "probes/_engine/cadence.py": 1,
    "probes/_engine/first_batch.py": 1,
    "probes/_engine/guard.py": 1,
    "probes/_engine/hooks.py": 2,
    "probes/_engine/masks.py": 3,
    "probes/_engine/passes.py": 5,
    "probes/_engine/recorder.py": 3,
    "probes/_engine/row.py": 4,
    "probes/_engine/scaling.py": 1,
    "probes/_engine/selection.py": 3,
    "probes/_engine/tapped.py": 3,
    "probes/_engine/watchable.py": 2,
    "probes/base.py": 3,
    "probes/library/activations.py": 1,
    "probes/library/adam.py": 1,
    "probes/library/attention.py": 5,
    "probes/library/branches.py": 2,
    "probes/library/critical_sharpness.py": 1,
    "probes/library/gradients.py": 1,
    "probes/library/logits.py": 1,
    "probes/library/outliers.py": 1,
    "probes/library/preconditioned_sharpness.py": 1,
    "probes/library/rank.py": 3,
    "probes/library/representations.py": 2,
    "probes/library/residual.py": 1,
    "probes/library/router.py": 1,
    "probes/library/sharpness.py": 1,
    "probes/library/updates.py": 2,
    "probes/numerics.py": 2,
    "probes/rules.py": 1,
}


def broken(source: str) -> Iterator[str]:
    """Yield "line N, NAME: first line" for each docstring of a module that breaks the rule."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = (ast.get_docstring(node) or "").strip()
        sentence = re.split(r"(?<=[.?!])\s", text, maxsplit=1)[0]
        if OPENING.match(text) or sentence.endswith("?"):
            name = "module" if isinstance(node, ast.Module) else node.name
            yield f"line {node.body[0].lineno}, {name}: {text.splitlines()[0]}"


def found() -> dict[str, list[str]]:
    """File below stabilitylab/ -> its docstrings that break the rule; files without one are left out."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {name: [*broken(path.read_text(encoding="utf-8"))] for name, path in files.items()}
    return {name: own for name, own in lines.items() if own}


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    now = found()
    more = {name: own for name, own in now.items() if len(own) > REMAINING.get(name, 0)}
    text = "\n".join(f"stabilitylab/{name}, {line}" for name, own in more.items() for line in own)
    assert not more, f"reword: a docstring starts with a verb or a noun phrase, and asks nothing:\n{text}"
    counts = {name: len(own) for name, own in now.items()}
    stale = {name: (count, counts.get(name, 0)) for name, count in REMAINING.items() if counts.get(name, 0) < count}
    assert not stale, f"lower REMAINING (written, found): {stale}; all of it is now {counts}"


@pytest.mark.parametrize(
    "docstring",
    [
        *(f"{word} it is." for word in FORBIDDEN),
        "Does it train?",
        "Does it train? A question, with a second sentence.",
    ],
)
@pytest.mark.parametrize(
    "source",
    [
        '"""{}"""',
        'class A:\n    """{}"""',
        'class A:\n    @property\n    def b(self):\n        """{}"""',
        'def f():\n    async def g():\n        """\n        {}\n        """',
    ],
)
def test_a_forbidden_opening_is_found(source: str, docstring: str) -> None:
    (line,) = broken(source.format(docstring))
    assert docstring in line


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the sum.",
        "The sum.",
        "Offsets.",
        "Isolate a layer.",
        "Whatever.",
        "True if a = 1. Why? The test says.",
        "",
    ],
)
def test_a_verb_or_a_noun_is_allowed(docstring: str) -> None:
    assert [*broken(f'def f():\n    """{docstring}"""')] == []
