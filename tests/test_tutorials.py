"""What the tutorials show runs as it stands, and prints what they say: each page is run as its notebook."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loose_scripts import scripts_of
from rest_slow import EVERY, rest_slow

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(TUTORIALS.glob("*.md"))
# The long checks try the others; the commands of these two have tests of their own, of sweeps and of ranks.
LONGEST = ("compare-architectures", "watch-a-run-on-a-cluster")
LONG = re.compile(r"^<!-- long -->\n```console\n.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def notebooks() -> Iterator[ModuleType]:
    with scripts_of("docs/tutorials") as load:
        yield load("notebooks")


def shape(line: str) -> list[str]:
    """The words of a line, with # for each number that is the machine's: all but whole numbers below 1000."""
    return re.sub(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+|\d{4,}", "#", line).split()


def expected(page: str) -> list[list[str]]:
    """The lines that each console block shows below its commands."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = (re.sub(r"\\\n +", "", block).splitlines() for block in blocks)
    return [[line for line in lines if line not in ("", "...") and not line.startswith("$ ")] for lines in shown]


def missing(lines: list[str], printed: str) -> list[str]:
    """The lines that are not printed, in their order."""
    rest = iter([shape(line) for line in printed.splitlines()])
    return [line for line in lines if shape(line) not in rest]


def printed_by(cell: dict) -> str:
    """What a cell printed, without colours, which a notebook asks for."""
    text = "".join(output.get("text", "") for output in cell["outputs"] if output["output_type"] == "stream")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default:Parsing dates involving a day of month:DeprecationWarning")
@pytest.mark.parametrize(
    "page", rest_slow(PAGES, (), [page for page in PAGES if page.stem not in LONGEST]), ids=lambda path: path.stem
)
def test_the_page_shows_what_its_commands_print(
    tmp_path: Path, page: Path, notebooks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    text = page.read_text(encoding="utf-8")
    if not EVERY:
        text = LONG.sub("", text)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in {"OMP_NUM_THREADS": "1", "COLUMNS": "140", "IPYTHONDIR": str(tmp_path / "ipython")}.items():
        monkeypatch.setenv(name, value)
    notebook = notebooks.notebook_of(text)
    (folder := tmp_path / "empty").mkdir()
    NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(folder)}}).execute()
    ran = [cell for cell in notebook["cells"] if cell["source"].startswith(notebooks.BASH)]
    shown = expected(text)
    assert len(shown) == len(ran) > 0, f"{page.name} shows no command"
    for lines, cell in zip(shown, ran, strict=True):
        printed = printed_by(cell)
        commands = cell["source"].removeprefix(notebooks.BASH)
        assert missing(lines, printed) == [], f"{page.name}: {commands}\nprints\n{printed}"
        if "torchrun" not in commands:  # which prints one of its own for a job that is killed
            assert "Traceback" not in printed, f"{page.name}: {commands}\nfails\n{printed}"
    drawn = [output for cell in notebook["cells"] for output in cell.get("outputs", ()) if "data" in output]
    assert any("image/png" in output["data"] for output in drawn), f"{page.name} draws nothing"


def test_the_notebooks_are_those_of_the_pages(notebooks: ModuleType) -> None:
    for page in TUTORIALS.glob("*.md"):
        own = page.with_suffix(".ipynb").read_text(encoding="utf-8")
        assert own == notebooks.written(page), "run python docs/tutorials/notebooks.py --write"
    assert len([*TUTORIALS.glob("*.ipynb")]) == len([*TUTORIALS.glob("*.md")]), "a notebook without a page"


def test_a_page_becomes_cells(notebooks: ModuleType) -> None:
    page = (
        "# Title\n\nText.\n\n```python\n# a.py\nx = 1\n```\n\nMore.\n\n```console\n$ python a.py \\\n    now\nfine\n"
        "$ echo $?\n1\n```\n\n```python\nprint(2)\n```\n"
    )
    cells = [(cell["cell_type"], cell["source"]) for cell in notebooks.notebook_of(page)["cells"]]
    assert cells == [
        ("markdown", "# Title\n\nText."),
        ("code", "%%writefile a.py\n# a.py\nx = 1"),
        ("markdown", "More."),
        ("code", "%%bash --no-raise-error\npython a.py now\necho $?"),
        ("code", "print(2)"),
    ]
    assert expected(page) == [["fine", "1"]]


def test_lines_are_looked_for_in_their_order() -> None:
    assert missing(["a 1.5", "b"], "x\na 2.5\nb") == []
    assert missing(["b", "a"], "a\nb") == ["a"]
    assert missing(["a 7"], "a 8") == ["a 7"]
