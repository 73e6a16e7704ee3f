"""Attacks on the store and on input, at random from a seed: cases tried, held and fallen, by kind of attack.

Each kind states what must hold. A case that falls is printed with the seed that repeats it alone
(`--only KIND --first CASE --cases 1`); the exit code is 1 then. Nothing outside a temporary folder is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stabilitylab.commands.listing import run_table
from stabilitylab.config import DataConfig, ModelConfig, ProbesConfig, TrainConfig, parse_set, read_config_file, resolve
from stabilitylab.errors import InputError, StabilityLabError, UsageError
from stabilitylab.export import export
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.digest import Hashed, fault
from stabilitylab.store.documents import reseal
from stabilitylab.store.evaluation import write_evaluation
from stabilitylab.store.verify import verify

ROWS = (Row("a", "encoder", 1, "self_attn"), Row("b", "encoder", 1, "ffn"), Row("c", "encoder", 2, "ffn"))
TABLES = (Table("grad_norm", ("value", "qk"), ROWS, total="norm"), Table("ln_input", ("value",), ROWS))
STEPS = 12
LONGEST = 1600  # letters of a sentence
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    10**400,
    "",
    "x" * 5000,
    "../../x",
    "\x1b[31m",
    "a\nb",
    [],
    {},
    [[]],
    {"a": 1},
]
SECTIONS = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "probes": ProbesConfig}
SETTINGS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
VALUES = [
    "true",
    "nan",
    "-inf",
    "1e308",
    "²",
    "9" * 5000,
    "[" * 3000,
    "{a=1}",
    "''",
    "a\nb=2",
    "x" * 9999,
    "1979-05-27",
]


class Fallen(Exception):
    """What did not hold."""


@dataclass(frozen=True)
class Attack:
    """``act(chance, run)``: one case on a fresh copy of a sound run; raises :class:`Fallen`. ``holds``: what must."""

    holds: str
    act: Callable[[random.Random, Path], None]


def numbers(step: int) -> dict[str, float | None]:
    return {"loss": 100.0 - step, "lr": None if step % 2 else 0.1}


def cells(table: Table, step: int) -> Cells:
    shape = (len(table.rows), len(table.columns))
    missing = np.zeros(shape, bool)
    missing[1, 1:] = True
    return Cells(np.arange(shape[0] * shape[1], dtype=float).reshape(shape) + step, np.zeros(shape[0], bool), missing)


def write(run: RunWriter, *steps: int) -> None:
    for step in steps:
        run.append(step, numbers(step), {table.name: cells(table, step) for table in TABLES})


def sound(path: Path) -> None:
    """Two parts and a checkpoint; then a journal that a process left behind."""
    config = resolve({"train": {"steps": STEPS}}, depth=2)
    run = RunWriter.create(path, {"label": "branchnorm", "config": config.model_dump(mode="json")})
    run.open(TABLES)
    for first in (0, 4):
        write(run, *range(first, first + 4))
        run.seal()
    write(run, *range(8, STEPS))
    (path / "checkpoints").mkdir()
    with (path / "checkpoints/step-00000008.pt").open("xb") as file:
        hashed = Hashed(file, run.run_id)
        hashed.write(bytes(range(256)) * 8 + b"\0\0")
        hashed.seal()
    write_evaluation(path, {"bleu": 12.5, "row": 8, "alpha": None, "examples": [{"source": "a", "hypothesis": "b"}]})
    run._lock.release()  # as the kernel does when it dies


def flip(chance: random.Random, path: Path) -> int:
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return place


def refused(act: Callable[[], Any]) -> tuple[Any, StabilityLabError | None]:
    """What ``act`` gives, or one of our errors, which must be one sentence of bounded length."""
    try:
        return act(), None
    except StabilityLabError as error:
        if "\n" in str(error) or len(str(error)) > LONGEST:
            raise Fallen(f"not one sentence: {str(error)[:200]!r}") from error
        return None, error


def rows_as_written(run: Run) -> list[int]:
    """The steps that are read; each with the numbers that were written."""
    metrics = run.arrow("metrics").to_pydict()
    for place, step in enumerate(metrics["step"]):
        if metrics["loss"][place] != numbers(step)["loss"] or metrics["lr"][place] != numbers(step)["lr"]:
            raise Fallen(f"step {step} was read with other numbers")
    for table in TABLES:
        found = run.arrow(table.name)
        for column_place, column in enumerate(table.columns):
            for place, value in enumerate(found[column].to_pylist()):
                step = found["step"][place].as_py()
                made = cells(table, step)
                row = place % len(ROWS)
                expected = None if made.missing[row, column_place] else made.values[row, column_place]  # type: ignore[index]
                if value != expected:
                    raise Fallen(f"{table.name} at step {step} was read as {value}, and {expected} was written")
    return metrics["step"]


def journal(chance: random.Random, run: Path) -> None:
    path = run / "journal-000003.records"
    kind = chance.choice(["flip", "flip", "cut", "zeros", "hole"])
    data = path.read_bytes()
    if kind == "flip":
        flip(chance, path)
    elif kind == "cut":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "zeros":
        path.write_bytes(data + bytes(chance.randrange(5000)))
    else:
        start = chance.randrange(len(data))
        path.write_bytes(data[:start] + bytes(min(64, len(data) - start)) + data[start + 64 :])
    steps = rows_as_written(Run.open(run))
    lost = STEPS - len(steps)
    if steps != sorted(set(steps)) or lost > {"flip": 1, "cut": 4, "zeros": 0, "hole": 2}[kind]:
        raise Fallen(f"{kind}: {lost} rows lost")
    if lost and kind != "cut" and not verify(run).findings:  # a cut at a record's end cannot be told from a kill
        raise Fallen(f"{kind}: {lost} rows lost, and verify says nothing")


def parquet(chance: random.Random, run: Path) -> None:
    path = chance.choice([*run.rglob("part-*.parquet")])
    if chance.random() < 0.8:
        flip(chance, path)
    else:
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])
    refused(lambda: rows_as_written(Run.open(run)))
    if not verify(run).findings:
        raise Fallen("verify finds nothing")


def lost(chance: random.Random, run: Path) -> None:
    path = chance.choice(
        [p for p in run.rglob("*") if p.is_file() and "checkpoint" not in str(p) and p.name != ".lock"]
    )
    if path.name == "evaluation.json":
        return  # which not every run has
    path.unlink()
    if path.name == "run.json":
        if refused(lambda: Run.open(run))[1] is None:
            raise Fallen("a run without run.json was opened")
    elif not verify(run).findings:
        raise Fallen(f"nobody misses {path.name}")


def checkpoint(chance: random.Random, run: Path) -> None:
    place = flip(chance, path := run / "checkpoints/step-00000008.pt")
    if not fault(path, Run.open(run).identity):
        raise Fallen(f"byte {place} was flipped, and nobody finds it")


def document(chance: random.Random, run: Path) -> None:
    """One value anywhere in run.json, status.json or evaluation.json becomes something odd, with or without the
    checksum that fits."""
    path = run / chance.choice(["run.json", "status.json", "evaluation.json"])
    found = json.loads(path.read_text())
    at, keys = found, []
    while isinstance(at, dict | list) and at and (not keys or chance.random() < 0.8):
        keys.append(chance.choice([*at]) if isinstance(at, dict) else chance.randrange(len(at)))
        holder, at = at, at[keys[-1]]
    holder[keys[-1]] = chance.choice(ODD)
    path.write_text(json.dumps(found))
    resealed = chance.random() < 0.8
    if resealed:
        reseal(path)

    def read() -> None:
        opened = Run.open(run)
        _ = (
            opened.status,
            opened.verdict,
            opened.evaluation,
            opened.metrics,
            [opened.frame(name) for name in opened.tables],
        )
        export(opened, "csv", run.parent / "out")

    if refused(read)[1] is None and not resealed:
        raise Fallen(f"{path.name} was changed, and its checksum is not missed")
    (row,) = run_table(run)
    if len(str(row["reason"])) > LONGEST:
        raise Fallen("a reason without bounds")
    strangers = {p.name for p in run.parent.iterdir()} - {"run", "out"}
    if strangers:
        raise Fallen(f"written outside: {strangers}")


def setting(chance: random.Random, run: Path) -> None:
    value = chance.choice(
        [*VALUES, str(chance.randrange(-10, 10**6)), repr(chance.uniform(-9, 9)), repr(chance.choice(ODD))]
    )
    refused(lambda: resolve(parse_set([f"{chance.choice(SETTINGS)}={value}"]), depth=2))


def toml(chance: random.Random, run: Path) -> None:
    content = bytearray(b'preset = "tiny"\n[model]\narch = "postln"\n[train]\nlr = 1e-3\nsteps = 10\n')
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(content))
        content[place : place + chance.randrange(3)] = chance.choice(
            [b"[", b"=", b'"', b"\n", b"\xff", b"9" * 5000, b"'" * 3, b"\0", b"true", b"[" * 3000]
        )
    path = run.parent / "out.toml"
    path.write_bytes(content)
    refused(lambda: resolve(read_config_file(path), depth=2))
    path.unlink()


def text(chance: random.Random, run: Path) -> None:
    """Two files of random bytes as parallel text."""
    from stabilitylab.data.sources.text import Bounds, load_text

    lines = b"".join(f"w{i} v{i % 7} u{i % 11}\n".encode() for i in range(200))
    paths = []
    for name in ("a", "b"):
        content = bytearray(lines)
        for _ in range(chance.randrange(3)):
            place = chance.randrange(len(content))
            junk = [b"\0", b"\r", b"\xff", b"\n" * 3, b"\xe2\x80\xa8", b"x" * 30_000, chance.randbytes(9)]
            content[place:place] = chance.choice(junk)
        if chance.random() < 0.2:
            content = bytearray(content.replace(b"\n", b"\r"))
        path = run.parent / f"{name}{chance.choice(['', '.gz'])}"
        data = bytes(content)
        if path.suffix == ".gz" and chance.random() < 0.7:
            data = gzip.compress(data)[: None if chance.random() < 0.7 else -chance.randrange(1, 30)]
        path.write_bytes(data)
        paths.append(path)
    try:
        refused(lambda: load_text(",".join(map(str, paths)), None, 300, Bounds(100_000, 10_000)))
    finally:
        for path in paths:
            path.unlink()


def kill(chance: random.Random, run: Path) -> None:
    """kill -9 of a process that writes, seals and begins rows: what it acknowledged is there, and it goes on."""
    shutil.rmtree(run)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        writer = RunWriter.create(run, {})
        writer.open(TABLES)
        writer.journal_limit = 20_000
        for step in range(100_000):
            if step % 3 == 0:
                writer.begin(step, {"loss": numbers(step)["loss"]}, {})
            write(writer, step)
            os.write(tell, step.to_bytes(4, "little"))
            if random.Random(step).random() < 0.05:
                writer.seal()
        os._exit(0)
    os.close(tell)
    time.sleep(chance.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(told, "rb") as stream:
        acknowledged = len(stream.read()) // 4
    if not (run / "run.json").exists():
        return  # it died before there was a run
    metrics = Run.open(run).arrow("metrics")
    steps = metrics["step"].to_pylist()
    if steps != [*range(len(steps))] or not acknowledged <= len(steps) <= acknowledged + 1:
        raise Fallen(f"{acknowledged} rows were acknowledged, and {len(steps)} are there")
    if found := verify(run).findings:
        raise Fallen(f"verify: {found[0]}")
    RunWriter.resume(run, part=1).close()
    if Run.open(run).arrow("metrics").num_rows:
        raise Fallen("rows after the checkpoint stand after a resume")


ATTACKS = {
    "journal": Attack("a damaged record costs itself; all others are read as written; it is said", journal),
    "part": Attack("a flipped or cut part is read as written or refused; `verify` finds it", parquet),
    "lost file": Attack("a part, a journal, a table or a JSON file that is gone is missed", lost),
    "checkpoint": Attack("a flipped bit of a checkpoint is found", checkpoint),
    "JSON value": Attack("any value in a JSON file of a run: read or refused; nothing written outside", document),
    "setting": Attack("any value of any setting: a configuration, or one sentence", setting),
    "TOML file": Attack("any configuration file: a configuration, or one sentence", toml),
    "text file": Attack("any two files as parallel text: a corpus, or one sentence", text),
    "kill -9": Attack("every acknowledged row is there, and the run goes on", kill),
}


def case(name: str, seed: int, number: int, template: Path) -> str:
    """ "" where it held, else why it fell."""
    chance = random.Random(f"{seed} {name} {number}")
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        shutil.copytree(template, run)
        try:
            ATTACKS[name].act(chance, run)
        except Fallen as error:
            return str(error)
        except (InputError, UsageError) as error:
            return f"refused where nothing was to be: {error}"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:200]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300, help="of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=[*ATTACKS])
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what readers say of each damaged file
    worst = 0
    with tempfile.TemporaryDirectory() as scratch:
        template = Path(scratch) / "run"
        sound(template)
        if found := verify(template).findings:
            sys.exit(f"the run to be attacked is not sound: {found}")
        with contextlib.redirect_stderr(sys.stdout):
            print("| attack | tried | held | fallen | what must hold |\n|---|---|---|---|---|")
            for name in [options.only] if options.only else ATTACKS:
                numbered = range(options.first, options.first + options.cases)
                fell = [(n, why) for n in numbered if (why := case(name, options.seed, n, template))]
                held = options.cases - len(fell)
                print(f"| {name} | {options.cases} | {held} | {len(fell)} | {ATTACKS[name].holds} |", flush=True)
                for number, why in fell[:5]:
                    print(f"    --only '{name}' --seed {options.seed} --first {number} --cases 1: {why}")
                worst = max(worst, len(fell))
    sys.exit(int(worst > 0))


if __name__ == "__main__":
    main()
