"""Scripts of results/ and benchmarks/ use public names alone: those of public_names.json; and the guard can fail."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PUBLIC: Mapping[str, list[str]] = json.loads(Path(__file__).with_name("public_names.json").read_text(encoding="utf-8"))
ANY = "stabilitylab"

# Which scripts may import what else, and why. A path that ends in "/" stands for a folder.
ALLOWED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "benchmarks/faults/": ((ANY,), "the code that makes the corpora is frozen with their rules"),
    "results/alarm/": ((ANY,), "the rules are frozen, and measured on runs as the package's own parts read them"),
    "results/tiny/redraw.py": (
        ("stabilitylab.reports.figures", "stabilitylab.reports.measures.gains"),
        "draws committed tables with the panels of the figures themselves, so that a change of their look shows",
    ),
    "results/tiny/collapse_map.py": (
        ("stabilitylab.reports.figures.collapse",),
        "draws a committed table with the figure itself, by its own rule for the state of a run",
    ),
    "results/keel/page.py": (
        ("stabilitylab.reports.figures.table.keel",),
        "draws committed ledgers with the figure itself",
    ),
    "results/own_rates_page.py": (("stabilitylab.labels",), "knows the runs of an arm in a ledger by their label"),
    "benchmarks/attack.py": (
        ("stabilitylab.commands.listing", "stabilitylab.data.sources.text", "stabilitylab.store"),
        "damages files below their checksums, and seals them again, so that a check further inside must notice",
    ),
    "benchmarks/budget.py": (
        ("stabilitylab.models.sublayers", "stabilitylab.models.transformer"),
        "counts the products of each kind of sub-layer",
    ),
    "benchmarks/compiled_layers.py": (
        ("stabilitylab.models.transformer",),
        "gives each model a class of layer of its own, since models of one class share compiled code",
    ),
    "benchmarks/cuda_graphs.py": (
        ("stabilitylab.probes._engine.passes", "stabilitylab.probes.parameters", "stabilitylab.train.fast"),
        "counts the bytes and operators of the probes where they are read, and arranges an update as a graph holds it",
    ),
    "benchmarks/report.py": (
        ("stabilitylab.store.documents",),
        "makes a hundred runs of one by links, and seals the run.json of each anew",
    ),
    "benchmarks/step.py": (
        ("stabilitylab.train.loop",),
        "swaps the loss of the loop for the one before; its trainer is one of older checkouts, too",
    ),
}


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of ours that a script imports, or reaches through a module; the name of a whole module is
    "". Code in strings, and names of modules there, count."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # local name -> module of ours
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "stabilitylab":
                    modules[alias.asname or "stabilitylab"] = alias.name if alias.asname else "stabilitylab"
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stabilitylab":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in PUBLIC:
                    modules[alias.asname or alias.name] = whole
                yield str(node.module), alias.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "stabilitylab." in node.value:
            yield from _in_text(node.value)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and not node.attr.startswith("__")
            and (module := _reached(node.value, modules))
        ):
            yield module, node.attr


def _reached(node: ast.expr, modules: Mapping[str, str]) -> str:
    """Return the public module that an expression names; "" for anything else."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute) and (above := _reached(node.value, modules)):
        return f"{above}.{node.attr}" if f"{above}.{node.attr}" in PUBLIC else ""
    return ""


def _in_text(text: str) -> Iterator[tuple[str, str]]:
    if re.fullmatch(r"stabilitylab(\.\w+)+", text):
        yield (text, "") if text in PUBLIC else (text.rpartition(".")[0], text.rpartition(".")[2])
    elif "import" in text:
        try:
            yield from imports(text)
        except SyntaxError:  # words
            return


def deep(source: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return what a script imports that is not public, and not within the modules of ``allowed``."""
    found = []
    for module, name in imports(source):
        whole = f"{module}.{name}" if name else module
        is_public = whole in PUBLIC or (module in PUBLIC and (not name or name in PUBLIC[module]))
        if not is_public and not any(f"{whole}.".startswith(f"{own}.") for own in allowed):
            found.append(whole)
    return found


def allowance(script: str) -> tuple[str, ...]:
    """Return the modules that a script may import beside public names."""
    own = [modules for path, (modules, _) in ALLOWED.items() if script == path or script.startswith(path)]
    return own[0] if own else ()


SCRIPTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("results", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_uses_public_names_alone(script: str) -> None:
    wrong = deep(SCRIPTS[script], allowance(script))
    assert wrong == [], f"{script} uses what is not public (tests/public_names.json): {', '.join(wrong)}"


@pytest.mark.parametrize("path", ALLOWED)
def test_an_allowance_is_needed(path: str) -> None:
    modules, reason = ALLOWED[path]
    used = [name for script, source in SCRIPTS.items() if script.startswith(path) for name in deep(source)]
    unused = [own for own in modules if not any(f"{name}.".startswith(f"{own}.") for name in used)]
    assert unused == [], f"{path} no longer needs {', '.join(unused)}"
    assert reason, f"{path} has no reason"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import stabilitylab as sl\nsl.watch(model)", []),
        ("from stabilitylab.store import Run\nfrom stabilitylab import train\ntrain.plan(1)", []),
        ("from stabilitylab.reports import style\nstyle.title('postln')", []),
        ("import stabilitylab as sl\nsl.bisect(a, b)\nsl.bisect.Fingerprint", []),
        ("logging.getLogger('stabilitylab')\n'Call stabilitylab.watch, or import it.'", []),
        ("from stabilitylab.store.journal import crc32", ["stabilitylab.store.journal.crc32"]),
        ("from stabilitylab.store import journal", ["stabilitylab.store.journal"]),
        ("from stabilitylab import api", ["stabilitylab.api"]),
        ("import stabilitylab.store.files", ["stabilitylab.store.files"]),
        ("import stabilitylab as sl\nsl.bisect.find.bisect(a, b)", ["stabilitylab.bisect.find"]),
        ("from stabilitylab import train\ntrain.checkpoint.load(path)", ["stabilitylab.train.checkpoint"]),
        ("def work():\n    from stabilitylab.probes import base", ["stabilitylab.probes.base"]),
        ("mock.patch('stabilitylab.store.journal.crc32')", ["stabilitylab.store.journal.crc32"]),
        ("CODE = '''\nfrom stabilitylab.labels import label\n'''", ["stabilitylab.labels.label"]),
    ],
)
def test_what_is_not_public_is_found(source: str, wrong: list[str]) -> None:
    assert deep(source) == wrong


def test_an_allowance_is_for_its_modules_alone() -> None:
    source = "from stabilitylab.store.files import inside\nfrom stabilitylab.stores import x"
    assert deep(source, ("stabilitylab.store",)) == ["stabilitylab.stores.x"]
    assert allowance("benchmarks/faults/make.py") == (ANY,)
    assert allowance("benchmarks/steps.py") == allowance("results/shared.py") == ()


def test_docs_list_the_public_modules() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Public names")[2].partition("The scripts of")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    listed = [f"stabilitylab.{name}" for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert sorted(listed) == sorted({*PUBLIC} - {"stabilitylab"}), "docs/architecture.md: the table of public modules"


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_name_says_what_it_is(module: str) -> None:
    home = import_module(module)
    bare = [
        name
        for name in PUBLIC[module]
        if (isinstance(own := getattr(home, name), type) or callable(own))
        and getattr(own, "__module__", "").startswith("stabilitylab")
        and not (own.__doc__ or "").strip()
    ]
    assert bare == [], f"public names of {module} without a docstring: {', '.join(bare)}"
