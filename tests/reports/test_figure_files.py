"""Where a figure stands: in a file of its paper that its id names, with its runs; what is there is registered."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from stabilitylab.experiments import SWEEPS
from stabilitylab.reports import FIGURES
from stabilitylab.reports.claims import CLAIMS

HOME = "stabilitylab.reports.figures"


def home(id: str) -> str:
    """``branchnorm:8`` -> ``branchnorm.figure_8``, ``admin:grid`` -> ``admin.grid``."""
    paper, _, name = id.partition(":")
    return f"{HOME}.{paper}.{f'figure_{name}' if name.isdigit() else name.lower()}"


@pytest.mark.parametrize("id", FIGURES)
def test_an_id_names_the_file_of_its_figure(id: str) -> None:
    assert FIGURES[id].__module__ == home(id), f"move the figure {id} to this module"


@pytest.mark.parametrize("id", SWEEPS)
def test_the_runs_of_a_figure_stand_in_its_file_and_say_what_they_are(id: str) -> None:
    assert SWEEPS[id].runs.__module__ == home(id), f"move the runs of {id} to this module"
    opening = (SWEEPS[id].runs.__doc__ or "").split(" ")[0].rstrip(".")
    assert opening.endswith("s"), f"the docstring of the runs of {id} starts with no verb in -s: {opening!r}"


@pytest.mark.parametrize("id", sorted(CLAIMS))
def test_a_claim_stands_in_the_folder_of_the_figure_that_shows_it(id: str) -> None:
    folder = home(CLAIMS[id].figure).rpartition(".")[0]
    assert CLAIMS[id].measure.__module__.rpartition(".")[0] == folder, f"move the claim {id} beside {CLAIMS[id].figure}"


def pictures(source: str) -> list[set[str]]:
    """The keywords of each picture that is made in ``source``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Picture"]
    return [{keyword.arg or "" for keyword in call.keywords} for call in made]


@pytest.mark.parametrize("id", FIGURES)
def test_every_picture_says_what_its_runs_are(id: str) -> None:
    cls = next(cls for cls in FIGURES[id].__mro__ if "picture" in vars(cls))
    found = pictures(Path(inspect.getsourcefile(cls) or "").read_text(encoding="utf-8"))
    assert found, f"{id}: its file makes no Picture"
    without = [sorted(keywords) for keywords in found if "provenance" not in keywords]
    assert without == [], f"{id}: a Picture with these keywords has no provenance="


def test_a_picture_without_provenance_is_found() -> None:
    assert pictures("Picture([], '', provenance='x')\nPicture([], '')") == [{"provenance"}, set()]
