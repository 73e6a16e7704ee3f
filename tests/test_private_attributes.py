"""No object reaches into another one's underscored attributes; what torch keeps there is listed with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from imports import PACKAGE, modules

KNOWN = modules()
CHILDREN = "the dictionaries themselves: a ParametrizationList's, a None, and order show there alone"
HOOKS = "hooks of an earlier watch, or of others, are found there alone"
VERSION = "counts the writes to a tensor, which nothing public tells"
FOREACH = "operators on lists of tensors, which torch's own optimizers use"
SCALER = "the state of a GradScaler: get_scale() waits for the device, and no method says whether unscale_ was called"
PIPELINE = "what a schedule knows of its stage, which nothing public tells"
COMPILER = "what torch.compile has put there, which nothing public tells"
CAPTURE = "gives the memory of a capture that failed back, for which torch has nothing public"
TUPLES = "public, of named tuples: underscored so that no field has its name"
OUTSIDE = {  # of torch, Python and others
    **dict.fromkeys(("_modules", "_parameters", "_buffers"), CHILDREN),
    **dict.fromkeys(("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"), HOOKS),
    "_forward_pre_hooks": HOOKS,
    "_post_accumulate_grad_hooks": HOOKS,
    "_version": VERSION,
    **dict.fromkeys(("_scale", "_per_optimizer_states"), SCALER),
    **dict.fromkeys(("_stage", "_n_microbatches", "_has_backward"), PIPELINE),
    **dict.fromkeys(("_stage_forward_initialized", "_stage_backward_initialized"), PIPELINE),
    **dict.fromkeys(("_compiled_call_impl", "_dynamo", "_orig_mod"), COMPILER),
    "_cuda_releasePool": CAPTURE,
    **dict.fromkeys(("_asdict", "_fields"), TUPLES),
    "_C": "torch's compiled half",
    "_current_graph_task_id": "whether a backward is running, and which",
    "_will_engine_execute_node": "whether the backward that runs leaves a gradient on a parameter",
    "_is_view": "whether a tensor is a view, whose history a write to it makes anew",
    "_current_autograd_node": "where the backward that runs is",
    "_execution_engine": "calls back at the end of a backward",
    "_are_functorch_transforms_active": "whether a transform of torch.func is running, which nothing public tells",
    "_set_grad_enabled": "torch.no_grad() costs six times as much",
    "_DEFAULT_FIRST_BUCKET_BYTES": "where DDP cuts its first bucket",
    **dict.fromkeys(("_get_fsdp_state", "_fsdp_param_groups", "_fsdp_param_group"), "how FSDP2 spreads a module"),
    **dict.fromkeys(("_NormBase", "_ConvNd"), "the classes that all norms, and all convolutions, are of"),
    **dict.fromkeys(("_indices", "_values"), "of a sparse tensor, without the copy that coalesce() makes"),
    "_getframe": "the callers' frames; each use says why",
    "_fused_adamw_": FOREACH,
    "_get_default_store": "by which ranks agree while others are inside a collective",
    "_optimizers": "which Accelerator an optimizer belongs to",
}
# names that objects of ours have too -> the files in which it is torch's
SHARED = {
    "_modules": (
        *("decode/cache.py", "probes/_engine/watchable.py", "probes/places/attending.py"),
        *("probes/places/finding.py", "probes/places/naming.py", "probes/places/structure.py"),
    ),
    "_parameters": (
        *("probes/parameters/pieces.py", "probes/parameters/shards.py"),
        *("probes/places/attending.py", "probes/places/naming.py"),
    ),
    "_scale": ("probes/_engine/scaling.py",),
    "_values": ("probes/state/bits.py",),
    "_version": (
        "probes/_engine/backwards.py",
        "probes/_engine/hooks.py",
        "probes/_engine/training_pass.py",
        "probes/instruments/leftover.py",
        "probes/library/adam.py",
        "probes/library/fingerprint.py",
        "probes/state/bits.py",
    ),
}
# (file, attribute): ours, to be mended. This list may only become shorter.
OWED = {
    ("models/schedules.py", "_value"),
    ("models/schedules.py", "_name"),
    ("store/reader.py", "_version"),
    ("store/reader.py", "_tables"),
}


def reached(source: str) -> Iterator[tuple[str, str]]:
    """(attribute, expression) for each underscored attribute of another object than the one whose code it is."""
    tree = ast.parse(source)
    own: dict[ast.AST, set[str]] = {}
    for scope in ast.walk(tree):  # outer ones first, so that a function in a class has the class's name from it
        known = own.get(scope, set())
        if isinstance(scope, ast.ClassDef):
            known = known | {"cls", "self", scope.name}
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            known = known | _made_here(scope, known)
        own |= dict.fromkeys(ast.iter_child_nodes(scope), known)
        name, value = _underscored(scope)
        if name and not (isinstance(value, ast.Name) and value.id in known) and ast.unparse(value) != "super()":
            yield name, ast.unparse(scope)


def _underscored(node: ast.AST) -> tuple[str, ast.expr]:
    """An underscored attribute and whose it is, by a dot or by getattr and its kin."""
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        return node.attr, node.value
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr"):
        name = node.args[1]
        if isinstance(name, ast.Constant) and _is_private(str(name.value)):
            return str(name.value), node.args[0]
    return "", ast.Constant(None)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _made_here(function: ast.AST, classes: set[str]) -> set[str]:
    """Names that a function of a class gives to a new object of it: as alternative constructors do."""
    made = {f"{name}(" for name in classes if name != "self"}
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(tuple(made))
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _of_torch(name: str, expression: str, file: str) -> bool:
    if name in SHARED:
        return file in SHARED[name]
    return name in OUTSIDE or (name.startswith("_foreach_") and expression == f"torch.{name}")


@pytest.mark.parametrize("module", sorted(KNOWN))
def test_no_object_reaches_into_another(module: str) -> None:
    path = KNOWN[module]
    file = path.relative_to(PACKAGE).as_posix()
    wrong = [
        expression
        for name, expression in reached(path.read_text(encoding="utf-8"))
        if (file, name) not in OWED and not _of_torch(name, expression, file)
    ]
    assert wrong == [], f"{file} reaches into another object: give what it needs a name without an underscore"


def test_what_is_owed_is_there_still() -> None:
    """One that was mended leaves the list."""
    for file, name in OWED:
        assert name in [found for found, _ in reached((PACKAGE / file).read_text(encoding="utf-8"))], (file, name)


@pytest.mark.slow
def test_each_exception_is_needed() -> None:
    every = {name for path in KNOWN.values() for name, _ in reached(path.read_text(encoding="utf-8"))}
    assert set(OUTSIDE) <= every


@pytest.mark.slow
def test_a_name_that_objects_of_ours_have_too_is_an_exception_in_known_files_alone() -> None:
    """An exception must not open a door into an object of this package."""
    ours = set()
    for path in KNOWN.values():
        stored = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
        ]
        ours |= {node.attr for node in stored if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    assert ours & OUTSIDE.keys() == SHARED.keys()


@pytest.mark.parametrize(
    "source",
    [
        "def f(other):\n    return other._row",
        "class A:\n    def f(self):\n        return self.other._row",
        "class A:\n    def f(self, other):\n        other._row = 1",
        "class A:\n    def f(self, other):\n        return getattr(other, '_row')",
        "class A:\n    @classmethod\n    def f(cls, other):\n        own = other(cls)\n        return own._row",
    ],
)
def test_a_hand_in_another_object_is_found(source: str) -> None:
    assert [name for name, _ in reached(source)] == ["_row"]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        return self._row",
        "class A:\n    def f(self):\n        return super()._row()",
        "class A:\n    @classmethod\n    def f(cls):\n        own = cls()\n        own._row = 1\n        return own",
        "class A:\n    def f(self):\n        return A._row",
        "def f(x):\n    return x.__dict__",
    ],
)
def test_an_object_may_look_at_itself(source: str) -> None:
    assert list(reached(source)) == []
