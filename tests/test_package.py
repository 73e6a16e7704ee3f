"""The wheel and the sdist, and the example plug-in, as somebody installs them."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import ROOT, Environment, built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # a dozen processes that import torch
SMALL = ("data.sentences=4", "data.held_out=6", "data.validation=40")
FAST = ("--steps", "3", "--quiet", *(word for setting in SMALL for word in ("--set", setting)))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install -e '.[dev]'")
    files = built(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    return {"wheel" if path.suffix == ".whl" else "sdist": path for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(dist: dict[str, Path]) -> None:
    names = zipfile.ZipFile(dist["wheel"]).namelist()
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "stabilitylab").rglob("*.py")}
    assert own <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"stabilitylab"}


def test_the_sdist_makes_the_same_wheel(dist: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(dist["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "tests", "docs", "examples/plugin/pyproject.toml"):
        assert (tree / name).exists(), name
    (again,) = built(tree, tmp_path / "dist", "wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(dist["wheel"]).namelist())


def test_the_wheel_probes_reports_and_diagnoses_in_an_empty_environment(dist: dict[str, Path], tmp_path: Path) -> None:
    """The report draws one figure; it draws all of them in the environment of the plug-in, from the same wheel."""
    env = Environment(tmp_path)
    assert env.run("-c", "import stabilitylab", program=[str(env.python)]).returncode  # nothing of ours is there yet
    env.install(dist["wheel"])
    where = env.run("-c", "import stabilitylab; print(stabilitylab.__file__)", program=[str(env.python)])
    assert Path(where.stdout.strip()).is_relative_to(env.site), where
    made = env.run("probe", "--arch", "postln", "--depth", "2", *FAST)
    assert (made.returncode, made.stdout) == (0, "runs/postln-2-s0\n"), made.stderr
    reported = env.run("report", "--figure", "branchnorm:3", "--quiet")
    assert reported.returncode == 0, reported.stderr
    assert (env.work / "report" / "figures" / "branchnorm-3.svg").exists()
    assert (env.work / "report" / "index.html").stat().st_size > 10_000
    diagnosed = env.run("diagnose", "runs/postln-2-s0")
    assert diagnosed.returncode == 0, diagnosed.stderr
    assert "runs/postln-2-s0" in diagnosed.stdout


def test_the_example_plugin_adds_one_of_each(dist: dict[str, Path], tmp_path: Path) -> None:
    env = Environment(tmp_path)
    env.install(dist["wheel"], *built(ROOT / "examples" / "plugin", tmp_path / "plugin", "wheel"))
    listed = json.loads(env.run("list", "--json").stdout)
    for kind, name, module in (
        ("archs", "damped", "arch"),
        ("archs", "tracks", "streams"),
        ("probes", "largest_entry", "probe"),
        ("figures", "example:1", "figure"),
        ("sweeps", "example:1", "figure"),
        ("detectors", "large_entry", "detector"),
        ("signals", "entry_gap", "signal"),
        ("sources", "reversed", "source"),
        ("commands", "hello", "hello"),
    ):
        assert listed["from"][kind][name] == f"stabilitylab_example.{module} (stabilitylab-example 0.1.0)"
    assert listed["archs"]["damped"]["options"] == {"kappa": 0.5}
    assert listed["left_out"] == {}
    read = env.run("probe", "--depth", "2", "--data", "reversed:30", "--out", "others", *FAST)
    assert read.returncode == 0, read.stderr
    assert env.run("hello", "--name", "you").stdout == "hello, you\n"
    planned = env.run("sweep", "example:1", "--print")
    assert planned.stdout.count("--name damped-2-s") == 3, planned.stderr
    for seed in ("3", "4", "5"):
        chosen = ("--arch", "damped", "--depth", "2", "--seed", seed, "--set", "arch.kappa=0.25")
        made = env.run("probe", *chosen, "--probes", "default,largest_entry", *FAST)
        assert made.returncode == 0, made.stderr
    (run, *_) = sorted((env.work / "runs").iterdir())
    assert json.loads((run / "run.json").read_text())["config"]["model"]["options"] == {"kappa": 0.25}
    reported = env.run("report", "--run", run.name, "--quiet")
    assert reported.returncode == 0, reported.stderr
    assert {path.suffix for path in (env.work / "report" / "figures").glob("example-1*")} >= {".png", ".svg", ".csv"}
    page = (env.work / "report" / "index.html").read_text(encoding="utf-8")
    for words in ("Largest entry by layer", "No entry of a layer", "Damped"):
        assert words in page
    ledger = json.loads((env.work / "report" / "claims.json").read_text())["claims"]
    claims = {claim["id"]: claim for claim in ledger}
    assert claims["X01"]["verdict"] == "reproduced"
    found = json.loads(env.run("diagnose", f"runs/{run.name}", "--json").stdout)
    assert "large_entry" in [event["kind"] for event in found["events"]]
