"""``stabilitylab check`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

READY = """
import torch
from torch import nn

def ready(rate=1e-2):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    x = torch.randn(2, 5, 8)
    return model, x, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=rate)

def wild():
    return ready(rate=1e6)

def lost():
    model, x, loss, optimizer = ready()
    return model, x, lambda model, x: loss(model, x) * float("nan"), optimizer

def named():
    model, x, loss, optimizer = ready()
    return {"model": model, "batch": x, "loss_fn": loss, "sites": {"layers": r"layers\\.[01]"}}

def wrong():
    return 3

def foreign():
    return named() | {"epochs": 3}

def failing():
    raise KeyError("weights.pt")

def leaving():
    raise SystemExit("give --config")

def searched():
    return named() | {"batches": [named()["batch"]], "held_out": [named()["batch"]], "clipping": 1.0}

def listed():
    one = searched()
    one.pop("batch")
    return one
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mymodel.py").write_text(READY)
    (tmp_path / "needy.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("mine")
def test_a_model_that_is_ready(run) -> None:
    code, out, err = run("check", "mymodel:ready")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["layer", "||dE/dtheta||"]
    assert [line.split()[:2] for line in lines[1:4]] == [["layers", "1"], ["layers", "2"], ["layers", "3"]]
    assert "one update: loss " in out


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["searched", "listed"])
def test_what_lr_find_takes_may_stand_beside_it(run, name: str) -> None:
    assert run("check", f"mymodel:{name}")[0] == 0


@pytest.mark.usefixtures("mine")
def test_a_model_that_is_not_exits_with_1(run) -> None:
    code, out, _ = run("check", "mymodel:wild")
    assert code == 1
    assert "FAIL  loss rises: the model: the loss on this batch goes from " in out
    assert "not ready to train" in out


@pytest.mark.usefixtures("mine")
def test_a_loss_that_is_nan_accuses_the_loss_alone(run) -> None:
    code, out, _ = run("check", "mymodel:lost")
    assert code == 1
    assert "FAIL  not finite: " in out
    assert "To do: look at loss_fn" in out
    assert "not checked: evaluation repeats: the loss is nan and nan in two passes" in out
    assert "(limit" not in "".join(line for line in out.splitlines(keepends=True) if line.startswith("ok:"))


@pytest.mark.usefixtures("mine")
def test_json_is_one_object(run) -> None:
    code, out, _ = run("check", "mymodel:named", "--json")
    assert code == 0
    found = json.loads(out)
    assert [(one["stack"], one["layer"]) for one in found["layers"] if one["layer"]] == [("layers", 1), ("layers", 2)]
    assert found["ok"] is True


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("factory", "code", "sentence"),
    [
        ("mymodel", 2, "must be PACKAGE.MODULE:FACTORY"),
        ("mymodel:redy", 2, "has no function 'redy'. Did you mean 'ready'?"),
        ("mymodel:wrong", 2, "returned int: it must return (model, batch, loss_fn)"),
        ("mymodel:foreign", 2, "returned 'epochs', which is no argument of preflight"),
        ("mymodel:failing", 4, "failed: KeyError: 'weights.pt'"),
        ("nomodel:ready", 4, "no module 'nomodel' here: call check in the folder that holds it"),
        ("needy:ready", 4, "needy imports 'nowhere_at_all', which is not installed here"),
        ("mymodel:leaving", 4, "mymodel:leaving failed: SystemExit: give --config"),
        ("small/mymodel.py:ready", 2, "names a file: write small.mymodel:ready"),
        ("/somewhere/else/mymodel.py:ready", 2, "names a file: go to /somewhere/else and write mymodel:ready"),
    ],
)
def test_bad_input_is_one_sentence(run, factory: str, code: int, sentence: str) -> None:
    got, _, err = run("check", factory)
    assert got == code
    assert sentence in err
    assert len(err.splitlines()) == 1
