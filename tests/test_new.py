"""``stabilitylab new probe``: what is written runs as it stands, and nothing that exists is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stabilitylab.errors import InputError, UsageError
from stabilitylab.scaffold import new_probe


@pytest.mark.slow
def test_the_probe_and_its_test_run_as_they_stand(tmp_path: Path) -> None:
    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    begun = python("stabilitylab", "new", "probe", "gate_share")
    assert begun.returncode == 0, begun.stderr
    assert begun.stdout.splitlines()[:2] == ["gate_share.py", "test_gate_share.py"]
    tried = python("pytest", "-q", "-p", "no:cacheprovider", "test_gate_share.py")
    assert "1 passed" in tried.stdout, tried.stdout
    said = begun.stdout.partition("Then:    stabilitylab ")[2].splitlines()[0].split()
    run = python("stabilitylab", *said, "--steps", "2", "--out", "runs")
    assert run.returncode == 0, run.stderr
    assert "gate_share" in os.listdir(tmp_path / "runs" / "deepnorm-12-s0" / "probes")
    read = python("stabilitylab", *begun.stdout.partition("Read it: stabilitylab ")[2].split())
    assert read.returncode == 0, read.stderr
    table = (tmp_path / "deepnorm-12-s0-csv" / "gate_share.csv").read_text(encoding="utf-8")
    assert table.startswith('"step","site","stack_name","layer"'), table[:80]
    again = python("stabilitylab", "new", "probe", "gate_share")
    assert (again.returncode, again.stdout) == (4, "")
    assert again.stderr == "stabilitylab: gate_share.py exists: choose another name, or remove it.\n"


def test_in_a_checkout_the_docs_name_it(tmp_path: Path) -> None:
    (tmp_path / "stabilitylab" / "probes" / "library").mkdir(parents=True)
    page = tmp_path / "docs" / "probes" / "training.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Training pass\n", encoding="utf-8")
    written = [path.relative_to(tmp_path).as_posix() for path in new_probe("peak", tmp_path)]
    assert written == [
        "stabilitylab/probes/library/peak.py",
        "tests/probes/test_probes_peak.py",
        "docs/probes/training.md",
    ]
    assert page.read_text(encoding="utf-8") == "# Training pass\n\n## peak\n\n```{probe} peak\n```\n"
    for path in written[:2]:
        compile((tmp_path / path).read_text(encoding="utf-8"), path, "exec")


def test_a_file_that_exists_is_kept_and_nothing_else_is_written(tmp_path: Path) -> None:
    mine = tmp_path / "test_peak.py"
    mine.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"test_peak\.py exists: choose another name, or remove it\."):
        new_probe("peak", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_peak.py"]
    assert mine.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Peak", "is no name of a probe"),
        ("peak-to-peak", "is no name of a probe"),
        ("2nd", "is no name of a probe"),
        ("lambda", "is no name of a probe"),
        ("random", "would hide Python's module 'random'"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        new_probe(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
