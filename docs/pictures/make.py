"""The pictures of README.md and docs: a recording of the live panel (SVG), screenshots of pages (PNG), the gallery.

    python docs/pictures/make.py             # all of them
    python docs/pictures/make.py gallery     # or some: panel, pages, demo, gallery

The panel is recorded while a 200-layer Post-LN trains for a few updates, the gallery is of a BranchNorm trained for it,
each page is that of the program which README.md or a tutorial shows, and the demo is the page of ``make demo``. The
screenshots need a Chromium, the demo ten minutes of two cores.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "tests" / "reports")]

from stabilitylab.config import resolve  # noqa: E402
from stabilitylab.reports.build import build  # noqa: E402
from stabilitylab.terminal import LiveDisplay  # noqa: E402
from stabilitylab.train import plan, start  # noqa: E402

WIDTH = 100  # columns of the recorded terminal
STEPS, FRAMES, SECONDS = 60, 10, 0.9  # updates of the recorded run, its pictures, and how long each stands
MOST = 300_000  # bytes
# Of rich's frame of a terminal only what is needed: no font is fetched.
FRAME = """<g class="frame" style="animation-delay: -{{late}}s"><style>{styles}</style>
<g transform="translate(9, 9)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></g>"""
WHOLE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The panel of stabilitylab probe: progress, loss, and the layers of encoder and decoder by gradients</title>
<style>text {{ font: 20px Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
.frame {{ visibility: hidden; animation: seen {all}s steps(1) infinite; }}
@keyframes seen {{ 0% {{ visibility: visible; }} {share}% {{ visibility: hidden; }} }}</style>
<rect width="100%" height="100%" rx="8" fill="#1b1c20"/>{frames}</svg>
"""


class Recorder(LiveDisplay):
    """A panel that is kept as SVG every few updates."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=WIDTH), quiet=True)
        self.frames: list[str] = []

    def opened(self, path: Path, manifest) -> None:
        super().opened(Path("runs") / path.name, manifest)

    def show(self, report) -> None:
        super().show(report)
        if (report.row + 1) % (STEPS // FRAMES) == 0:
            page = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor")
            page.print(self.panel(report))
            code = page.export_svg(code_format=FRAME, unique_id=f"f{len(self.frames)}")
            self.frames.append(code)


def panel(path: Path) -> Path:
    """Trains, and writes the recording."""
    config = resolve({"model": {"arch": "postln"}, "train": {"steps": STEPS, "seed": 3}}, depth=200)
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        start(plan(config), Path(folder), "postln-200-s3", recorder)
    frames = recorder.frames
    every = len(frames) * SECONDS
    late = [every - place * SECONDS for place in range(len(frames))]
    shown = [frame.replace("{late}", f"{at:g}") for frame, at in zip(frames, late, strict=True)]
    height = max(float(y) for frame in shown for y in re.findall(r' y="([\d.]+)"', frame)) + 30
    whole = WHOLE.format(
        width=round(WIDTH * 12.2 + 18), height=round(height), all=every, share=100 / len(frames), frames="".join(shown)
    )
    path.write_text(whole, encoding="utf-8")
    return path


def gallery(folder: Path) -> list[Path]:
    """Trains the gallery's run, and runs the code of its page."""
    from gallery import make

    settings = {"model": {"arch": "branchnorm"}, "train": {"steps": 300, "seed": 3}, "probes": {"every": 5}}
    config = resolve(settings, depth=12)
    with tempfile.TemporaryDirectory() as runs:
        start(plan(config), Path(runs), "branchnorm-12-s3", LiveDisplay(Console(file=io.StringIO()), quiet=True))
        return make(Path(runs) / "branchnorm-12-s3", folder)


def page(source: Path, calls: Sequence[Sequence[str]], size: tuple[int, int], path: Path) -> Path:
    """Runs the first long Python block of ``source``, once for each of ``calls`` (its arguments), and writes what is
    seen first of the page about these runs."""
    programs = re.findall(r"^```python\n(.*?)^```$", source.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(programs[0], encoding="utf-8")
        for arguments in calls:
            subprocess.run([sys.executable, "train.py", *arguments], cwd=folder, check=True)
        return shot(folder, size, path)


def demo(path: Path) -> Path:
    """Makes the runs of ``make demo``, and writes what is seen first of their page."""
    makefile = (HERE.parents[1] / "Makefile").read_text(encoding="utf-8")
    (sweep,) = re.findall(r"/stabilitylab (sweep --grid .*) --jobs", makefile)
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-m", "stabilitylab", *sweep.split(), "--jobs", "2"], cwd=name, check=True)
        return shot(Path(name), (1400, 940), path)


def shot(folder: Path, size: tuple[int, int], path: Path) -> Path:
    """Writes what is seen first of the page about the runs in ``folder/runs``."""
    from browser import Browser

    with contextlib.chdir(folder):  # so that sentences name the run as a reader's own page does
        built = build(Path("runs"), Path("report"), figures=[])
    browser = Browser()
    try:
        browser.open(folder / built.page, width=size[0], height=size[1], everything=False)
        browser.run("await until(() => $$('.tower').length); await wait(1500);")
        seen = browser.shoot(folder / "page.png")
    finally:
        browser.close()
    with Image.open(seen) as image:
        image.convert("RGB").save(path, optimize=True)
    return path


def pages() -> list[Path]:
    docs = HERE.parent
    return [
        page(docs.parent / "README.md", [()], (1400, 1490), HERE / "answer.png"),
        page(docs / "tutorials" / "my-loss-spiked.md", [(), ("mended",)], (1300, 1250), HERE / "spiked.png"),
    ]


if __name__ == "__main__":
    parts = {
        "panel": lambda: [panel(HERE / "panel.svg")],
        "pages": pages,
        "demo": lambda: [demo(HERE / "demo.png")],
        "gallery": lambda: gallery(HERE),
    }
    if unknown := [name for name in sys.argv[1:] if name not in parts]:
        sys.exit(f"no pictures {unknown[0]!r}: there are {', '.join(parts)}")
    for name in sys.argv[1:] or parts:
        for each in parts[name]():
            size = each.stat().st_size
            print(f"{each.name}: {size:,} bytes")
            if size > MOST:
                sys.exit(f"{each.name} has {size:,} bytes: pictures stay below {MOST:,}")
