"""The provenance of a run: the git revision is that of this package, or none."""

from __future__ import annotations

import subprocess
from pathlib import Path

from stabilitylab.train.environment import git_revision


def test_a_file_that_its_repository_does_not_track_has_no_revision(tmp_path: Path) -> None:
    """As a package that was installed into an environment within somebody's repository."""
    own, installed = tmp_path / "own.py", tmp_path / ".venv" / "package" / "module.py"
    installed.parent.mkdir(parents=True)
    for file in (own, installed):
        file.write_text("x = 1\n")
    assert git_revision(own) is None, "there is no repository"

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", own.name)
    git("commit", "-q", "-m", "one")
    assert git_revision(own) == git("rev-parse", "HEAD").strip()
    assert git_revision(installed) is None
    own.write_text("x = 2\n")
    assert git_revision(own) == git("rev-parse", "HEAD").strip() + "-dirty"
    assert git_revision(tmp_path / "nowhere" / "file.py") is None
