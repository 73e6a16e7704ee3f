"""``bisect``: the first sub-layer where two runs, or two models, differ."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import UsageError
from ..printable import screen
from ._factory import OF_CHECK, OF_LR_FIND, made_by
from ._options import JSON, VERBOSE, print_json
from .base import command

if TYPE_CHECKING:
    from ..bisect import Bisection, PlaceGap
    from ..bisect.sides import BisectSubject

SHOWN = 6  # places of a pass that are shown
AROUND = 2  # places that are shown before the first one over the limit


@command("bisect", rank=105)
def bisect(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A run directory, a file of 'fingerprint', or PACKAGE.MODULE:FACTORY."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The run, file or function to compare with A.")],
    control: Annotated[
        list[Path] | None,
        typer.Option(
            help="Stored runs: a run like A with another kernel, number of threads or order of summation, whose "
            "difference from A measures rounding; repeatable.",
            metavar="RUN",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Stored runs: the step to compare.", show_default="first common")
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="REGEX=REPLACEMENT", help="Turn names in B into names in A; repeatable."),
    ] = None,
    limit: Annotated[float, typer.Option(help="An error up to this many times the control is rounding.")] = 3.0,
    controls: Annotated[int, typer.Option(min=1, help="Models: the number of control runs of A.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Models: the random seed before each model is made.")] = 0,
    sums_only: Annotated[
        bool, typer.Option("--sums-only", help="Models: name a suspect only; do not feed B the inputs of A.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw error against depth to this file (.png, .svg, .pdf).")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every place.")] = False,
    as_json: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Find the first sub-layer where two runs, precisions or implementations differ, and tell rounding from a bug.

    Two models run one after the other, each in a process of its own. The finding is confirmed: each module of B gets
    the input of the same module of A. Two stored runs give a suspect only; they need the probe 'fingerprint' and an
    equal batch. docs/bisect.md has the rules.

    Exit codes: 0 identical, or rounding; 1 a difference in what is computed; 2 usage, no fingerprint, or no place in
    common; 4 a run, a file or the factory's module is missing, or the factory fails; 5 environment.
    """
    from ..bisect.stored import of_stored

    maps = map_ or []
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--picture {picture} must end in .png, .svg or .pdf.")
    kinds = [_is_factory(text) for text in (a, b)]
    if len({*kinds}) > 1:
        raise UsageError("A and B must be of one kind: two stored runs or files, or two PACKAGE.MODULE:FACTORY.")
    with screen(stderr=True).status(Text(f"comparing {a} and {b}")):
        if all(kinds):
            if foreign := [name for name, given in (("--control", control), ("--step", step is not None)) if given]:
                raise UsageError(f"{foreign[0]} is about stored runs: leave it out, since A and B are models.")
            from ..bisect.find import of_sides
            from ..bisect.sides import elsewhere

            found = of_sides(
                partial(subject_of_factory, a), partial(subject_of_factory, b), (a, b), maps=maps, limit=limit,
                controls=controls, feed=not sums_only, seed=seed, do=elsewhere,
            )  # fmt: skip
        else:
            found = of_stored(a, b, control, step=step, maps=maps, limit=limit)
    if picture is not None:
        from ..reports.bisection import write

        write(found, picture)
    if as_json:
        print_json(found.as_dict())
    else:
        show(screen(piped=400), found, every)
        if picture is not None:
            print(f"picture: {picture}", file=sys.stderr)
    return found.exit_code


def subject_of_factory(factory: str) -> BisectSubject:
    """Return the subject of a user's function."""
    from ..bisect.sides import BisectSubject
    from ..check import preflight

    takes = [name for name in inspect.signature(preflight).parameters if name != "every"]
    given = made_by(factory, "bisect", "bisect", takes, {*OF_LR_FIND, *OF_CHECK})
    return BisectSubject(given["model"], given["batch"], given["loss_fn"], given.get("mask"))


def _is_factory(text: str) -> bool:
    return ":" in text and not Path(text).exists()


def show(console: Console, found: Bisection, every: bool) -> None:
    """Print the answer, and a table of the places around it."""
    from ..terminal import Field, print_table

    for sentence in found.sentences():
        console.print(sentence, width=min(console.width, 140))
    if found.verdict == "identical":
        return
    shown = [(place, "fed") for place in _chosen(found, found.fed, every)]
    phases = list(dict.fromkeys(place.phase for place in found.places))
    if found.first is not None and not every:  # what comes after the first difference depends on it
        phases = phases[: phases.index(found.first.phase) + 1]
    for phase in phases:
        of_phase = [place for place in found.places if place.phase == phase]
        shown += [(place, phase) for place in _chosen(found, of_phase, every)]
    if not shown:
        return
    has_others = any(place.other != place.name for place, _ in shown)
    columns = [
        Field("pass", need=9),
        Field("place"),
        *([Field("in the second", need=4)] if has_others else []),
        Field("error", right=True, need=10),
        Field("inherited", right=True, need=5),
        Field("added", right=True, need=6),
        Field("control", right=True, need=7),
        Field("added / control", right=True, need=11),
        Field("", need=8),
    ]
    console.print()
    names = [[phase, place.name, *([place.other] if has_others else [])] for place, phase in shown]
    print_table(console, columns, [[*own, *_cells(found, place)] for own, (place, _) in zip(names, shown, strict=True)])


def _chosen(found: Bisection, places: Sequence[PlaceGap], every: bool) -> Sequence[PlaceGap]:
    """Return the places that are shown: those around the first over the limit, else the largest."""
    if every:
        return places
    over = [number for number, place in enumerate(places) if place.is_over(found.limit)]
    if over:
        start = max(0, over[0] - AROUND)
        return places[start : start + SHOWN]
    largest = sorted((place for place in places if place.judged), key=lambda place: -place.factor)[:1]
    return [place for place in largest if place.error]


def _cells(found: Bisection, place: PlaceGap) -> list[str]:
    """Return the cells of a place behind its names."""
    numbers = [place.error, place.inherited, place.added, place.control]
    shown = [f"{number:.2g}" for number in numbers]
    factor = f"{place.factor:.3g}" if place.judged else ""
    over = "over" if place.is_over(found.limit) else ""
    if place == found.first:
        over = "first"
    elif not place.judged:
        over = "no signal"
    return [*shown, factor, over]
