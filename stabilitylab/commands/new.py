"""``new``: the first files of a probe of your own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from .base import command


@command("new", rank=125)
def new(
    what: Annotated[Literal["probe"], typer.Argument(help="The kind of file.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Its name, such as gate_share.", show_default=False)],
    folder: Annotated[
        Path, typer.Option(help="The folder to write to: any folder, or a checkout of this repository.")
    ] = Path(),
) -> None:
    """Begin a probe of your own: write a module that runs, and its test.

    In a checkout of this repository the files go to its library and its tests, and docs/probes gets an entry.
    docs/own-probe.md says what a probe may do.
    """
    from ..errors import UsageError
    from ..probes import PROBES
    from ..scaffold import new_probe

    if name in PROBES:
        raise UsageError(f"there is a probe {name!r} already ('stabilitylab list probes {name}'): choose another name.")
    files = new_probe(name, folder)
    for path in files:
        print(path)
    module, test = files[:2]
    print(f"Try it:  python -m pytest {test}")
    if find_spec("pytest") is None:
        print("         (first: pip install pytest)")
    if len(files) == 2:
        print(f"Then:    stabilitylab --plugin {module.stem} probe --arch deepnorm --depth 12 --probes default,{name}")
        print(f"Read it: stabilitylab export runs/deepnorm-12-s0 --to csv --tables {name}")
    else:
        print("Then:    python docs/tables.py --write, which writes the tables of probes anew")
