"""Seeded mutants: small faults in the package, one at a time, each against the tests that reach its line.

    python benchmarks/mutants.py --list                                   # the forty mutants of seed 0, without a run
    python benchmarks/mutants.py --seed 3 --count 40 --out mutants.csv    # about a minute a mutant, plus the first pass
    python benchmarks/mutants.py --only 7,12                              # these of the forty alone

A mutant is a comparison that is turned round, a constant that is one more, an operator or a connective that is swapped,
a ``not`` that is dropped, or a statement that is removed; in bodies of functions alone. The rooms take turns; within a
room kind and place are drawn. Everything happens in a copy of the repository in a temporary folder. A first pass runs
the tests of the rooms (``tests/ROOM``, without the slow ones) and notes which of them reach which mutated line
(line_tests.py); then each mutant is put in, and its tests run, the quickest first, until one fails. A mutant survives
if none does; a change that nothing could notice (an equal program) survives, too, so that each survivor wants a look.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("probes", "store", "models", "diagnose")
LEFT_OUT = (".git", ".venv*", ".*_cache", "__pycache__", "runs", "report", "_build")
TURNED = {
    "<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in",
}  # fmt: skip
SWAPPED = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&", "@": "*"}
PATIENCE = 5.0  # times the seconds that its tests took before, and
LEAST = 120.0  # seconds at least, after which a mutant counts as killed


@dataclass(frozen=True)
class Mutant:
    """A change of one place: bytes ``start`` to ``end`` of ``file``, below the root, become ``after``."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    text: str  # of its line

    def put_in(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        before = re.sub(r"\s+", " ", self.before)
        shown = before if len(before) <= 40 else f"{before[:37]}..."
        after = self.after if len(self.after) <= 40 else "the rest"
        return f"{self.file}:{self.line}: {self.kind}: {shown} -> {after}   | {self.text[:80]}"


@dataclass(frozen=True)
class Outcome:
    """The end of a mutant: killed (by a test, or as its time was up), survived, or reached by no test."""

    mutant: Mutant
    result: str
    tests: int
    by: str = ""


def mutants_of(source: bytes, file: str) -> Iterator[Mutant]:
    """Yield every mutant of a module; a few of them may not be another program (see :func:`is_another`)."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr | ast.stmt, at_end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if at_end else (node.lineno, node.col_offset)
        assert line is not None
        assert column is not None
        return starts[line - 1] + column

    for node in _changeable(tree):
        for kind, start, end, after in _changes(node, source, place):
            line = 1 + source.count(b"\n", 0, start)
            text = source[starts[line - 1] : starts[line]].decode().strip()
            yield Mutant(file, line, kind, start, end, source[start:end].decode(), after, text)


def is_another(mutant: Mutant, source: bytes) -> bool:
    """True if a mutant parses, to another program."""
    try:
        return ast.dump(ast.parse(mutant.put_in(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _changeable(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes within bodies of functions, but for docstrings, annotations and what stands in an f-string."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[ast.AST] = set()
    for function in functions:
        waiting: list[ast.AST] = [*function.body]
        while waiting:
            node = waiting.pop(0)
            if node in seen or isinstance(node, ast.JoinedStr):
                continue
            seen.add(node)
            yield node
            hidden = {getattr(node, name, None) for name in ("annotation", "returns")}
            waiting += [child for child in ast.iter_child_nodes(node) if child not in hidden]


def _changes(node: ast.AST, source: bytes, place: Callable[..., int]) -> Iterator[tuple[str, int, int, str]]:
    """Yield (kind, start, end, replacement) of the changes of one node."""

    def between(left: ast.expr, right: ast.expr, words: Mapping[str, str], own: str) -> Iterator[tuple[int, int, str]]:
        start, end = place(left, at_end=True), place(right)
        pattern = rb"\s+".join(map(re.escape, own.encode().split()))
        if found := re.search(pattern, source[start:end]):
            yield start + found.start(), start + found.end(), words[own]

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        own = _sign(node.ops[0])
        for change in between(node.left, node.comparators[0], TURNED, own):
            yield "comparison", *change
    elif isinstance(node, ast.BinOp) and (own := _sign(node.op)) in SWAPPED:
        for change in between(node.left, node.right, SWAPPED, own):
            yield "operator", *change
    elif isinstance(node, ast.BoolOp):
        own = _sign(node.op)
        for change in between(node.values[0], node.values[1], {"and": "or", "or": "and"}, own):
            yield "connective", *change
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start, end = place(node), place(node, at_end=True)
        yield "not", start, end, source[start + len("not") : end].decode().strip()
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", place(node), place(node, at_end=True), repr(node.value + 1)
    elif _is_removable(node):
        assert isinstance(node, ast.stmt)
        yield "statement", place(node), place(node, at_end=True), "pass"


SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.MatMult: "@", ast.And: "and",
    ast.Or: "or",
}  # fmt: skip


def _sign(operator: ast.AST) -> str:
    return SIGNS.get(type(operator), "")


def _is_removable(node: ast.AST) -> bool:
    """True for a call on its own, a change in place, a write to an attribute or an element, and a raise."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise)


def chosen(root: Path, found: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, the rooms in turn; within a room first the kind, then the place, and no line twice."""
    draw, picked = random.Random(seed), []
    left = {room: list(own) for room, own in found.items() if own}
    while len(picked) < count and left:
        for room in [*left][: count - len(picked)]:
            kind = draw.choice(sorted({mutant.kind for mutant in left[room]}))
            mutant = draw.choice([mutant for mutant in left[room] if mutant.kind == kind])
            if is_another(mutant, (root / mutant.file).read_bytes()):
                picked.append(mutant)
            left[room] = [m for m in left[room] if (m.file, m.line) != (mutant.file, mutant.line)]
            if not left[room]:
                del left[room]
    return picked


class Copy:
    """A copy of the repository, in which mutants are put in one at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = folder / "copy", folder
        shutil.copytree(root, self.root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)

    def pytest(self, arguments: Sequence[str], seconds: float | None = None, **environment: str) -> tuple[int, str]:
        """Run tests in the copy: exit code (124 where the time was up) and output."""
        own = Path(__file__).resolve().parent
        path = os.pathsep.join((str(self.root), str(own)))
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", f"{self.folder}/tests"]
        with (self.folder / "output.txt").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, *arguments], cwd=self.root, env=variables, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                if process.poll() is None:  # with the processes that the tests have started
                    os.killpg(process.pid, 9)
                    process.wait()
            output.seek(0)
            return code, output.read()

    def reached(self, mutants: Sequence[Mutant], tests: Sequence[str]) -> tuple[dict[Mutant, list[str]], float]:
        """Return the tests that reach the line of each mutant, the quickest first, and how long all of them took. Ends
        the process if no test passes as things stand."""
        lines: dict[str, list[int]] = {}
        for mutant in mutants:
            lines.setdefault(str(self.root / mutant.file), []).append(mutant.line)
        asked = self.folder / "lines.json"
        asked.write_text(json.dumps({"lines": lines}), encoding="utf-8")
        began = time.monotonic()
        _, said = self.pytest(["-m", "not slow", "-p", "line_tests", *tests], LINE_TESTS=str(asked))
        found = json.loads(asked.read_text(encoding="utf-8"))
        if not found.get("passed"):
            raise SystemExit(f"no test of {', '.join(tests)} passes without a mutant:\n{said[-2000:]}")
        seconds: dict[str, float] = found["passed"]
        own: dict[Mutant, list[str]] = {}
        for mutant in mutants:
            names = found["reached"].get(f"{self.root / mutant.file}:{mutant.line}", [])
            own[mutant] = sorted(
                (test for test in seconds if test in names or test.partition("::")[0] in names), key=seconds.__getitem__
            )
        return own, time.monotonic() - began

    def judged(self, mutant: Mutant, tests: Sequence[str], limit: float) -> Outcome:
        """Put a mutant in, run its tests until one fails, and take it out again."""
        if not tests:
            return Outcome(mutant, "not reached", 0)
        file = self.root / mutant.file
        source = file.read_bytes()
        named = self.folder / "tests.txt"
        named.write_text("\n".join(tests), encoding="utf-8")
        try:
            file.write_bytes(mutant.put_in(source))
            code, said = self.pytest(["-x", f"@{named}"], limit)
        finally:
            file.write_bytes(source)
        if code == 0:
            return Outcome(mutant, "survived", len(tests))
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        return Outcome(mutant, "killed", len(tests), "time" if code == 124 else failed[1] if failed else "an import")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", default="", help="numbers of the list alone, with commas between them")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders or modules of the package, with commas")
    parser.add_argument("--tests", nargs="+", help="tests of the first pass; tests/ROOM of each room unless given")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    parser.add_argument("--package", default="stabilitylab")
    parser.add_argument("--out", type=Path, help="a CSV file of the outcomes")
    given = parser.parse_args(arguments)
    rooms = given.rooms.split(",")
    found = {room: _of_room(given.root, given.package, room) for room in rooms}
    if missing := [room for room, own in found.items() if not own]:
        parser.error(f"--rooms: nothing to change in {', '.join(missing)} of {given.package}")
    numbered = dict(enumerate(chosen(given.root, found, given.count, given.seed), 1))
    try:
        mutants = {n: numbered[n] for n in map(int, given.only.split(","))} if given.only else numbered
    except (KeyError, ValueError):
        parser.error(f"--only {given.only}: give numbers from 1 to {len(numbered)}, with commas between them")
    if given.list:
        print("\n".join(f"{number:3d}  {mutant}" for number, mutant in mutants.items()))
        return 0
    named = [f"tests/{room}" for room in rooms if any(mutant in found[room] for mutant in mutants.values())]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(given.root, Path(folder))
        tests, took = copy.reached([*mutants.values()], given.tests or named)
        outcomes = []
        for number, mutant in mutants.items():
            outcome = copy.judged(mutant, tests[mutant], max(LEAST, PATIENCE * took))
            outcomes.append((number, outcome))
            by = f" by {outcome.by}" if outcome.by else ""
            print(f"{number:3d}  {outcome.result}{by} ({outcome.tests} tests)  {mutant}", flush=True)
    results = [outcome.result for _, outcome in outcomes]
    print(", ".join(f"{results.count(word)} {word}" for word in ("killed", "survived", "not reached")))
    if given.out:
        with given.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("number", "file", "line", "kind", "before", "after", "result", "tests", "by"))
            for number, one in outcomes:
                m = one.mutant
                writer.writerow((number, m.file, m.line, m.kind, m.before, m.after, one.result, one.tests, one.by))
    return 0


def _of_room(root: Path, package: str, room: str) -> list[Mutant]:
    home = root / package / room
    files = sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]
    there = [file for file in files if file.exists()]
    return [mutant for file in there for mutant in mutants_of(file.read_bytes(), file.relative_to(root).as_posix())]


if __name__ == "__main__":
    sys.exit(main())
