"""Each example runs as a program of its own, and leaves the run that its page promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rest_slow import rest_slow

import stabilitylab as sl

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LEFT = {  # updates, stacks, some tables
    "plain_loop": (60, {"transformer"}, {"grad_norm", "ln_input", "model_update", "cosine_similarity"}),
    "headroom": (60, {"transformer"}, {"grad_norm", "critical_sharpness"}),
    "huggingface_trainer": (60, {"bert.encoder"}, {"grad_norm", "ln_input", "model_update", "update_ratio"}),
    "lightning_module": (40, {"model.encoder", "model.decoder"}, {"grad_norm", "ln_input", "update_ratio"}),
    "accelerate_loop": (60, {"model"}, {"grad_norm", "ln_input", "update_ratio"}),
    "tensor_parallel": (
        60,
        {"layers"},
        {"grad_norm", "ln_input", "model_update", "activation_sparsity", "update_ratio"},
    ),
    "pipeline_parallel": (60, {"layers"}, {"grad_norm", "ln_input", "activation_grad_norm", "update_ratio"}),
}
PROCESSES = {"tensor_parallel": 2, "pipeline_parallel": 2}
NEEDS = {"lightning_module": "lightning", "accelerate_loop": "accelerate", "huggingface_trainer": "accelerate"}


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LEFT, "learning_rate_jump"}


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow(LEFT, ["plain_loop"]))
def test_an_example_leaves_a_finished_run_of_a_model_that_learned(name: str, tmp_path: Path) -> None:
    if name not in PROCESSES:
        pytest.importorskip("transformers")
        pytest.importorskip(NEEDS.get(name, "transformers"))
    updates, stacks, tables = LEFT[name]
    run = left(name, tmp_path)
    metrics = run.metrics.set_index("step")
    assert (run.status.state, run.status.step) == ("finished", updates)
    assert metrics["loss"][updates - 10 : updates - 1].mean() < 0.95 * metrics["loss"][:10].mean()
    assert tables <= set(run.tables)
    norms = run.frame("grad_norm", by="layer").query("layer > 0 and step == 0")
    assert set(norms["stack_name"]) == stacks
    assert (norms["value"] > 0).all()


# Each as a program, one after the other in one process, which imports torch and its trainers once.
HELP = """
import contextlib, io, json, runpy, sys

told = {}
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
            code = "trains"
        except SystemExit as end:
            code = end.code
    told[path] = code, out.getvalue()
print(json.dumps(told))
"""


@pytest.mark.slow
def test_an_example_asked_for_help_trains_nothing(tmp_path: Path) -> None:
    """A process for each of them is the other tests' concern."""
    for module in ("transformers", *NEEDS.values()):
        pytest.importorskip(module)
    paths = [str(EXAMPLES / f"{name}.py") for name in [*LEFT, "learning_rate_jump"]]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(
        [sys.executable, "-c", HELP, *paths],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert [*told] == paths
    for path, (code, text) in told.items():
        assert code == 0, f"{path} --help: {code}"
        assert "folder of the run (default: runs/" in text, f"{path} --help says: {text}"
    assert not [*tmp_path.iterdir()], "an example asked for help leaves a file"


@pytest.mark.slow
def test_the_example_of_a_broken_run_is_diagnosed_as_the_docs_show(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    left("learning_rate_jump", tmp_path)
    diagnose = [sys.executable, "-m", "stabilitylab", "diagnose", str(tmp_path / "run")]
    told = subprocess.run(diagnose, capture_output=True, text=True, check=False).stdout
    shown = (EXAMPLES.parent / "docs" / "own-model.md").read_text()
    for said in (
        "First sign: learning-rate jump. The learning rate rose to 0.1 at step 40, 100 times",
        "update jump at step 40",
    ):
        assert said in told
        assert said in shown
    alarm = [sys.executable, "-m", "stabilitylab", "alarm", str(tmp_path / "run"), "--fail"]
    heard = subprocess.run(alarm, capture_output=True, text=True, check=False)
    assert heard.returncode == 1
    said = "step 40: layers' numbers leave their past together. The learning rate rose 100-fold at step 40, from 0.001 "
    assert heard.stdout.startswith(said)
    assert said in (EXAMPLES.parent / "docs" / "alarm.md").read_text()


def left(name: str, tmp_path: Path) -> sl.Run:
    """The run that an example leaves, which is all it leaves."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    several = [*launch, str(PROCESSES[name])] if name in PROCESSES else []
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, *several, str(EXAMPLES / f"{name}.py"), "run"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "next: stabilitylab diagnose run" in ended.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    return sl.Run.open(tmp_path / "run")
