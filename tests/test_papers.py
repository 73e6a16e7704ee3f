"""The list of all figures and tables of the papers names every figure that there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stabilitylab.experiments import SWEEPS, experiments
from stabilitylab.reports import FIGURES, figures

assert figures
PAGE = (Path(__file__).resolve().parents[1] / "docs" / "papers.md").read_text(encoding="utf-8")
PAPERS = {"BranchNorm": (9, 4), "DeepNet": (9, 3), "Admin": (7, 2)}  # figures and tables up to these numbers
Row = tuple[str, str, str, str]  # item, what it shows, id, depths or reason


def rows(page: str) -> dict[str, list[Row]]:
    """The rows under each heading."""
    sections = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    found: dict[str, list[Row]] = {}
    for paper, text in zip(sections[::2], sections[1::2], strict=True):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
        found[paper] = [(item, shown, id.strip("`"), rest) for item, shown, id, rest in cells[2:]]
    return found


ROWS = [row for section in rows(PAGE).values() for row in section]


def numbered(items: list[str], kind: str) -> set[int]:
    """The numbers in ``Figure 3`` and ``Figures 6, 7``."""
    found = [re.match(rf"{kind}s? ([\d, ]+)", item) for item in items]
    return {int(number) for match in found if match for number in re.findall(r"\d+", match[1])}


def test_every_figure_stands_there_and_what_stands_there_is_a_figure() -> None:
    ours = {id for id, figure in FIGURES.items() if figure.source.startswith("stabilitylab")}  # of no paper
    own = {id for id in FIGURES if id.partition(":")[0] in (*map(str.lower, PAPERS), "table")} - ours
    known = {"table:edge", "table:keel", "rates:loss", "family:gradients", "histograms:ridges", "fingerprints:error"}
    assert ours == known, "other figures of no paper than this test knows"
    assert {id for _, _, id, _ in ROWS if id} == own, "the ids in docs/papers.md differ from the registry of figures"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_numbered_figure_and_table_has_a_row_with_an_id_or_a_reason(paper: str) -> None:
    own = rows(PAGE)[paper]
    for kind, last in zip(("Figure", "Table"), PAPERS[paper], strict=True):
        assert numbered([item for item, *_ in own], kind) == {*range(1, last + 1)}, f"docs/papers.md, {paper}: {kind}s"
    empty = [item for item, shown, _, rest in own if not (shown and rest)]
    assert empty == [], f"docs/papers.md, {paper}: these rows have an empty cell"
    without = [id for _, _, id, rest in own if id and not re.match(r"\d", rest)]
    assert without == [], f"docs/papers.md, {paper}: these figures have no depths"
    depths = [item for item, _, id, rest in own if not id and re.match(r"\d", rest)]
    assert depths == [], f"docs/papers.md, {paper}: these rows have depths and no figure: give the reason"


@pytest.mark.parametrize("id", sorted({id for _, _, id, _ in ROWS if id in SWEEPS}))
def test_the_depths_are_those_of_the_sweep(id: str) -> None:
    run = {each.config.model.encoder_layers for each in experiments(id)}
    for rest in (rest for _, _, own, rest in ROWS if own == id):
        depths = {int(number) for number in rest.split(";")[0].split(",")}
        assert depths == run, f"docs/papers.md, {id}: other depths than its sweep has"


def test_a_missing_and_an_invented_figure_would_be_noticed() -> None:
    page = PAGE.replace("| Figure 9 |", "| Figure |", 1).replace("`admin:5`", "`admin:55`")
    changed = rows(page)
    assert numbered([item for item, *_ in changed["BranchNorm"]], "Figure") == {*range(1, 9)}
    assert "admin:55" in {id for _, _, id, _ in changed["Admin"]}
