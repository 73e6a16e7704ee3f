"""Imports only go down the layers of the architecture; and the guard itself can fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "stabilitylab"
LEVEL = {
    **dict.fromkeys(("errors", "registry", "schema", "config", "inputs", "labels", "stopping", "verdict"), 1),
    **dict.fromkeys(("models", "probes", "store"), 2),
    **dict.fromkeys(("data", "experiments"), 3),
    **dict.fromkeys(
        (
            *("train", "onestep", "decode", "sweep", "api", "reports", "check", "diagnose", "export", "integrations"),
            "recommend",
        ),
        4,
    ),
    **dict.fromkeys(("terminal", "commands", "cli", "__main__"), 5),
}


def imported(source: str, module: str) -> set[tuple[str, bool]]:
    """(top-level part of ours, whether for types only) that ``module`` ("probes.watcher", say) imports."""
    parts = module.split(".")
    tree = ast.parse(source)
    guards = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found = set()
    for node in ast.walk(tree):
        names: list[list[str]] = []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = parts[: len(parts) - node.level] + (node.module.split(".") if node.module else [])
                names = [base] if base else [[alias.name] for alias in node.names]
            elif node.module and node.module.split(".")[0] == "stabilitylab":
                names = [node.module.split(".")[1:]] if "." in node.module else [[a.name] for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1:] for a in node.names if a.name.startswith("stabilitylab.")]
        for name in names:
            for_types = any(first <= node.lineno <= last for first, last in guards)
            if name and name[0] in LEVEL:
                found.add((name[0], for_types))
    return found


def violations(source: str, module: str) -> list[str]:
    own = module.split(".")[0]
    return [
        f"{module} (level {LEVEL[own]}) imports {other} (level {LEVEL[other]})"
        for other, for_types in imported(source, module)
        if other != own and not for_types and (LEVEL[other] > LEVEL[own] or (LEVEL[other] == LEVEL[own] == 2))
    ]


def modules() -> list[tuple[str, Path]]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            names.append((".".join(parts), path))
    return names


def test_every_module_has_a_level() -> None:
    assert {name.split(".")[0] for name, _ in modules()} <= LEVEL.keys()


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_down(module: str, path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..train import loop", "probes.watcher"),
        ("from ..models import build_model", "probes.watcher"),
        ("import stabilitylab.cli", "store.reader"),
        ("from . import train", "config"),
        ("def f():\n    from stabilitylab.reports import page", "models.transformer"),
    ],
)
def test_a_forbidden_import_is_found(source: str, module: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize("statement", ["import stabilitylab", "import stabilitylab.cli"])
def test_import_needs_neither_torch_nor_pandas_nor_matplotlib(statement: str) -> None:
    check = (
        f"import sys; {statement}; sys.exit(str({{'torch', 'pandas', 'matplotlib', 'pydantic'}} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "set()"


@pytest.mark.parametrize(
    "part", ["store", "terminal", "labels", "verdict", "schema", "experiments", "reports", "reports.build", "diagnose"]
)
def test_reports_side_needs_no_torch(part: str) -> None:
    check = f"import sys; import stabilitylab.{part}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
