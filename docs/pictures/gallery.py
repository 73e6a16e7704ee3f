"""The pictures of docs/gallery.md: runs the code of the page as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
NAMED = "runs/branchnorm-12-s3"  # the page's run
SIZE = (4.2, 2.6)  # inches


def blocks(page: Path = DOCS / "gallery.md") -> list[str]:
    """Reads the page's Python: what all share first, then a block a picture."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def pictures(run: Path) -> list[Any]:
    """Runs the page's code on ``run``; a figure a block."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shared, *each = blocks()
    made = []
    with matplotlib.rc_context({"figure.figsize": SIZE, "figure.dpi": 120}):
        for block in each:
            names: dict[str, Any] = {}
            exec(shared.replace(NAMED, run.as_posix()), names)
            plt.figure()
            exec(block, names)
            made.append(plt.gcf())
    return made


def make(run: Path, folder: Path) -> list[Path]:
    """Writes gallery-1.png and on."""
    import matplotlib.pyplot as plt
    from PIL import Image

    paths = []
    for place, figure in enumerate(pictures(run), 1):
        path = folder / f"gallery-{place}.png"
        figure.savefig(path, bbox_inches="tight", dpi=120)
        with Image.open(path) as image:
            image.convert("RGB").quantize(128).save(path, optimize=True)
        paths.append(path)
    plt.close("all")
    return paths
