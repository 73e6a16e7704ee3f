"""What comes back: the report and small tables under h200/, and archives with which another machine goes on."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bare import is_there
from parts import Progress
from place import CACHE, Clock, Place, State, replace_file

from stabilitylab.probes import is_due
from stabilitylab.store import Run, load_runs, thinned

SHOWN = Path("h200")
PIECE, PIECES = 14 * 2**20, 3  # bytes that go into one archive, and archives of runs
WHOLE = 2**20  # bytes of a run that keeps every row of its probes' tables in an archive
TEXT = 2**20  # bytes of the log that come back as they are
PLAIN = (".json", ".jsonl", ".txt", ".md", ".png", ".csv", ".xml", ".npz")  # of what is not a run
SMALL = ("state.json", "log.txt", "checks", "benchmarks", "h200", "report.txt", "tiny", "studies")
FIGURES = 30.0  # seconds below which the report is not begun
EVERY = 50  # steps of a probe's table that an archive keeps beside those of the schedule "log"
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4


def report(place: Place, clock: Clock) -> Progress:
    """Small tables and logs first; then the figures and the ledger of ``stabilitylab report``, if there is time."""
    tables(place)
    if not any(Path("runs").glob("*/*/*/run.json")):
        return Progress("partial", "no run yet: tables alone")
    if not is_there("plotly"):
        return Progress("complete", "tables alone, since plotly is missing; --part report elsewhere draws the figures")
    if clock.left() < FIGURES and not place.smoke:
        return Progress("partial", "tables alone; the figures need no GPU: --part report")
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
    for path in sorted(Path("checks").glob("*.json*")):
        _copy(path, SHOWN / "checks" / path.name)
    for source, target in ((Path("checks/tests.txt"), "tests.txt"), (place.log.path, "log.txt")):
        if source.exists():
            (SHOWN / target).write_text(without_paths(source.read_text(encoding="utf-8", errors="replace")))
    (SHOWN / "parts.md").write_text(parts_table(place))
    entry = {"decided": place.state.decided, "calls": place.state.calls, "host": platform.machine()}
    (SHOWN / "calls.json").write_text(json.dumps(entry, indent=1) + "\n")


def runs(path: Path) -> None:
    """One row a run: what it was, how it ended, how fast it was."""
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
    ends = {name: metrics[name].dropna() for name in ("held_out_nll", "validation_nll") if name in metrics}
    facts: Mapping[str, Any] = {
        "run": run.path.relative_to("runs").as_posix(),
        "label": run.manifest.get("label", ""),
        "layers": f"{config['model']['encoder_layers']}-{config['model']['decoder_layers']}",
        "width": config["model"]["d_model"],
        "seed": config["train"]["seed"],
        "updates": f"{status.step}/{config['train']['steps']}",
        "lr": config["train"]["lr"],
        "warmup": config["train"]["warmup"],
        "T": config["model"]["T"],
        "precision": config["train"]["precision"],
        "state": status.state,
        "verdict": verdict.state if verdict else "",
        "since": verdict.step if verdict else "",
        "nll_gap": verdict.nll_gap if verdict else "",
        **{name: losses.iloc[-1] if len(losses) else "" for name, losses in ends.items()},
        "tokens_per_second": speed,
        "memory_gib": metrics["memory_bytes"].max() / 2**30 if "memory_bytes" in metrics else "",
        "cuda_graphs": run.manifest.get("cuda_graphs", ""),
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


class Archives:
    """The files of ``out``, at most eight of at most 16 MiB: everything with which another machine goes on.

    kept-0.tar.gz holds state, logs, tables and figures; the others runs that have ended, without weights, in the order
    in which they ended, so that no archive loses a run to the next one while both are being written; cache.tar.gz
    vocabularies and the encoded corpus, which is not ours to hand on. A run that has not ended is left out: elsewhere
    it begins anew. What would be too much is left out, and state.json names it.
    """

    def __init__(self, out: Path, state: State) -> None:
        self.out, self.state = out, state
        self._runs: dict[str, list[tuple[str, bytes]]] = {}
        self._written: dict[str, int] = {}

    def keep(self) -> list[Path]:
        """Writes what is new; returns all files, the plain texts apart."""
        ended = {
            run.path.as_posix() for run in load_runs(Path("runs"), []) if run.status.state in ("finished", "diverged")
        }
        kept = self.state.kept
        kept += sorted(ended - {*kept})
        for path in kept:
            if path in ended and path not in self._runs:
                self._runs[path] = [*_files(Path(path))]
        pieces, left_out = _pieces([(path, self._runs[path]) for path in kept if path in self._runs])
        for number, piece in enumerate(pieces, start=1):
            self._write(f"kept-{number}.tar.gz", piece)
        if self.state.decided.get("left_out", []) != left_out:
            self.state.decided["left_out"] = left_out
        self.state.save()
        # later than the runs: of what it says is complete, all is there
        self._write("kept-0.tar.gz", _up_to(PIECE, [file for name in SMALL for file in _plain(Path(name))]))
        self._write("cache.tar.gz", _up_to(PIECE, [*_plain(CACHE)]))
        self.texts()
        return sorted(self.out.glob("*.tar.gz"))

    def texts(self) -> None:
        """Log and table, to be read as they are."""
        for path in (Path("log.txt"), SHOWN / "parts.md"):
            if path.exists():
                replace_file(self.out / path.name, path.read_bytes()[-TEXT:])

    def _write(self, name: str, files: list[tuple[str, bytes]]) -> None:
        mark = hash(tuple(files))
        if not files or (self._written.get(name) == mark and (self.out / name).exists()):
            return
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=5) as archive:
            for path, data in files:
                entry = tarfile.TarInfo(path)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        replace_file(self.out / name, buffer.getvalue())
        self._written[name] = mark


def _pieces(groups: Iterable[tuple[str, list[tuple[str, bytes]]]]) -> tuple[list[list[tuple[str, bytes]]], list[str]]:
    """Deals runs out to archives in their order; and those for which there is no room."""
    pieces: list[list[tuple[str, bytes]]] = [[]]
    left_out = []
    for name, group in groups:
        size = sum(len(data) for _, data in group)
        if pieces[-1] and sum(len(data) for _, data in pieces[-1]) + size > PIECE:
            if len(pieces) == PIECES:
                left_out.append(name)
                continue
            pieces.append([])
        if size > PIECE:
            left_out.append(name)
        else:
            pieces[-1] += group
    return [piece for piece in pieces if piece], left_out


def _up_to(most: int, files: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The first files that fit into ``most`` bytes."""
    kept, size = [], 0
    for name, data in files:
        if size + len(data) <= most:
            kept.append((name, data))
            size += len(data)
    return kept


def unpack(*folders: Path) -> int:
    """Where nothing was begun: puts the archives of the first folder that has any in place; returns how many."""
    if Path("state.json").exists():
        return 0
    pieces = next((found for folder in folders if (found := sorted(folder.glob("*.tar.gz")))), [])
    for piece in pieces:
        with tarfile.open(piece) as archive:
            archive.extractall(**SAFELY)
    return len(pieces)


def _files(run: Path) -> list[tuple[str, bytes]]:
    """The files of a run without weights; of a large one the probes' rows of the schedule "log" and every 50th."""
    for keep in (None, lambda step: is_due(step, "log") or step % EVERY == 0):
        files = [((run / path).as_posix(), data) for path, data in thinned(run, keep)]
        if sum(len(data) for _, data in files) <= WHOLE:
            break
    return files


def _plain(path: Path) -> Iterator[tuple[str, bytes]]:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        if file.suffix in PLAIN and not file.name.startswith("."):
            yield file.as_posix(), file.read_bytes()
