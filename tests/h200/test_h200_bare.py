"""A bare machine: what is missing there comes from wheels beside the script, and what is optional is left out."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

NEEDED = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection")


def wheel(folder: Path, name: str, module: str, requires: str = "") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{module}/__init__.py", "HERE = __file__\n")
        stem = "-".join(name.split("-")[:2])
        file.writestr(f"{stem}.dist-info/METADATA", f"Name: x\n{requires}\n\nRequires-Dist: of the text\n")
    return path


@pytest.mark.slow
def test_it_starts_where_packages_are_missing_and_only_carried(bare_machine) -> None:
    lacking = bare_machine.make("--smoke", "--part", "report", "--out", "out")
    assert lacking.returncode == 5
    assert lacking.stderr.startswith("make.py: pydantic is missing: pip install -e .")
    assert "carry results/h200/carried along" in lacking.stderr
    assert "Traceback" not in lacking.stderr
    bare_machine.carry(*NEEDED)
    for again in (False, True):  # the second time they are unpacked already
        started = bare_machine.make("--smoke", "--part", "report", "--out", "out")
        assert "Traceback" not in started.stderr
        assert started.returncode == 1
        assert "carried: annotated_types-" in started.stdout, again
        assert "without plotly: the page of the report and its figures are left out" in started.stdout
        assert "part report: partial; no run yet: tables alone" in started.stdout
    assert (bare_machine.folder / "out-work" / "site" / "pydantic_core").is_dir()
    wheel(bare_machine.carried / "wheels", "plotly-7-py3-none-any.whl", "plotly")
    assert "without plotly" not in bare_machine.make("--smoke", "--part", "report", "--out", "out").stdout


def test_only_what_is_missing_is_taken_and_what_that_needs(script, tmp_path: Path, monkeypatch) -> None:
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    missing = wheel(tmp_path, "made_up-1-py3-none-any.whl", "made_up", "Requires-Dist: NumPy>=1 ; python_version > '3'")
    needed = wheel(tmp_path, "numpy-9-py3-none-any.whl", "numpy")  # is here, but a version that fits is carried
    wheel(tmp_path, "pandas-9-py3-none-any.whl", "pandas")
    wheel(tmp_path, "other_python-1-cp27-cp27mu-linux_x86_64.whl", "other_python")
    wheel(tmp_path, f"other_machine-1-{own}-{own}-linux_m68k.whl", "other_machine")
    wheel(tmp_path, "extra-1-py3-none-any.whl", "json", "Requires-Dist: pandas ; extra == 'all'")
    assert script.bare.chosen(sorted(tmp_path.glob("*.whl"))) == [missing, needed]
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "only").mkdir()
    missing.rename(tmp_path / "only" / missing.name)
    assert script.bare.provide(tmp_path / "site", tmp_path / "only") == [missing.name]
    import made_up  # type: ignore[import-not-found]

    assert made_up.HERE.startswith(str(tmp_path / "site"))
    del sys.modules["made_up"]
    assert script.bare.provide(tmp_path / "other", tmp_path / "nowhere") == []
    import os

    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}before"


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py2-none-any.whl", False),
        ("a-1-cp38-abi3-manylinux_2_17_{machine}.whl", True),
        ("a-1-{own}-{own}-manylinux2014_{machine}.manylinux_2_17_{machine}.whl", True),
        ("a-1-{own}-{own}-win_amd64.whl", False),
        ("nonsense.whl", False),
    ],
)
def test_tags_of_wheels(script, name: str, fits: bool) -> None:
    import os

    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert script.bare.fits(Path(name.format(own=own, machine=os.uname().machine))) is fits


def test_what_is_downloaded_is_what_the_project_pins(script, tmp_path: Path, monkeypatch) -> None:
    asked: list[list[str]] = []

    def call(command: list[str], check: bool) -> object:
        asked.append(command)
        return type("Ended", (), {"returncode": 0})()

    monkeypatch.setattr(script.bare.subprocess, "run", call)
    (tmp_path / "pydantic-1-py3-none-any.whl").touch()
    assert script.bare.download(tmp_path) == 0
    assert not [*tmp_path.glob("*.whl")]  # another version beside it would be taken, too
    words = " ".join(asked[0])
    assert "pip download --no-deps --only-binary=:all:" in words
    assert "--python-version 3.12" in words
    assert "index" not in words
    pins = (script.bare.HERE.parents[1] / "constraints.txt").read_text().splitlines()
    named = [word for word in asked[0] if "==" in word]
    assert {*named} <= {*pins}
    assert {word.split("==")[0] for word in named} >= {"pydantic", "pydantic_core", "plotly"}
