"""Runs side by side: each number by its definition, at the last step that all of them reached."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diagnose_cases import Made, layer_rows, made

import stabilitylab as sl
from stabilitylab.diagnose import Standings, side_by_side
from stabilitylab.errors import InputError
from stabilitylab.schema import Row
from stabilitylab.store import Run, RunWriter

ENCODER = layer_rows(3)
BOTH = [*ENCODER, *(Row(f"decoder.{n}", "decoder", n) for n in (1, 2, 3))]


def standings(*paths: Path) -> Standings:
    return side_by_side([Run.open(path) for path in paths])


def test_losses_are_compared_at_the_last_step_that_all_have(tmp_path: Path) -> None:
    long = made(tmp_path / "long", {"held_out_nll": [6.0, None, 5.0, None, 4.0], "loss": [7.0] * 5})
    short = made(tmp_path / "short", {"held_out_nll": [6.5, None, 4.5], "loss": [7.0] * 3})
    found = standings(long, short)
    assert (found.loss, found.step) == ("held_out_nll", 2)
    assert [row.loss for row in found.rows] == [5.0, 4.5]
    assert "short has the lowest held_out_nll, 4.5000" in found.paragraph
    assert "One run is one seed" in found.paragraph


def test_updates_are_counted_whether_the_last_row_is_of_the_last_update_or_after_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with sl.watch(model, out=tmp_path / "watched", probes="none", reference=None) as watcher:
        for _ in range(5):
            loss = model(torch.ones(3, 2)).square().mean()
            loss.backward()
            watcher.step(loss=loss)
    after = made(tmp_path / "after", {"loss": [3.0, 2.0, 1.0]})
    assert [row.updates for row in standings(tmp_path / "watched", after).rows] == [5, 2]


def test_runs_with_one_loss_have_no_order(tmp_path: Path) -> None:
    paths = [made(tmp_path / name, {"held_out_nll": [6.0, 5.0], "loss": [7.0] * 2}) for name in "ab"]
    assert standings(*paths).paragraph == "At step 1 all have the same held_out_nll, 5.0000."


def test_a_place_that_was_not_measured_takes_no_number_away(tmp_path: Path) -> None:
    norms = {0: [2.0, math.nan, 3.0], 1: [math.nan, 6.0, 9.0]}
    lacks = lambda step, row: math.isnan(norms[step][row.layer - 1])  # noqa: E731
    tables = {"ln_input": Made(ENCODER, ("value",), lambda t: [[x] for x in norms[t]], range(2), absent=lacks)}
    (row,) = standings(made(tmp_path / "a", {"loss": [2, 1]}, tables)).rows
    assert row.norm_growth == pytest.approx(3)


def test_single_batches_are_averaged_over_the_last_tenth(tmp_path: Path) -> None:
    one = made(tmp_path / "one", {"loss": [9.0] * 18 + [1.0, 3.0]})
    other = made(tmp_path / "other", {"loss": [5.0] * 40})
    found = standings(one, other)
    assert (found.loss, found.step) == ("loss", 19)
    assert [row.loss for row in found.rows] == [2.0, 5.0]


def test_what_the_layers_look_like(tmp_path: Path) -> None:
    gradients = {0: [1.0] * 6, 1: [1e-3, 1e-2, 1.0, 0.5, 0.5, 1.0]}
    norms = {0: [2.0, 4.0, 3.0], 1: [5.0, 6.0, 10.0]}
    tables = {
        "grad_norm": Made(BOTH, ("value",), lambda t: [[g] for g in gradients[t]], range(2)),
        "ln_input": Made(ENCODER, ("value",), lambda t: [[x] for x in norms[t]], range(2)),
        "model_update": Made(ENCODER, ("cumulative",), lambda t: [[math.nan], [math.nan], [7.0 * t]], range(2)),
    }
    (row, bare) = standings(made(tmp_path / "a", {"loss": [2, 1]}, tables), made(tmp_path / "b", {"loss": [2, 1]})).rows
    assert row.gradient_decades == pytest.approx(3)  # of the encoder: the decoder's are within a factor of two
    assert row.norm_growth == pytest.approx(2.5)
    assert row.moved == 7.0
    assert all(math.isnan(getattr(bare, key)) for key in ("gradient_decades", "norm_growth", "moved", "gap"))


def test_a_layer_without_gradient_is_infinitely_far_from_the_others(tmp_path: Path) -> None:
    table = {"grad_norm": Made(ENCODER, ("value",), lambda t: [[0.0], [1.0], [1.0]], range(2))}
    row, _ = standings(made(tmp_path / "a", {"loss": [2, 1]}, table), made(tmp_path / "b", {"loss": [2, 1]})).rows
    assert row.gradient_decades == math.inf


def test_runs_without_a_common_loss_have_no_order(tmp_path: Path) -> None:
    found = standings(made(tmp_path / "a", {"loss": [2, 1]}), made(tmp_path / "b", {"nll": [2, 1]}))
    assert found.step is None
    assert "without an order" in found.paragraph


def test_a_loss_that_is_not_finite_leaves_no_order(tmp_path: Path) -> None:
    found = standings(made(tmp_path / "a", {"loss": [2, 1]}), made(tmp_path / "b", {"loss": [2, math.nan]}))
    assert found.paragraph.endswith("b: loss is not finite at step 1, so there is no order.")


def test_losses_on_different_data_are_no_ranking(tmp_path: Path) -> None:
    paths = []
    for name, source in (("a", "synthetic"), ("b", "text:x,y")):
        manifest = {"config": {"data": {"source": source, "seed": len(paths)}}}
        with RunWriter.create(tmp_path / name, manifest) as writer:
            writer.open([])
            writer.append(0, {"loss": 1.0 + len(paths)}, {})
            writer.set_status("finished", 0, "made up")
        paths.append(tmp_path / name)
    found = standings(*paths)
    assert found.settings == {"data.source": ("synthetic", "text:x,y")}
    assert "not measured on the same data (data.source)" in found.paragraph


SAME = {"held_out_sha256": "h", "train_sha256": "t", "tokenizer_sha256": "v", "files_sha256": {"a.txt": "1"}}


def of_data(
    path: Path,
    loss: float,
    data: Mapping[str, object] | None = None,
    *,
    settings: Mapping[str, object] | None = None,
    stack: str = "decoder",
    name: str = "held_out_nll",
) -> Path:
    """A run of the trainer; ``data``: facts of its data that differ from :data:`SAME`, None: it has none, as an older
    version. ``settings``: of the data."""
    config = {"model": {"stack": stack}, "train": {}, "data": dict(settings or {})}
    facts = {"config": config} if data is None else {"config": config, "data": {**SAME, **data}}
    with RunWriter.create(path, facts) as writer:
        writer.open([])
        writer.append(0, {name: loss}, {})
        writer.set_status("finished", 0)
    return path


def test_losses_of_different_tasks_are_no_ranking(tmp_path: Path) -> None:
    encoder, decoder, both = (
        of_data(tmp_path / stack, loss, {}, stack=stack)
        for stack, loss in (("encoder", 2.0), ("decoder", 3.0), ("encoder-decoder", 2.5))
    )
    told = standings(encoder, decoder, both).paragraph
    each = f"masked tokens: {encoder}; next tokens: {decoder}; translation: {both}"
    assert f"They are losses of different tasks ({each}), so this is no ranking." in told
    same = standings(encoder, of_data(tmp_path / "equal", 2.0, {})).paragraph
    assert "all have the same held_out_nll, 2.0000. They are losses of different tasks" in same
    older = standings(encoder, of_data(tmp_path / "older", 3.0)).paragraph
    assert "different tasks" in older, "the stack is a setting, which any version has"


@pytest.mark.parametrize("settings", [{"sentences": 8}, {"max_line_kb": 7, "max_file_mb": 3}, {"source": "text:b.txt"}])
def test_settings_that_change_no_held_out_text_leave_a_ranking(settings: dict[str, object], tmp_path: Path) -> None:
    paths = of_data(tmp_path / "a", 2.0, {}), of_data(tmp_path / "b", 3.0, {"train_sha256": "u"}, settings=settings)
    assert "One run is one seed" in standings(*paths).paragraph


@pytest.mark.parametrize(
    ("data", "settings", "told"),
    [
        ({"held_out_sha256": "g"}, {"held_out": 7}, "the held-out text differs (settings that differ: data.held_out)"),
        ({"tokenizer_sha256": "w"}, {}, "the tokenizer differs"),
        (
            {"held_out_sha256": "g", "tokenizer_sha256": "w", "files_sha256": {"a.txt": "2"}},
            {},
            "the held-out text and the tokenizer differ (files whose content differs: a.txt)",
        ),
    ],
)
def test_what_differs_in_the_data_is_said(
    data: dict[str, object], settings: dict[str, object], told: str, tmp_path: Path
) -> None:
    paths = of_data(tmp_path / "a", 2.0, {}), of_data(tmp_path / "b", 3.0, data, settings=settings)
    found = standings(*paths)
    assert found.paragraph.endswith(f" They were not measured on the same data: {told}, so this is no ranking.")
    assert found.as_dict()["unlike"] == found.unlike


def test_losses_of_training_are_compared_by_the_training_text(tmp_path: Path) -> None:
    paths = [of_data(tmp_path / name, 2.0, {"train_sha256": name}, name="nll") for name in "ab"]
    told = standings(*paths).paragraph
    assert "all have the same nll, 2.0000. They were not measured on the same data: the training text differs" in told
    paths = [of_data(tmp_path / f"{name}2", 2.0, {"held_out_sha256": name}, name="nll") for name in "ab"]
    assert standings(*paths).paragraph == "At step 0 all have the same nll, 2.0000."


def test_without_digests_the_settings_of_the_data_decide(tmp_path: Path) -> None:
    first = of_data(tmp_path / "a", 2.0, {})
    bounds = of_data(tmp_path / "b", 3.0, settings={"max_line_kb": 7, "max_file_mb": 3})
    assert "One run is one seed" in standings(first, bounds).paragraph
    other = of_data(tmp_path / "c", 3.0, settings={"vocab_size": 99})
    assert "not measured on the same data (data.vocab_size), so this is no ranking" in standings(first, other).paragraph


def test_an_empty_run_is_refused(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "empty", {}) as writer:
        writer.open([])
    with pytest.raises(InputError, match="nothing yet"):
        standings(made(tmp_path / "a", {"loss": [2, 1]}), tmp_path / "empty")


def test_the_command_puts_many_side_by_side(run, tmp_path: Path) -> None:
    for place, name in enumerate("abc"):
        made(tmp_path / "runs" / name, {"loss": [3.0, 2.0 + place]})
    paths = [f"runs/{name}" for name in "abc"]
    code, out, err = run("compare", *paths)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["a", "b", "c"]
    code, mixed, err = run("compare", "runs/a", str(tmp_path / "runs/b"), "runs/c")  # paths of both kinds
    assert (code, [line.split()[0] for line in mixed.splitlines()[1:4]]) == (0, ["a", "b", "c"]), err
    assert "part at" not in out
    assert "runs/a has the lowest loss, 2.0000, and runs/c the highest, 4.0000" in out
    facts = json.loads(run("compare", *paths, "--json")[1])["side_by_side"]
    assert [row["loss"] for row in facts["rows"]] == [2.0, 3.0, 4.0]
    both = json.loads(run("compare", *paths[:2], "--json")[1])
    assert both["first"]["step"] == both["side_by_side"]["step"] == 1
    assert "part at step 1" in run("compare", *paths[:2])[1]
    code, _, err = run("compare", *paths, "--rtol", "0.1")
    assert (code, err.count("\n")) == (2, 1)
    assert "are for two runs" in err


def of_kind(path: Path, kind: str, losses: list[float], first: int = 0, **config: dict[str, object]) -> Path:
    with RunWriter.create(path, {"kind": kind, "config": config}) as writer:
        writer.open([])
        for step, value in enumerate(losses, first):
            writer.append(step, {"loss": value}, {})
        writer.set_status("finished", first + len(losses) - 1)
    return path


def test_only_what_a_sweep_can_train_is_sent_to_it(tmp_path: Path) -> None:
    ours = [of_kind(tmp_path / f"ours-{n}", "train", [3.0, n]) for n in (1.0, 2.0)]
    own = [of_kind(tmp_path / f"own-{n}", "watched", [3.0, n]) for n in (1.0, 2.0)]
    assert "'stabilitylab sweep' makes several" in standings(*ours).paragraph
    for pair in (own, [ours[0], own[1]]):
        assert "stabilitylab sweep" not in standings(*pair).paragraph
        assert standings(*pair).paragraph.endswith("another seed may give another order.")


def test_a_loss_that_begins_after_the_other_ended_is_none(tmp_path: Path) -> None:
    found = standings(
        of_kind(tmp_path / "a", "watched", [3.0, 2.0]), of_kind(tmp_path / "b", "watched", [3.0], first=9)
    )
    assert "without an order" in found.paragraph


def test_a_section_that_one_run_lacks_is_one_line_and_a_measured_nan_is_a_number(run, tmp_path: Path) -> None:
    model = {"arch": "postln", "encoder_layers": 2, "decoder_layers": 2}
    of_kind(tmp_path / "own", "watched", [3.0, math.nan])
    of_kind(tmp_path / "a", "train", [3.0, 2.0], model=model, train={"lr": 1.0, "seed": 3}, preset="tiny")
    of_kind(tmp_path / "b", "train", [3.0, 2.5], model=model, train={"lr": 2.0, "seed": 3}, preset="tiny")
    code, out, err = run("compare", "own", "a")
    assert (code, err) == (0, "")
    assert "\n  model: 3 settings that only a has (--json lists them)\n" in out
    assert "\n  preset: (not set) | tiny\n" in out
    assert "model.arch" not in out
    row = next(line for line in out.splitlines() if line.startswith("own "))
    assert row.split()[:3] == ["own", "finished", "nan"]
    _, out, _ = run("compare", "own", "a", "b")
    assert "\n  train.lr: (not set) | 1.0 | 2.0\n" in out  # in which those that have it differ
    assert " settings that only a, b have" in out
    _, out, _ = run("compare", "a", "b")
    assert "\n  train.lr: 1.0 | 2.0\n" in out
    assert "settings that only" not in out
