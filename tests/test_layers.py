"""Imports only go down, between the rooms of the house and inside them, in no circle; and the guards can fail."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from imports import PACKAGE, circles, graph, imported, modules
from rest_slow import rest_slow

from stabilitylab.commands.listing import registries

KINDS = ("archs", "probes", "figures", "detectors", "signals", "sources", "sweeps", "commands")

# From what stands on nothing to what stands on all; rooms of one level do not know each other.
ORDER = (
    (
        "errors",
        "schema",
        "settings",
        "callable_package",
        "late_names",
        "kernels",
        "decisive",
        "environment",
        "histograms",
        "printable",
        "silence",
        "stopping",
        "tapping",
        "verdict",
    ),
    ("_version", "registry", "inputs", "designs", "changes", "scaffold"),
    ("arch_notes",),
    ("config",),
    ("labels",),
    ("models", "probes", "store"),
    ("data", "experiments", "alarm", "export", "bisect", "explain"),
    ("train", "diagnose", "trackers"),
    ("api", "onestep", "decode", "lr_find", "reports"),
    ("check", "integrations", "sweep"),
    ("terminal",),
    ("commands",),
    ("cli", ""),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER, 1) for room in rooms}
# Inside a room: from what stands on nothing to what stands on all. What shares a line does not know each other.
# "room.*" stands for every other module of the room, so that a new one needs no line.
INSIDE = {
    "alarm": (
        ("alarm.past", "alarm.recipe", "alarm.cadence", "alarm.rates", "alarm.signal"),
        ("alarm.lowest",),
        ("alarm.library.*", "alarm.row_signals"),
        ("alarm.library",),
        ("alarm.rules",),
        ("alarm.calibration",),
        ("alarm.alarm", "alarm.healthy"),
        ("alarm.sink", "alarm.reading"),
        ("alarm.calibrating",),
        ("alarm",),
    ),
    "bisect": (
        ("bisect.prints", "bisect.rounding"),
        ("bisect.differences", "bisect.model_pass"),
        ("bisect.structure",),
        ("bisect.matching",),
        ("bisect.judging", "bisect.forcing"),
        ("bisect.result", "bisect.sides"),
        ("bisect.stored",),
        ("bisect.find",),
        ("bisect",),
    ),
    "changes": (
        ("changes.change",),
        ("changes.rates", "changes.flags", "changes.state", "changes.optimizers"),
        ("changes.settings",),
        ("changes.find",),
        ("changes",),
    ),
    "diagnose": (
        ("diagnose.order",),
        ("diagnose.evidence", "diagnose.unmeasured", "diagnose.audited"),
        ("diagnose.events", "diagnose.series", "diagnose.headroom", "diagnose.attribution"),
        ("diagnose.changed",),
        ("diagnose.detectors", "diagnose.cause", "diagnose.announced"),
        ("diagnose.consequence",),
        ("diagnose.diagnosis",),
        ("diagnose.compare", "diagnose.standings"),
        ("diagnose",),
    ),
    "experiments": (
        ("experiments.recipe",),
        tuple(f"experiments.{name}" for name in ("sweeps", "protocol", "one_step", "table")),
        ("experiments.one_gpu",),
        ("experiments.lookup",),
        ("experiments",),
    ),
    "models": (
        ("models.norms", "models.schedules"),
        ("models.progress", "models.sublayers"),
        ("models.base",),
        ("models.archs",),
        ("models.transformer",),
        ("models.groups", "models.initialisation", "models.facts", "models.idle"),
        ("models.build",),
        ("models",),
    ),
    "reports": (
        ("reports.style", "reports.statistics", "reports.intervals", "reports.kept"),
        ("reports.collection",),
        ("reports.base", "reports.conditions", "reports.run_grid"),
        (
            "reports.claims",
            "reports.pooling",
            "reports.arrange",
            "reports.caption",
            "reports.files",
            "reports.lines",
            "reports.first_break",
            "reports.worst_first",
        ),
        ("reports.heatmaps",),
        ("reports.paper",),
        (
            *("reports.measures", "reports.headline", "reports.power", "reports.page.screen", "reports.page.point"),
            *("reports.page.printed", "reports.page.sparks", "reports.page.backticks"),
        ),
        ("reports.stability", "reports.bisection", "reports.diagnosis", "reports.page.sections"),
        ("reports.page.sentences", "reports.page.press"),
        ("reports.page.overview",),
        ("reports.page.html",),
        ("reports.figures", "reports.views"),
        ("reports.build",),
        ("reports.page.live",),
        ("reports.page",),
        ("reports",),
    ),
    "probes": (
        ("probes.splitmix",),
        ("probes.rules", "probes.places", "probes.numerics"),
        ("probes.parameters",),
        ("probes.curvature", "probes.state"),
        ("probes.base",),
        ("probes.library",),
        ("probes._engine",),
        ("probes.incidents",),
        ("probes.instruments",),
        ("probes.watcher",),
        ("probes",),
    ),
    "check": (
        ("check.fingerprint", "check.result", "check.seen", "check.updates"),
        ("check.bounds", "check.neutrality"),
        ("check.answers",),
        ("check.evaluation", "check.leaks", "check.start", "check.units", "check.wiring"),
        ("check.shifts",),
        ("check.questions", "check.ranks"),
        ("check.measure",),
        ("check",),
    ),
    "commands": (
        (
            "commands.base",
            "commands._claims_shown",
            "commands._factory",
            "commands._options",
            "commands._rate_choice",
            "commands._stability",
        ),
        ("commands._outcome",),
        ("commands._resuming",),
        ("commands.*",),
        ("commands",),
    ),
    "data": (
        ("data.buckets", "data.cache", "data.corpus"),
        (
            *("data.batches", "data.bpe", "data.overlap", "data.passage", "data.running", "data.source"),
            *("data.unigram", "data.unknown"),
        ),
        ("data.sources", "data.split"),
        ("data.dataset",),
        ("data",),
    ),
    "decode": (
        ("decode.cache", "decode.translations"),
        ("decode.beam", "decode.significance"),
        ("decode.evaluation",),
        ("decode",),
    ),
    "explain": (
        ("explain.batches", "explain.findings", "explain.relations", "explain.sketches", "explain.states"),
        ("explain.flight",),
        ("explain.black_box", "explain.facts", "explain.replicas"),
        ("explain.recorder",),
        ("explain.replay",),
        ("explain.audit", "explain.derivatives", "explain.harm", "explain.judge"),
        ("explain.interventions",),
        ("explain.explanation",),
        ("explain",),
    ),
    "export": (("export.files", "export.latex", "export.tensorboard"), ("export.export",), ("export",)),
    "integrations": (
        ("integrations.before_clipping", "integrations.masks"),
        ("integrations.session",),
        ("integrations.accelerate", "integrations.lightning"),
        ("integrations.transformers",),
        ("integrations",),
    ),
    "lr_find": (
        ("lr_find.search", "lr_find.result"),
        ("lr_find.pairs",),
        ("lr_find.halving",),
        ("lr_find.subject", "lr_find.answer", "lr_find.folder"),
        ("lr_find.trial", "lr_find.reference"),
        ("lr_find.workers",),
        ("lr_find.trials",),
        ("lr_find.scale",),
        ("lr_find.find",),
        ("lr_find",),
    ),
    "onestep": (
        ("onestep.initial_model",),
        (
            "onestep.attention",
            "onestep.jacobian",
            "onestep.perturbation",
            "onestep.rates",
            "onestep.standard_probes",
        ),
        ("onestep.curvature", "onestep.theorem"),
        ("onestep.measurement",),
        ("onestep.workers",),
        ("onestep",),
    ),
    "store": (
        (
            "store.arrays",
            "store.combine",
            "store.damage",
            "store.files",
            "store.identity",
            "store.lines",
            "store.names",
            "store.older",
            "store.views",
        ),
        ("store.digest", "store.documents", "store.frame", "store.inventory", "store.journal"),
        ("store.layout",),
        ("store.aside", "store.evaluation", "store.existing", "store.parts"),
        ("store.incident", "store.ledger", "store.pieces"),
        ("store.reader", "store.writer"),
        ("store.absent", "store.folders", "store.nonfinite", "store.sparing", "store.thinned", "store.verify"),
        ("store",),
    ),
    "sweep": (
        ("sweep.grids", "sweep.identity", "sweep.toml"),
        ("sweep.cells", "sweep.tables"),
        ("sweep.ledger",),
        ("sweep.jobs",),
        ("sweep.launchers", "sweep.show", "sweep.slurm"),
        ("sweep.runner",),
        ("sweep.rates",),
        ("sweep",),
    ),
    "terminal": (
        ("terminal.words",),
        ("terminal.tables", "terminal.strips", "terminal.summary", "terminal.rates"),
        ("terminal.live",),
        ("terminal",),
    ),
    "trackers": (("trackers.layer_map",), ("trackers.sink",), ("trackers",)),
    "train": (
        ("train.adamw", "train.environment", "train.hessian", "train.judging", "train.ranks"),
        ("train.fast", "train.checkpoint"),
        ("train.recipe",),
        ("train.footprint", "train.passes", "train.recording", "train.trained"),
        ("train.loop",),
        ("train.run",),
        ("train",),
    ),
}
KNOWN = modules()
PATHS = [pytest.param(name, path, id=name or "stabilitylab") for name, path in KNOWN.items()]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    found = imported(source, module, KNOWN, is_package)
    return [*_between(found, module), *_inside(found, module), *_internal(found, module)]


def _between(found: dict[str, bool], module: str) -> list[str]:
    own = module.split(".")[0]
    tops = {(name.split(".")[0], for_types) for name, for_types in found.items()}
    return [
        f"{module} (level {LEVEL[own]}) imports {other} (level {LEVEL[other]})"
        for other, for_types in tops
        if other != own and not for_types and LEVEL[other] >= LEVEL[own]
    ]


def _inside(found: dict[str, bool], module: str) -> list[str]:
    mine = _line(module)
    if mine is None:
        return []
    lines = {other: line for other in found if (line := _line(other)) is not None and line[0] == mine[0]}
    return [
        f"{module} (line {mine[1]} of {mine[0]}) imports {other} (line {line[1]})"
        for other, line in lines.items()
        if line[1] > mine[1] or (line[1] == mine[1] and line[2] != mine[2])
    ]


def _line(module: str) -> tuple[str, int, str] | None:
    """(room, line, which part of that line) of a module inside a room that has lines."""
    room = module.split(".")[0]
    parts = [(part, line) for line, parts in enumerate(INSIDE.get(room, ())) for part in parts]
    fitting = [
        (len(part), line, module if part.endswith(".*") else part)
        for part, line in parts
        if f"{module}.".startswith(f"{part}.".replace(".*.", "."))
    ]
    return (room, *max(fitting)[1:]) if fitting else None


def _internal(found: dict[str, bool], module: str) -> list[str]:
    """A name with a leading underscore is for the package that holds it alone."""
    wrong = []
    for other in found:
        parts = other.split(".")
        at = next((i for i, part in enumerate(parts) if i and part.startswith("_")), None)
        if at is not None and module.split(".")[:at] != parts[:at]:
            wrong.append(f"{module} imports {other}, which is internal to {'.'.join(parts[:at])}")
    return wrong


def test_every_module_has_a_level() -> None:
    assert {name.split(".")[0] for name in KNOWN} == LEVEL.keys(), "LEVEL needs each room of the package, and no other"


def test_every_room_of_more_than_one_module_has_lines() -> None:
    rooms = {name.split(".")[0] for name in KNOWN if "." in name}
    assert rooms == INSIDE.keys(), "INSIDE needs the order inside each room, and of no other"


def test_every_module_of_a_room_with_lines_has_one() -> None:
    for room, lines in INSIDE.items():
        own = [name for name in KNOWN if name.split(".")[0] == room and name != room]
        fallen = [name for name in own if _line(name) == (room, len(lines) - 1, room)]
        assert fallen == [], f"INSIDE[{room!r}]: give these modules a line of their own"
        for part in (part for line in lines for part in line):
            is_there = part.endswith(".*") or any(f"{name}.".startswith(f"{part}.") for name in KNOWN)
            assert is_there, f"INSIDE[{room!r}] names {part}, which does not exist"


@pytest.mark.parametrize(("module", "path"), PATHS)
def test_imports_go_down(module: str, path) -> None:
    found = violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert found == [], "imports go down: move the shared code below both (docs/architecture.md)"


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(graph()) == [], "these modules import each other in a circle"


def test_a_circle_is_found() -> None:
    made = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"d"}}
    assert circles(made) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_lazy_imports_and_those_for_types_are_found() -> None:
    source = (
        "if TYPE_CHECKING:\n    from .watcher import Watcher\n"
        "def f():\n    from . import rules\n    import stabilitylab.store.reader\n"
    )
    assert imported(source, "probes.base", KNOWN) == {
        "probes.watcher": True,
        "probes.rules": False,
        "store.reader": False,
    }


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..train import loop", "probes.watcher"),
        ("from ..models import build_model", "probes.watcher"),
        ("import stabilitylab.cli", "store.reader"),
        ("from . import train", "config"),
        ("def f():\n    from stabilitylab.reports import figures", "models.transformer"),
        ("from .watcher import Watcher", "probes.base"),
        ("from ..base import Probe", "probes.places.sites"),
        ("from ..rules import Mean", "probes.places.sites"),  # of one line
        ("def f():\n    from .library import rank", "probes.base"),
        ("if TYPE_CHECKING:\n    from ..watcher import Watcher", "probes._engine.passes"),
        ("from ..probes._engine.board import Board", "train.loop"),
        ("from ..diagnose import diagnose", "train.loop"),  # rooms of one level
        ("from ..reports import build", "decode.beam"),
        ("from .probe import probe", "commands.sweep"),
        ("from . import command", "commands.sweep"),
        ("from .alarm import announced", "commands._options"),
        ("from ..loop import Trainer", "train.fast.compiling"),
    ],
)
def test_a_forbidden_import_is_found(source: str, module: str) -> None:
    assert violations(source, module), f"the guard does not find this import in {module}"


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..probes import Watcher", "train.loop"),
        ("from ..base import Probe", "probes.library.rank"),
        ("from .sites import Site", "probes.places.finding"),
        ("from ._engine.board import Board", "probes.watcher"),
    ],
)
def test_an_import_that_goes_down_is_none(source: str, module: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize("statement", ["import stabilitylab", "import stabilitylab.cli"])
def test_import_needs_neither_torch_nor_pandas_nor_matplotlib(statement: str) -> None:
    check = (
        f"import sys; {statement}; sys.exit(str({{'torch', 'pandas', 'matplotlib', 'pydantic'}} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "set()", f"`{statement}` imports these, or fails"


def test_the_table_of_runs_needs_no_torch(tmp_path: Path) -> None:
    shown = f"import sys; from stabilitylab.commands.listing import run_table; run_table(Path({str(tmp_path)!r}))"
    check = f"from pathlib import Path; {shown}; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", check], check=False)
    assert ended.returncode == 0, "stabilitylab runs imports torch"


@pytest.mark.parametrize(
    "part",
    rest_slow(
        ["store", "terminal", "labels", "verdict", "schema", "experiments", "reports", "reports.build", "diagnose"],
        ["experiments", "reports.build", "diagnose"],
    ),
)
def test_reports_side_needs_no_torch(part: str) -> None:
    check = f"import sys; import stabilitylab.{part}; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", check], check=False)
    assert ended.returncode == 0, f"stabilitylab.{part} imports torch"


ALONE = """
import sys

