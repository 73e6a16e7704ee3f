"""A configuration as a TOML file that ``probe --config`` reads back as exactly the same configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..config import Config


def dumps(config: Config) -> str:
    """Return the resolved settings, section by section; None is left out, since TOML has no such value."""
    settings = config.model_dump()
    lines = [f"{key} = {_value(value)}" for key, value in settings.items() if not isinstance(value, Mapping)]
    for section, values in settings.items():
        if isinstance(values, Mapping):
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):  # the options of an architecture: an inline table
        return f"{{{', '.join(f'{_value(str(key))} = {_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, str):  # JSON's escapes are TOML's; only DEL is plain in JSON and forbidden in TOML
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"[{', '.join(map(_value, value))}]"
