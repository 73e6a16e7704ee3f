"""Plug-ins by name: a module of the current folder, one that fails, and what ``list`` says of each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rest_slow import rest_slow

from stabilitylab import registry
from stabilitylab.cli import without_plugins
from stabilitylab.errors import UsageError
from stabilitylab.registry import PLUGINS, Registry, Room

ROOT = Path(__file__).resolve().parents[1]
DETECTOR = """
from stabilitylab.diagnose import detector

@detector("mine", "mine", reads={"loss": "w.step(loss=loss)"})
def mine(evidence):
    return []
"""


def stabilitylab(*arguments: str, cwd: Path, plugins: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), PLUGINS: plugins}
    command = [sys.executable, "-m", "stabilitylab", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


SEVERAL = """
import contextlib, io, json, sys
from stabilitylab import cli

made = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["stabilitylab", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit as end:
            made.append([int(end.code or 0), out.getvalue(), err.getvalue()])
print(json.dumps(made))
"""


def several(*commands: list[str], cwd: Path, plugins: str) -> list[tuple[int, str, str]]:
    """(Exit code, stdout, stderr) of each command, all in one process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), PLUGINS: plugins}
    process = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)], cwd=cwd, env=env,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [tuple(each) for each in json.loads(process.stdout)]


@pytest.mark.slow
def test_modules_of_the_current_folder_are_named_on_the_line_and_in_the_environment(tmp_path: Path) -> None:
    """One that fails, or takes a name that is taken, is said by name, is left out, and stops nothing else."""
    (tmp_path / "myrules.py").write_text(DETECTOR, encoding="utf-8")
    (tmp_path / "after.py").write_text(DETECTOR.replace('"mine", "mine"', '"after", "mine"'), encoding="utf-8")
    (tmp_path / "theirs.py").write_text(DETECTOR.replace('"mine", "mine"', '"theirs", "mine"'), encoding="utf-8")
    (tmp_path / "clash.py").write_text(DETECTOR.replace('"mine", "mine"', '"plateau", "mine"'), encoding="utf-8")
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n", encoding="utf-8")
    line = ("--plugin", "myrules", "list", "detectors", "--json", "--plugin=after")
    made = stabilitylab(*line, cwd=tmp_path, plugins="broken,clash,theirs")
    assert made.returncode == 0, made.stderr
    assert made.stderr.count("plug-in broken (--plugin) cannot be imported and is left out") == 1
    listed = json.loads(made.stdout)
    origins = {"mine": "myrules", "after": "after", "theirs": "theirs"}
    assert {name: listed["from"]["detectors"][name] for name in origins} == {
        name: f"{module} (--plugin)" for name, module in origins.items()
    }
    assert listed["from"]["detectors"]["plateau"] == "stabilitylab"
    assert listed["left_out"].keys() == {"broken (--plugin)", "clash (--plugin)"}
    assert "No module named 'no_such_module_anywhere'" in listed["left_out"]["broken (--plugin)"]
    assert "'plateau' is registered already" in listed["left_out"]["clash (--plugin)"]


def test_plugin_without_a_module_is_refused() -> None:
    for arguments in (["list", "--plugin"], ["--plugin", "--json", "list"], ["--plugin="]):
        with pytest.raises(UsageError, match="--plugin needs the name of a module"):
            without_plugins(arguments)


