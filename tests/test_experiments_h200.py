"""The runs at scale h200: sizes, order and recipe as fixed beforehand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from stabilitylab.config import Config
from stabilitylab.errors import UsageError
from stabilitylab.experiments import SWEEPS, Experiment, command, experiments, folder, minutes, on_device
from stabilitylab.labels import label
from stabilitylab.probes._engine.cadence import is_due

TEXT = {"source": "text:a.de,a.en"}


def made(figure: str, **changes) -> list[tuple[str, Config]]:
    return [(label(each.config.model), each.config) for each in experiments(figure, "h200", **changes)]


def test_three_lists_of_runs_in_folders_of_their_own() -> None:
    assert [name for name in SWEEPS if "h200" in SWEEPS[name].scales] == [
        "branchnorm:3",
        "branchnorm:8",
        "branchnorm:9",
        "deepnet:5",
    ]
    assert experiments("9", "h200") == experiments("8", "h200")
    assert folder("9", "h200") == folder("8", "h200") == "h200/branchnorm-8"
    assert folder("deepnet:5", "h200") == "h200/deepnet-5"
    assert minutes("8", "h200") is None
    assert command("deepnet:5", "h200") == "stabilitylab sweep deepnet:5 --scale h200 --data text:SRC,TGT"


def test_deepnet_5_is_the_figures_model_depths_and_first_updates() -> None:
    runs = made("deepnet:5", data=TEXT)
    cells = Counter((name, c.model.encoder_layers, c.train.seed) for name, c in runs)
    archs, depths = ("postln", "deepnorm", "branchnorm", "admin"), (6, 12, 18, 25, 50, 100)
    assert cells == Counter(itertools.product(archs, depths, (3, 4, 5)))
    for _, config in runs:
        model, train = config.model, config.train
        assert (model.d_model, model.d_ffn, model.heads, model.encoder_layers) == (64, 128, 2, model.decoder_layers)
        assert (train.steps, train.lr, train.warmup, train.precision) == (100, 5e-4, 4000, "fp32")
        assert is_due(10, config.probes.update_every, 5)  # the update at which the figure compares depths
        assert config.probes.names == ("model_update",)
        assert not train.final_checkpoint


def test_branchnorm_3_is_the_beginning_of_the_papers_recipe_without_and_with_warm_up() -> None:
    runs = made("branchnorm:3")
    assert len(runs) == 4 * 2 * 3
    for name, config in runs:
        model, train = config.model, config.train
        assert (model.d_model, model.d_ffn, model.heads, model.depth) == (512, 2048, 8, 100)
        assert (train.steps, train.lr, train.precision, train.accumulate) == (100, 5e-4, "bf16", 1)
        assert (1 if name == "branchnorm T=1" else 4000) == model.T
        assert all(is_due(row, config.probes.every) for row in range(100))
        assert not train.final_checkpoint
    first = [(name, c.train.warmup, c.train.seed) for name, c in runs[:4]]
    assert sorted(first) == sorted((n, w, 3) for n in ("deepnorm", "branchnorm") for w in (0, 4000))
    assert {name for name, _ in runs[12:]} == {"postln", "branchnorm T=1"}


def test_branchnorm_8_is_balanced_wherever_it_is_cut_and_has_a_length() -> None:
    runs = made("8", data=TEXT, steps=1500)
    assert [name for name, _ in runs[:18]] == ["deepnorm", "branchnorm", "branchnorm T=1"] * 6
    assert [c.train.seed for _, c in runs[:18:3]] == [3, 4, 5, 6, 7, 8]
    assert [(name, c.model.T) for name, c in runs[18:]] == [("branchnorm", 300)] * 6  # a ramp of 20 %
    for name, config in runs[:18]:
        model, train = config.model, config.train
        assert (model.d_model, model.encoder_layers, model.decoder_layers, model.dropout) == (512, 18, 18, 0.3)
        assert (train.steps, train.warmup, train.lr, train.precision) == (1500, 60, 5e-4, "bf16")
        assert train.schedule == "linear"
        assert (1 if name == "branchnorm T=1" else 60) == model.T
        assert not train.final_checkpoint
        assert {"default", "branch_variance"} == {*config.probes.names}
    assert {c.train.steps for _, c in made("8")} == {2000}
    only = made("8", seeds=[11])
    assert {c.train.seed for _, c in only} == {11}
    assert len(only) == 4


@pytest.mark.slow
def test_what_a_batch_holds_is_at_least_four_thousand_tokens(multi30k) -> None:
    from stabilitylab.data import load_data

    texts = {
        split: ",".join(str(multi30k / f"{split}.{side}.gz") for side in ("de", "en")) for split in ("train", "val")
    }
    data = {"source": f"text:{texts['train']}", "valid": texts["val"]}
    for figure in ("8", "deepnet:5"):
        dataset = load_data(experiments(figure, "h200", data=data)[0].config.data, stack="encoder-decoder")
        counts = [dataset.micro_batch(step).tokens for step in range(dataset.batches_per_epoch)]
        assert min(counts) >= 4096
        assert max(counts) < 2 * 4096


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: experiments("branchnorm:5", "h200"), "branchnorm:5 has no runs at scale h200; there are branchnorm:3"),
        (
            lambda: experiments("branchnorm:3", "h200", steps=10),
            "length of the runs of branchnorm:3 at scale h200 is fixed",
        ),
        (lambda: experiments("branchnorm:6", steps=10), "length of the runs of branchnorm:6 at scale tiny is fixed"),
        (lambda: experiments("8", "h200", steps=0), "give at least one"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(call, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        call()


def test_the_device_is_set_in_every_run_and_nothing_else() -> None:
    runs = experiments("deepnet:5", "h200")
    moved = on_device(runs, "cuda")
    assert {run.config.train.device for run in moved} == {"cuda"}
    assert on_device(moved, "auto") == runs
    assert on_device(runs, None) == runs
    assert all(isinstance(run, Experiment) for run in moved)
