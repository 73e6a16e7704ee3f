"""``stabilitylab.watch`` on a model that knows nothing of this package."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stabilitylab as sl
from stabilitylab.api import RunWatcher
from stabilitylab.diagnose import diagnose
from stabilitylab.errors import InputError, UsageError


class Tagger(nn.Module):
    """Somebody's model: torch's own encoder over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(11, 16)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def loop(model: nn.Module, watcher: RunWatcher | None, steps: int = 5, fail_at: int = -1) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if step == fail_at:
            raise RuntimeError("the loop broke")
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fresh() -> Tagger:
    torch.manual_seed(1)
    return Tagger()


def test_watch_writes_a_run_and_changes_nothing(tmp_path: Path) -> None:
    plain, watched = fresh(), fresh()
    expected = loop(plain, None)
    fixed = torch.arange(12).remainder(11).view(2, 6)
    with sl.watch(watched, out=tmp_path / "run", every=2, reference=lambda: watched(fixed), config={"lr": 1e-2}) as w:
        losses = loop(watched, w)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    run = sl.Run.open(tmp_path / "run")
    assert run.status.state == "finished"
    assert run.config == {"lr": 1e-2}
    assert {"grad_norm", "ln_input", "model_update", "cosine_similarity"} <= set(run.tables)
    ln_input = run.frame("ln_input")
    assert sorted(set(ln_input["step"])) == [0, 2, 4]
    assert sorted(set(ln_input["layer"])) == [1, 2, 3]
    assert np.isfinite(ln_input["value"]).all()
    assert list(run.metrics["step"]) == [0, 1, 2, 3, 4, 5]
    assert [r.name for r in sl.load_runs(tmp_path)] == ["run"]


def test_an_error_in_the_loop_keeps_the_rows_and_says_why(tmp_path: Path) -> None:
    model = fresh()
    with pytest.raises(RuntimeError, match="the loop broke"), sl.watch(model, out=tmp_path / "run", every=1) as w:
        loop(model, w, fail_at=3)
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.reason) == ("failed", "RuntimeError: the loop broke")
    assert list(run.metrics["step"]) == [0, 1, 2]


def test_finish_without_with_ends_the_run_and_close_removes_the_hooks(tmp_path: Path) -> None:
    model = fresh()
    watcher = sl.watch(model, out=tmp_path / "run", every=1, reference=None)
    loop(model, watcher, steps=3)
    watcher.finish(valid_loss=0.5)
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.step, len(run.metrics)) == ("finished", 3, 4)
    watcher.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert sl.Run.open(tmp_path / "run").status.state == "finished"


def test_a_generator_around_the_loop_that_is_closed_is_interrupted(tmp_path: Path) -> None:
    def losses() -> Iterator[float]:
        model = fresh()
        with sl.watch(model, out=tmp_path / "run", every=1) as watcher:
            while True:
                yield from loop(model, watcher, steps=1)

    going = losses()
    assert [next(going) for _ in range(2)]
    going.close()
    status = sl.Run.open(tmp_path / "run").status
    assert (status.state, status.step, status.reason) == ("interrupted", 2, "GeneratorExit")


def test_a_named_probe_without_a_site_raises_and_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ln_input"):
        sl.watch(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), out=tmp_path / "run", probes=["ln_input"])
    assert not (tmp_path / "run").exists()


def test_hidden_files_in_the_directory_stay_when_it_raises(tmp_path: Path) -> None:
    (tmp_path / "run/.git").mkdir(parents=True)
    (tmp_path / "run/.git/config").write_text("mine")
    with pytest.raises(UsageError, match="ln_input"):
        sl.watch(nn.Linear(2, 2), out=tmp_path / "run", probes=["ln_input"])
    assert (tmp_path / "run/.git/config").read_text() == "mine"
    model = fresh()
    with sl.watch(model, out=tmp_path / "run", every=1) as w:  # the next try has the name
        loop(model, w)
    assert sl.Run.open(tmp_path / "run").status.state == "finished"
    assert (tmp_path / "run/.git/config").read_text() == "mine"


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    model = fresh()
    with sl.watch(model, out=tmp_path / "run", every=1) as w:
        loop(model, w)
    with pytest.raises(UsageError, match=r"exists already .*watch\(resume") as caught:
        sl.watch(fresh(), out=tmp_path / "run", every=1)
    assert "probe --resume" not in str(caught.value)