def test_plugins_add_up_and_reach_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, "first")
    assert without_plugins(["--plugin", "second", "list", "--plugin=first"]) == ["list"]
    assert os.environ[PLUGINS] == "first,second"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with modules that register, in a folder too, and internal ones; and a registry that reads it."""
    home = tmp_path / "homeofparts"
    home.mkdir()
    (home / "__init__.py").write_text("from stabilitylab.registry import Registry, Room\n")
    for name in ("b", "a"):
        (home / f"{name}.py").write_text(
            f"from test_plugins import PARTS\nPARTS.register('{name}', __name__)({name!r})\n"
        )
    (home / "_inner.py").write_text("raise AssertionError\n")
    (home / "above").mkdir()
    (home / "above" / "__init__.py").write_text("")
    (home / "above" / "c.py").write_text("from test_plugins import PARTS\nPARTS.register('above c', __name__)('c')\n")
    (home / "above" / "_inner.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return home


PARTS: Registry[str] = Registry("part", Room("homeofparts", "stabilitylab.no_such_group"))


def test_a_registry_reads_its_folder_in_the_order_of_files_when_it_is_looked_into(folder: Path) -> None:
    sys.modules["test_plugins"] = sys.modules[__name__]
    import homeofparts.b  # noqa: F401  # pyright: ignore[reportMissingImports]

    assert list(PARTS) == ["a", "above c", "b"]
    with PARTS.restored():
        PARTS.register("c")("c")
        assert "c" in PARTS
    assert "c" not in PARTS


def test_what_a_script_defines_says_its_module() -> None:
    parts: Registry[type] = Registry("part")
    parts.register("mine")(type("Mine", (), {"__module__": "__main__"}))
    assert parts.origin("mine") == "__main__"


@pytest.mark.slow
def test_every_kind_has_a_room(tmp_path: Path) -> None:
    """A module of the current folder that nobody names is not looked at."""
    (tmp_path / "myrules.py").write_text(DETECTOR, encoding="utf-8")
    listed = json.loads(stabilitylab("list", "--json", cwd=tmp_path).stdout)
    for kind in ("archs", "probes", "figures", "detectors", "signals", "sources", "sweeps", "commands"):
        assert listed["from"][kind].keys() == listed[kind].keys()
        assert set(listed["from"][kind].values()) == {"stabilitylab"}
    assert registry.failed == {}


EXAMPLE = ROOT / "examples" / "plugin" / "stabilitylab_example"
UNMEASURED = """
from stabilitylab.experiments import sweep

@sweep("unmeasured:1")
def nothing(ask):
    "Plans nothing but one run."
    yield from ask.runs(["postln"], [1], {"train": {"steps": 1}}, seeds=[3])
"""


@pytest.mark.slow
def test_the_examples_figure_has_runs_that_are_planned_and_known_by_their_origin(tmp_path: Path) -> None:
    """A sweep whose cost nobody measured says so."""
    shutil.copytree(EXAMPLE, tmp_path / EXAMPLE.name)
    (tmp_path / "unmeasured.py").write_text(UNMEASURED, encoding="utf-8")
    named = ",".join((*(f"{EXAMPLE.name}.{module}" for module in ("arch", "probe", "figure")), "unmeasured"))
    made, listing, refused, unmeasured = several(
        ["sweep", "example:1", "--print"],
        ["list", "sweeps", "--json"],
        ["sweep", "example:1", "--scale", "paper"],
        ["sweep", "unmeasured:1", "--minutes", "0"],
        cwd=tmp_path,
        plugins=named,
    )
    assert made[0] == 0, made[2]
    lines = made[1].splitlines()
    assert [re.findall(r"--name (\S+)", line) for line in lines] == [[f"damped-2-s{seed}"] for seed in (3, 4, 5)]
    assert all(f"{PLUGINS}={named} " in line for line in lines)  # wherever they run, the plug-in is named
    listed = json.loads(listing[1])
    assert listed["from"]["sweeps"]["example:1"] == f"{EXAMPLE.name}.figure (--plugin)"
    assert listed["sweeps"]["example:1"] == "Trains Damped, one layer a side, with three seeds."
    assert (refused[0], "example:1 has no runs at scale paper" in refused[2]) == (2, True)
    assert "how long unmeasured:1 takes is unknown" in unmeasured[2]


TAKEN = {
    "C01": """
from stabilitylab.reports import claim

@claim("C01", figure="admin:3", paper="", sentence="", source="", statistic="", threshold="", sweep="admin:4")
def mine(runs):
    return []
""",
    "branchnorm:8": """
from stabilitylab.experiments import sweep

@sweep("branchnorm:8")
def mine(ask):
    return iter(())
""",
}


@pytest.mark.parametrize("name", rest_slow(TAKEN, {"branchnorm:8"}))
def test_a_claim_or_a_sweep_of_a_name_that_is_taken_is_refused_where_it_is_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "clash.py").write_text(TAKEN[name], encoding="utf-8")
    made = subprocess.run(
        [sys.executable, "-c", "import clash"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.stderr.splitlines()[-1].endswith(f"{name!r} is registered already, as {name!r}.")
    assert 'clash.py", line' in made.stderr
