"""The reading of docstrings and formulas: prose unchanged, TeX as MathML, which a browser shows without a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def as_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """``|a|`` and ``*tokens`` in a docstring's prose mean themselves; its literals and examples are left alone."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "... ")):
            parts = re.split(r"(``.*?``)", line)
            lines[number] = "".join(p if p.startswith("``") else re.sub(r"([|*])", r"\\\1", p) for p in parts)


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", as_text)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"version": "1", "parallel_read_safe": True}
