"""How long `stabilitylab report` takes over many large runs, and how much memory.

One run of 100L-100L with 500 probed steps is written with made-up numbers and linked under many names and seeds. Then
the command runs as a user would run it, in processes of their own: from nothing, again with nothing changed, and for
one figure alone. Prints a line each: wall time, CPU time, peak memory of the largest process, page size.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np
from timing import command

from stabilitylab.config import resolve
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter
from stabilitylab.store.documents import reseal

ARCHS = ("postln", "preln", "deepnorm", "branchnorm", "admin")
SUBLAYERS = {"encoder": ("self_attn", "ffn"), "decoder": ("self_attn", "cross_attn", "ffn")}


def tables(layers: int) -> list[Table]:
    """The default probes' tables of an encoder-decoder with ``layers`` layers a side."""
    places = [
        Row(f"{stack}.{n}.{sublayer}", stack, n, sublayer)
        for stack, sublayers in SUBLAYERS.items()
        for n in range(1, layers + 1)
        for sublayer in sublayers
    ]
    whole = [Row(f"{stack}.{n}", stack, n) for stack in SUBLAYERS for n in range(1, layers + 1)]
    ffn = [place for place in places if place.sublayer == "ffn"]
    return [
        Table(
            "grad_norm",
            ("value", "vo_ffn", "qk", "bias", "ln"),
            tuple(places),
            "L2 norm",
            "",
            "norm",
            "backward",
            log=True,
        ),
        Table("activation_grad_norm", ("value",), tuple(places), "L2 norm", "", "norm", "backward", log=True),
        Table(
            "ln_input", ("value", "branch", "shortcut", "p99"), tuple(places), "L2 norm per token", "", "mean", log=True
        ),
        Table("cosine_similarity", ("raw", "centred"), tuple(whole), "cosine", "", "mean", "reference", log=False),
        Table(
            "activation_sparsity",
            ("nonzero_fraction",),
            tuple(ffn),
            "share of entries",
            "",
            "mean",
            "reference",
            log=False,
        ),
        Table("update_ratio", ("value", "rms"), tuple(places), "ratio", "", "", "update", log=True),
    ]


def write_run(path: Path, layers: int, steps: int) -> None:
    config = resolve({"train": {"steps": steps, "seed": 3}}, depth=2 * layers)
    random = np.random.default_rng(0)
    defined = tables(layers)
    with RunWriter.create(path, {"label": "branchnorm", "config": config.model_dump(mode="json")}) as run:
        run.open(defined)
        for step in range(steps):
            cells = {
                table.name: Cells(
                    np.exp(random.normal(size=(len(table.rows), len(table.columns)))), np.zeros(len(table.rows), bool)
                )
                for table in defined
            }
            loss = 7.0 - 4.0 * step / steps
            numbers = {
                "loss": loss,
                "nll": loss,
                "held_out_nll": loss,
                "held_out_accuracy": 0.1,
                "grad_norm_total": 1.0,
            }
            run.append(step, {**numbers, "grad_norm_nonbranch": 1.0}, cells)
        verdict = {"state": "trained", "step": 0, "reason": "made up", "nll_gap": -1.0, "accuracy_gap": 0.1}
        run.set_status("finished", steps, "made up", verdict=verdict)


def link(source: Path, target: Path, arch: str, seed: int) -> None:
    """The same numbers as another run: its own JSON files, its columns and their inventory linked."""
    for path in source.rglob("*"):
        new = target / path.relative_to(source)
        if path.is_dir():
            new.mkdir(parents=True, exist_ok=True)
        elif path.suffix in (".parquet", ".jsonl"):
            new.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, new)
    document = json.loads((source / "run.json").read_text())
    document["label"] = document["config"]["model"]["arch"] = arch
    document["config"]["train"]["seed"] = seed
    (target / "run.json").write_text(json.dumps(document))
    reseal(target / "run.json")
    (target / "status.json").write_text((source / "status.json").read_text())


def timed(what: str, out: Path, *arguments: str) -> None:
    """Run `report` with these arguments, and print a line about it."""
    used = command("report", *arguments, "--out", str(out), "--quiet")
    page = (out / "index.html").stat().st_size / 1e6
    print(f"| {what} | {used.wall:.1f} | {used.cpu:.1f} | {used.memory:.0f} | {page:.1f} | {used.code} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--layers", type=int, default=100, help="a side")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--figure", default="branchnorm:8", help="the one that is made alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "runs"
        write_run(Path(scratch) / "one", options.layers, options.steps)
        for place in range(options.runs):
            arch, seed = ARCHS[place % len(ARCHS)], 3 + place // len(ARCHS)
            link(Path(scratch) / "one", folder / f"{arch}-s{seed}", arch, seed)
        print(f"{options.runs} runs of {options.layers}L-{options.layers}L x {options.steps} probed steps")
        print("| report | wall [s] | CPU [s] | memory [MiB] | page [MB] | exit |\n|---|---|---|---|---|---|")
        report = Path(scratch) / "report"
        timed("from nothing", report, str(folder))
        timed("again, nothing changed", report, str(folder))
        timed(f"`--figure {options.figure}`", Path(scratch) / "alone", str(folder), "--figure", options.figure)


if __name__ == "__main__":
    main()
