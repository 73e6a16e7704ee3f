"""The table of the rates at which decoders train, on made-up runs whose ends are known."""

from __future__ import annotations

import csv
from typing import Any

import pytest
from in_memory import remembered

from stabilitylab.experiments import SWEEPS, Recipe
from stabilitylab.reports import FIGURES, MissingRuns, figures
from stabilitylab.reports.base import DIVERGED, Picture
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.table.keel import KeelTable, RateEnd, largest_rate, own_names
from stabilitylab.reports.figures.table.keel import drawn as drawn_of

assert figures
RATES = (1e-3, 4e-3, 1.6e-2)


def ended(arch: str, layers: int, seed: int, lr: float, verdict: str, **model: Any) -> Record:
    own = {"stack": "decoder", "design": "llama", "encoder_layers": 0, "decoder_layers": layers, **model}
    name = f"{arch}-{layers}-{seed}-{lr}-{len(model)}"
    return remembered(name, arch=arch, seed=seed, verdict=verdict, settings={"model": own, "train": {"lr": lr}})


def every_run() -> list[Record]:
    """KEEL trains at all rates; DeepNorm loses one seed of two at .004 and both at .016; without KEEL's inner norm only
    the middle rate trains with both seeds."""
    found = []
    for seed in (3, 4):
        for rate in RATES:
            found.append(ended("keel", 36, seed, rate, "trained" if rate < 0.01 else "learning"))
            high = "diverged" if rate > 4e-3 else "stuck" if (rate, seed) == (4e-3, 4) else "trained"
            found.append(ended("deepnorm", 36, seed, rate, high))
            own = "trained" if rate == 4e-3 else "descending" if seed == 3 else "cannot tell"
            found.append(ended("keel", 36, seed, rate, own, options={"inner": False}))
    return [*found, ended("keel", 12, 3, 1e-3, "trained")]


def drawn(records: list[Record]) -> Picture:
    return KeelTable().picture(Runs(records))


def test_cells_have_the_share_of_seeds_that_train_and_the_other_verdicts() -> None:
    shallow, deep = drawn(every_run()).panels
    assert shallow.title.startswith("12 layers, ")
    assert shallow.map.text.tolist() == [["1/1"]]
    rows = dict(zip(deep.map.y_names, deep.map.text.tolist(), strict=True))
    assert deep.map.x_names == ["0.001", "0.004", "0.016"]
    assert rows == {
        "KEEL": ["2/2", "2/2", "2/2"],
        "DeepNorm": ["2/2", "1/2\n1 stuck", "0/2\n2 diverged"],
        "KEEL inner=False": ["0/2\n1 descending\n1 cannot tell", "2/2", "0/2\n1 descending\n1 cannot tell"],
    }
    of = list(deep.map.y_names).index("DeepNorm")
    assert deep.map.z[of].tolist() == [1.0, 0.5, 0.0]
    assert deep.map.finding[of].tolist() == [0, 0, DIVERGED]


def test_the_largest_rate_of_all_seeds_is_told() -> None:
    picture = drawn(every_run())
    said = "largest rate at which all seeds train: DeepNorm 0.001, KEEL at least 0.016, KEEL inner=False 0.004"
    assert picture.finding == f"36 layers, 160 updates: {said} (2 seeds)."
    lines = [line.split(",") for line in picture.extra["table.csv"].splitlines()]
    told = {(line[0], line[2]): line[3:] for line in lines[1:]}
    assert told == {
        ("12", "KEEL"): ["one seed", "0.001", "none tried"],
        ("36", "KEEL"): ["2 seeds", "0.016", "none tried"],
        ("36", "DeepNorm"): ["2 seeds", "0.001", "0.004"],
        ("36", "KEEL inner=False"): ["2 seeds", "0.004", "0.001"],
    }


def test_a_name_with_a_comma_is_one_cell_of_the_table() -> None:
    ends = [RateEnd("KEEL, no inner norm", 12, 300, rate, 3, "trained") for rate in RATES]
    picture = drawn_of(ends, "three runs", "")
    assert picture.finding.startswith("Largest rate at which all seeds train: KEEL, no inner norm at least 0.016")
    (line,) = csv.DictReader(picture.extra["table.csv"].splitlines())
    assert line["arm"] == "KEEL, no inner norm"
    assert line["largest rate at which all seeds train"] == "0.016"


def test_one_seed_that_does_not_train_takes_a_rate_away() -> None:
    def at(rate: float, *verdicts: str) -> list[RateEnd]:
        return [RateEnd("KEEL", 12, 300, rate, seed, verdict) for seed, verdict in enumerate(verdicts)]

    assert largest_rate({1e-3: at(1e-3, "trained", "learning"), 4e-3: at(4e-3, "trained", "stuck")}) == 1e-3
    assert largest_rate({1e-3: at(1e-3, "cannot tell"), 4e-3: []}) is None


def test_names_lose_the_words_that_all_share() -> None:
    names = own_names(["keel gain=1 llama scaled", "deepnorm llama scaled", "keel gain=1 llama scaled inner=False"])
    assert [*names.values()] == ["KEEL gain=1", "DeepNorm", "KEEL gain=1 inner=False"]
    assert own_names(["keel llama"]) == {"keel llama": "KEEL llama"}


def test_an_encoder_decoder_and_a_single_rate_are_not_enough() -> None:
    both = [remembered(f"keel-{lr}", arch="keel", settings={"train": {"lr": lr}}) for lr in RATES]
    one = [ended("keel", 36, seed, 1e-3, "trained") for seed in (3, 4)]
    for records in (both, one, []):
        with pytest.raises(MissingRuns, match="no runs of decoders at several learning rates") as missing:
            drawn(records)
        assert missing.value.command == "stabilitylab sweep table:keel --scale tiny"


def test_the_sweep_has_the_ablation_up_to_36_layers() -> None:
    runs = list(SWEEPS["table:keel"](Recipe("tiny", {})))
    assert len({run.name for run in runs}) == len(runs) == 2 * 3 * 4 * 3 + 2 * 3 * 3
    models = {(run.config.model.decoder_layers, run.config.model.arch, str(run.config.model.options)) for run in runs}
    assert (36, "keel", "{'inner': False}") in models
    assert (200, "keel", "{'inner': False}") not in models
    assert {run.config.model.T for run in runs} == {12}
    assert {(run.config.train.steps, run.config.model.stack) for run in runs} == {(300, "decoder")}
    assert FIGURES["table:keel"] is KeelTable
