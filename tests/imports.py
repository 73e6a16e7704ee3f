"""Who imports whom in the package, read from the sources: lazy imports and those for types count like any other."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "stabilitylab"
Graph = dict[str, set[str]]


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name below the package ("" for its own __init__) -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(source: str, module: str, known: Mapping[str, object], is_package: bool = False) -> dict[str, bool]:
    """Modules of ours that ``module`` imports, each with whether for types alone; ``known``: all that there are."""
    own = module.split(".") if module else []
    home = own if is_package else own[:-1]
    tree = ast.parse(source)
    guards = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    found: dict[str, bool] = {}

    def add(target: str, node: ast.AST) -> None:
        while target and target not in known:
            target = target.rpartition(".")[0]
        if target != module:
            found[target] = found.get(target, True) and any(node.lineno in lines for lines in guards)  # type: ignore

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            below = node.module.split(".") if node.module else []
            if node.level:
                base = [*home[: len(home) - node.level + 1], *below]
            elif below[:1] == ["stabilitylab"]:
                base = below[1:]
            else:
                continue
            for alias in node.names:
                add(".".join([*base, alias.name]), node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "stabilitylab":
                    add(alias.name.partition(".")[2], node)
    return found


def graph() -> Graph:
    known = modules()
    return {
        name: set(imported(path.read_text(encoding="utf-8"), name, known, path.name == "__init__.py"))
        for name, path in known.items()
    }


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    waiting: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        waiting.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in waiting:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = waiting.index(name)
            group = waiting[place:]
            del waiting[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found
