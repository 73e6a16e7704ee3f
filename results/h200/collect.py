"""What remains: the report and small tables under h200/, and archives with which another machine goes on."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from parts import Progress
from place import Clock, Place

from stabilitylab.probes._engine.cadence import is_due
from stabilitylab.store import Run, inventory, load_runs
from stabilitylab.store.files import replace_file

SHOWN = Path("h200")
PIECE = 14 * 2**20  # bytes of one archive
FIGURES = 30.0  # seconds below which the report is not begun
EVERY = 50  # steps of a probe's table that an archive keeps beside those of the schedule "log"
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
TEXTS = ("examples",)  # of an evaluation: sentences of the corpus, which are not ours to hand on


def report(place: Place, clock: Clock) -> Progress:
    """Small tables and logs first; then the figures and the ledger of ``stabilitylab report``, if there is time."""
    if not any(Path("runs").glob("*/*/*/run.json")):
        return Progress("partial", "no run yet")
    tables(place)
    if clock.left() < FIGURES:
        return Progress("partial", f"tables alone; the figures need no GPU: --part report --out {Path.cwd().name}")
    command = [place.python, "-m", "stabilitylab", "report", "runs", "--out", "report", "-q"]
    if place.smoke:
        one = min(Path("runs").glob("*/*/*/run.json")).parent.relative_to("runs")
        command += ["--figure", "branchnorm:3", "--run", one.as_posix()]
    code = place.call(command, clock, Path("report.txt"))
    for path in sorted(Path("report").glob("figures/*")):
        if path.suffix in (".png", ".pdf", ".csv"):
            _copy(path, SHOWN / "figures" / path.name)
    for path in Path("report").glob("claims.*"):
        _copy(path, SHOWN / path.name)
    tables(place)
    if code != 0:
        return Progress("partial", "the report did not end; what was made before stands")
    size = sum(path.stat().st_size for path in SHOWN.rglob("*") if path.is_file())
    return Progress("complete", f"{len([*SHOWN.glob('figures/*.png')])} figures, {size / 2**20:.1f} MiB in {SHOWN}/")


def tables(place: Place) -> None:
    """A row a run, benchmarks, logs, how the parts stand: everything small, and no text of the corpus."""
    SHOWN.mkdir(exist_ok=True)
    runs(SHOWN / "runs.csv")
    for path in sorted(Path("benchmarks").rglob("*")):
        if path.suffix in (".md", ".png", ".csv"):
            _copy(path, SHOWN / "benchmarks" / path.name)
    for source, target in (("tests/log.txt", "tests.txt"), (place.log.path, "log.txt")):
        if Path(source).exists():
            (SHOWN / target).write_text(without_paths(Path(source).read_text(encoding="utf-8", errors="replace")))
    (SHOWN / "parts.md").write_text(parts_table(place))
    entry = {"decided": place.state.decided, "calls": place.state.calls, "host": platform.machine()}
    (SHOWN / "calls.json").write_text(json.dumps(entry, indent=1) + "\n")


def runs(path: Path) -> None:
    """One row a run: what it was, how it ended, how fast it was, BLEU."""
    broken: list[tuple[Path, str]] = []
    rows = [described(run) for run in load_runs(Path("runs"), broken)]
    rows += [{"run": str(found.relative_to("runs")), "state": "unreadable"} for found, _ in broken]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0] if rows else ("run",)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue().encode())


def described(run: Run) -> dict[str, Any]:
    status, config = run.status, run.config
    verdict = run.verdict
    metrics = run.metrics
    speed = metrics["tokens_per_second"].iloc[10:].median() if "tokens_per_second" in metrics else math.nan
    scored = run.path / "evaluation.json"
    score = json.loads(scored.read_text(encoding="utf-8")) if scored.exists() else {}
    ends = {name: metrics[name].dropna() for name in ("held_out_nll", "validation_nll") if name in metrics}
    facts: Mapping[str, Any] = {
        "run": run.path.relative_to("runs").as_posix(),
        "label": run.manifest.get("label", ""),
        "layers": f"{config['model']['encoder_layers']}-{config['model']['decoder_layers']}",
        "width": config["model"]["d_model"],
        "seed": config["train"]["seed"],
        "updates": f"{status.step}/{config['train']['steps']}",
        "warmup": config["train"]["warmup"],
        "T": config["model"]["T"],
        "precision": config["train"]["precision"],
        "state": status.state,
        "verdict": verdict.state if verdict else "",
        "since": verdict.step if verdict else "",
        "nll_gap": verdict.nll_gap if verdict else "",
        **{name: losses.iloc[-1] if len(losses) else "" for name, losses in ends.items()},
        "bleu": score.get("bleu", ""),
        "chrf": score.get("chrf", ""),
        "bleu_signature": score.get("signature", ""),
        "tokens_per_second": speed,
        "memory_gib": metrics["memory_bytes"].max() / 2**30 if "memory_bytes" in metrics else "",
        "device": run.manifest.get("device", ""),
        "torch": run.manifest.get("torch", ""),
        "git_revision": run.manifest.get("git_revision", ""),
    }
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in facts.items()}


def parts_table(place: Place) -> str:
    """How each part stands, for README.md."""
    lines = ["| part | state | seconds | what there is |", "|---|---|---|---|"]
    for name, entry in place.state.parts.items():
        lines.append(f"| {name} | {entry['state']} | {entry['seconds']:.0f} | {entry['sentence'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part: they say nothing elsewhere."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", text)


def keep() -> list[Path]:
    """Writes kept-N.tar.gz: everything with which another machine goes on, but weights, and no text of the corpus.

    Finished runs whole but for their probes' tables, of which the steps of the schedule "log" and every 50th are kept;
    metrics have every step. A run that has not ended is left out: elsewhere it begins anew.
    """
    small = [Path(name) for name in ("state.json", "log.txt", "tests", "benchmarks", "evaluations", "h200")]
    groups = [[file for path in small for file in _plain(path)]]
    ended = (run for run in load_runs(Path("runs"), []) if run.status.state in ("finished", "diverged"))
    groups.extend([*_thinned(run.path)] for run in ended)
    pieces: list[list[tuple[str, bytes]]] = [[]]
    for group in groups:
        if pieces[-1] and sum(len(data) for _, data in (*pieces[-1], *group)) > PIECE:
            pieces.append([])
        pieces[-1] += group
    paths = [Path(f"kept-{number}.tar.gz") for number in range(1, len(pieces) + 1)]
    for path, piece in zip(paths, pieces, strict=True):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=5) as archive:
            for name, data in piece:
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        replace_file(path, buffer.getvalue())
    for old in {*Path().glob("kept-*.tar.gz")} - {*paths}:
        old.unlink()
    return paths


def unpack() -> int:
    """Where there are archives and nothing else: puts them in place; returns how many."""
    pieces = sorted(Path().glob("kept-*.tar.gz"))
    if Path("state.json").exists():
        return 0
    for piece in pieces:
        with tarfile.open(piece) as archive:
            archive.extractall(**SAFELY)
    return len(pieces)


def _plain(path: Path) -> Iterator[tuple[str, bytes]]:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        yield file.as_posix(), file.read_bytes()


def _thinned(run: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a run without weights and text, of the probes' rows the usual ones; and an inventory that fits."""
    parts: dict[tuple[str, int], bytes] = {}
    for file in sorted(each for each in run.rglob("*") if each.is_file()):
        within = file.relative_to(run)
        if within.parts[0] == "checkpoints" or file.name == "evaluation.tsv" or file.name.startswith("."):
            continue
        data = file.read_bytes()
        if file.name == "evaluation.json":
            scores = {key: value for key, value in json.loads(data).items() if key not in TEXTS}
            data = json.dumps(scores, indent=2).encode()
        if within.parts[0] == "probes" and file.suffix == ".parquet":
            data = parts[within.parts[1], int(file.stem.rpartition("-")[2])] = _fewer_steps(file)
        if file.name != inventory.FILE:
            yield file.as_posix(), data
    if (found := inventory.read(run)) is not None:
        entries = [_as_it_is(entry, parts) for own in found.entries.values() for entry in own]
        yield (run / inventory.FILE).as_posix(), inventory.text_of(entries).encode()


def _as_it_is(entry: inventory.Entry, parts: Mapping[tuple[str, int], bytes]) -> inventory.Entry:
    if (data := parts.get((entry.table, entry.part))) is None:
        return entry
    steps = pq.read_table(io.BytesIO(data), columns=["step"])["step"].to_numpy()
    return inventory.entry_of(entry.table, entry.part, steps, memoryview(data))


def _fewer_steps(path: Path) -> bytes:
    rows = pq.ParquetFile(path).read()
    steps = sorted(set(rows["step"].to_pylist()))
    kept = [step for step in steps if is_due(step, "log") or step % EVERY == 0 or step == steps[-1]]
    buffer = io.BytesIO()
    fewer = rows.filter(pc.is_in(rows["step"], pc.cast(kept, "int64")))
    pq.write_table(fewer, buffer, write_page_checksum=True)  # type: ignore[arg-type]
    return buffer.getvalue()
