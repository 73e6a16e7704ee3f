"""Docstrings of the package start with a verb or a noun phrase, and their first sentence is no question."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from imports import PACKAGE

FORBIDDEN = ("What", "Whether", "Is", "Of", "Those", "That", "How", "Which", "Where")
OPENING = re.compile(rf"(?:{'|'.join(FORBIDDEN)})\b")


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


@pytest.mark.slow
def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    text = "\n".join(f"stabilitylab/{name}, {line}" for name, own in found().items() for line in own)
    assert not text, f"reword: a docstring starts with a verb or a noun phrase, and asks nothing:\n{text}"


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


# A verdict is how the training of a run stands. What a claim gets is a judgement; other commands have a result.
JUDGED = ("claims.md", "ledger.md", "findings.md", "figures.md", "results.md", "neutral.md", "bisect.md", "explain.md")
VERDICT = re.compile(r"\bverdicts?\b", re.IGNORECASE)


def misnamed(text: str) -> list[str]:
    """Return the lines of a page that call something else than the state of a run's training a verdict."""
    prose = re.sub(
        r"```.*?```|`[^`\n]*`|\([^()\s]*\)", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL
    )
    return [line for line in prose.splitlines() if VERDICT.search(line) and "verdict is how" not in line]


@pytest.mark.parametrize("name", JUDGED)
def test_a_claim_has_a_judgement_and_a_run_a_verdict(name: str) -> None:
    assert misnamed((PACKAGE.parent / "docs" / name).read_text(encoding="utf-8")) == []


def test_a_misnamed_judgement_is_found() -> None:
    assert misnamed("The claim's verdict is late.\n`verdict` is its key.") == ["The claim's verdict is late."]