class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import torch
from stabilitylab.probes import Watcher

class Rows:
    def open(self, tables): self.tables = [table.name for table in tables]
    def append(self, step, metrics, tables): self.seen = {*tables, *getattr(self, "seen", ())}
    def close(self): pass

layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(2)]
model, rows = torch.nn.Sequential(*layers), Rows()
optimizer = torch.optim.AdamW(model.parameters())
with Watcher(model, rows, probes=["default"], every=1, optimizer=optimizer, reference="first batch") as watcher:
    for _ in range(2):
        loss = model(torch.randn(2, 3, 8)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
assert {"grad_norm", "model_update"} <= rows.seen, rows.seen
assert not REFUSED & set(sys.modules), REFUSED & set(sys.modules)
"""


@pytest.mark.slow
def test_probes_need_torch_and_numpy_alone() -> None:
    """They are imported, and watch a model, where no other dependency can be imported."""
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    named = {re.split(r"[><=\[]", one)[0] for one in tomllib.loads(text)["project"]["dependencies"]}
    assert {"torch", "numpy", "pydantic", "pandas", "pyarrow"} <= named
    ended = subprocess.run(
        [sys.executable, "-c", f"REFUSED = {named - {'torch', 'numpy'}!r}\n{ALONE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_page_about_the_house_is_what_the_imports_are_held_against() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    levels = {cells[0]: re.findall(r"`(\w+)`", cells[1]) for cells in lines if cells[0].isdigit()}
    written = {room: int(level) for level, rooms in levels.items() for room in rooms}
    assert sum(map(len, levels.values())) == len(written), "docs/architecture.md names a room twice"
    levels = {room: level for room, level in LEVEL.items() if room not in ("", "__main__")}
    assert written == levels, "docs/architecture.md, table of levels, differs from LEVEL"
    orders = {cells[0].strip("`"): cells[1] for cells in lines if " < " in cells[1]}
    inside = {
        room: [set(re.findall(r"`([\w.*]+)`", part)) for part in order.split(" < ")] for room, order in orders.items()
    }
    orders_here = {
        room: [{part.partition(".")[2] for part in line} for line in order[:-1]]
        for room, order in INSIDE.items()
        if len(order) > 2
    }
    assert inside == orders_here, "docs/architecture.md, orders inside rooms, differ from INSIDE"
    folders = [cells for cells in lines if len(cells) == 3 and cells[2].startswith("`stabilitylab.")]
    rooms = {(registry.room.folder, registry.room.group) for registry in registries(KINDS).values() if registry.room}
    written_rooms = {(f"stabilitylab.{a.strip('`/').replace('/', '.')}", b.strip("`")) for _, a, b in folders}
    assert written_rooms == rooms, "docs/architecture.md, folders and entry points, differ from the registries"
