"""Text files for sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("a.de", "a.en", "v.de", "v.en"):
        (folder / name).write_text(f"text of {name}\n")
    return folder
