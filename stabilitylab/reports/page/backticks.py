"""Text in which names of knobs and commands stand in backticks, as HTML."""

from __future__ import annotations

import re

from markupsafe import Markup, escape


def with_code(text: str) -> Markup:
    """Escape a text, and make what stands between two backticks ``<code>``; a single backtick stays.

    >>> with_code("set `lr` to < 0.1")
    Markup('set <code>lr</code> to &lt; 0.1')
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # escaped above