def test_a_run_that_failed_at_its_first_row_does_not_block_the_next_try(tmp_path: Path) -> None:
    model = fresh()
    with pytest.raises(ZeroDivisionError), sl.watch(model, out=tmp_path / "run", reference=lambda: 1 / 0) as w:
        loop(model, w)
    assert sl.Run.open(tmp_path / "run").status.state == "failed"
    with sl.watch(model, out=tmp_path / "run", reference=None) as w:
        loop(model, w)
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, len(run.manifest["attempts"])) == ("finished", 1)
    assert len(run.metrics) > 0


@pytest.mark.parametrize("reference", ["first batch", None])
def test_a_loop_without_step_is_told(reference: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh()
    with sl.watch(model, out=tmp_path / "run", reference=reference, optimizer=torch.optim.SGD(model.parameters())):
        loop(model, None)
    said = [record.message for record in caplog.records if "step()" in record.message]
    assert said == [
        "step() was never called: no update is recorded; call step(loss=loss) once per update, after backward and "
        "before optimizer.step."
    ]
    run = sl.Run.open(tmp_path / "run")
    assert [f"{warning}." for warning in run.manifest["loop_warnings"]] == said
    if reference is None:
        with pytest.raises(InputError, match=r"has recorded nothing\. Warned as it ran: step\(\) was never called"):
            diagnose(run)
    else:
        found = diagnose(run)
        assert found.verdict != "healthy"
        assert said[0] in found.paragraph


def test_an_optimizer_of_another_model_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = torch.optim.AdamW(fresh().parameters())
    with sl.watch(fresh(), out=tmp_path / "run", every=1, optimizer=other) as watcher:
        assert [text for text in caplog.messages if "no parameter of the model is in optimizer=" in text]
        assert len(watcher.loop_warnings) == 1
    model = fresh()
    with sl.watch(model, out=tmp_path / "own", optimizer=torch.optim.AdamW(model.head.parameters())) as watcher:
        assert not watcher.loop_warnings, "some of its parameters are enough"


def test_with_a_step_nothing_is_said_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh()
    with sl.watch(model, out=tmp_path / "run", reference=None) as w:
        loop(model, w, steps=1)
        saved = w.checkpoint()
    with sl.watch(model, out=tmp_path / "run", reference=None, resume=saved):
        pass
    assert not [record for record in caplog.records if "step()" in record.message]


def test_an_error_in_the_last_held_out_pass_is_the_runs_end(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), sl.watch(fresh(), out=tmp_path / "run", reference=lambda: 1 / 0) as w:
        pass
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, w._state) == ("failed", "closed")
    assert len(run.manifest["loop_warnings"]) == 1


def test_public_names_load_lazily_and_unknown_ones_raise() -> None:
    assert set(sl.__all__) <= set(dir(sl)), "dir(stabilitylab) lacks public names"
    assert [name for name in sl.__all__ if getattr(sl, name) is None] == [], "these public names are None"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sl.nothing


def test_what_is_left_out_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    with sl.watch(model, out=tmp_path / "run"):
        pass
    said, _ = (record.message for record in caplog.records)
    assert "not recorded: " in said
    assert "update_ratio needs optimizer=, the optimizer" in said
    caplog.clear()
    with sl.watch(model, out=tmp_path / "other", probes="grad_norm"):
        pass
    assert not [record for record in caplog.records if "step()" not in record.message]


def test_callbacks_name_the_options_of_watch() -> None:
    """Type checkers see them; the trainer gives the rest."""
    from stabilitylab.api import WatchKeywords, watch
    from stabilitylab.integrations.session import OWN

    given = {"model", "out", "mask", "reference", *OWN}
    theirs = {name: one.annotation for name, one in inspect.signature(watch).parameters.items() if name not in given}
    assert WatchKeywords.__annotations__.keys() == theirs.keys()
    named = {name: getattr(one, "__forward_arg__", one) for name, one in WatchKeywords.__annotations__.items()}
    assert named == theirs


@pytest.mark.parametrize("name", ["bisect", "explain", "lr_find"])
def test_the_help_of_a_package_that_is_called_has_the_parameters_of_its_function(name: str) -> None:
    called = getattr(sl, name)
    text = pydoc.plain(pydoc.render_doc(called))
    assert f"{name}(" in text
    assert all(f"{one}: " in text for one in inspect.signature(called).parameters)
