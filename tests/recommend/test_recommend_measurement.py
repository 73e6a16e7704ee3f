"""Files of measurements, what is asked for, what it takes, and the command around them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from recommend_cases import config_of

from stabilitylab.config import parse_set
from stabilitylab.errors import InputError, ResourceError, UsageError
from stabilitylab.models import ARCHS
from stabilitylab.recommend import Ask, Estimate, measure_all, planning, wanted
from stabilitylab.recommend.measurement import file_name, measure, read

TINY = [
    *("--set", "model.d_ffn=24", "--set", "model.heads=2", "--set", "data.sentences=4", "--set", "data.max_length=9"),
    *("--set", "data.vocab_size=200", "--set", "data.held_out=4", "--set", "train.device=cpu"),
]


def test_a_file_holds_what_was_measured_and_a_second_run_makes_nothing_anew(tmp_path: Path) -> None:
    todo = [config_of("rezero"), config_of("preln")]
    kept = measure(todo[0], tmp_path, file_name(todo[0]))
    stamp = kept.stat().st_mtime_ns
    told: list[str] = []
    found, failed = measure_all(todo, tmp_path, 1, told.append)
    assert failed == {}
    assert sorted(told) == sorted(map(file_name, todo))
    assert kept.stat().st_mtime_ns == stamp
    assert [(one.arch, one.seed) for one in found] == [("rezero", 3), ("preln", 3)]
    assert found[0].numbers["gradient"] == 0  # x + 0 F: every layer sees the same gradient
    assert [one.broken for one in found] == [{}, {}]
    assert all(math.isfinite(value) for one in found for value in one.numbers.values())
    again = measure(todo[1], tmp_path / "again", "x")
    twice = {k: v for k, v in read(again).numbers.items() if k != "seconds"}
    assert twice == {k: v for k, v in found[1].numbers.items() if k != "seconds"}


def test_other_settings_are_another_file_but_those_that_change_no_number_are_not() -> None:
    name = file_name(config_of("preln"))
    assert name.startswith("preln-5-s3-")
    for key, value in (("lr", 2e-3), ("seed", 4), ("warmup", 0)):
        assert file_name(config_of("preln", train={key: value})) != name
    for key, value in (("steps", 1000), ("final_checkpoint", False)):
        assert file_name(config_of("preln", train={key: value})) == name
    linear = [file_name(config_of("preln", train={"schedule": "linear", "steps": steps})) for steps in (100, 200)]
    assert linear[0] != linear[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"arch": "preln"}', '{"numbers": 3}', "[" * 100_000])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json holds no measurement that can be read: remove it"):
        read(tmp_path / "x.json")


def test_all_architectures_are_asked_for_with_their_recipes_seeds_and_shape() -> None:
    configs, notes = wanted(Ask(36, 512, (), (0, 1), {"train": {"lr": 1e-3}}))
    assert [c.model.arch for c in configs] == [arch for arch in ARCHS for _ in range(2)]
    assert notes == []
    assert {(c.model.d_model, c.model.d_ffn, c.model.heads, c.train.lr) for c in configs} == {(512, 2048, 8, 1e-3)}
    assert all(c.train.seed == c.data.seed for c in configs)
    assert {c.train.warmup for c in configs if c.model.arch == "tfixup"} == {0}
    assert {(c.model.encoder_layers, c.model.decoder_layers) for c in configs} == {(18, 18)}
    single, notes = wanted(Ask(12, given=parse_set(["model.stack=decoder"])))
    assert len(single) == len(ARCHS) - 1
    assert notes == ["tfixup is not defined for a single decoder, and is left out."]
    assert [c.model.arch for c in wanted(Ask(12, archs=["Post-LN", "postln"]))[0]] == ["postln"]


@pytest.mark.parametrize(
    ("width", "shape"), [(64, (128, 2)), (256, (1024, 4)), (512, (2048, 8)), (384, (1536, 6)), (100, (400, 1))]
)
def test_a_width_brings_its_blocks_and_heads(width: int, shape: tuple[int, int]) -> None:
    sizes = planning.shape(width)
    assert (sizes["d_model"], sizes["d_ffn"], sizes["heads"]) == (width, *shape)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Ask(12, archs=["nonesuch"]), "unknown architecture 'nonesuch'; choose one of"),
        (Ask(13), "--depth 13 is odd"),
        (Ask(0), "--depth 0 is out of range"),
        (
            Ask(12, archs=["tfixup"], given={"model": {"stack": "encoder"}}),
            "is not defined for --stack encoder",
        ),
        (Ask(12, given={"model": {"arch": "preln"}}), "name them with --archs"),
        (Ask(12, 63), "must be even"),
    ],
)
def test_what_cannot_be_asked_for_is_one_sentence(ask: Ask, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wanted(ask)


def test_what_does_not_fit_is_refused_and_fewer_jobs_are_advised() -> None:
    planning.check(Estimate(10, 2**20, 1.0, 1), 1, torch.device("cpu"))
    with pytest.raises(ResourceError, match=r"about 1048576\.0 GiB \(10 parameters, 1 .*: give a smaller --depth"):
        planning.check(Estimate(10, 2**50, 1.0, 1), 1, torch.device("cpu"))
    with pytest.raises(ResourceError, match=r"give a smaller --jobs, a smaller --depth"):
        planning.check(Estimate(10, 2**49, 1.0, 1), 2, torch.device("cpu"))


def test_time_is_extended_from_one_and_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("preln", model={"encoder_layers": 5, "decoder_layers": 9})
    monkeypatch.setattr(planning, "_fastest", lambda config, layers, n, *rest: 0.5 + 0.25 * n)
    assert planning.update_seconds(config, None, torch.device("cpu")) == 0.5 + 0.25 * 9  # type: ignore[arg-type]
    assert "about 1 minute with 1 at a time" in Estimate(5, 2**30, 20.0, 3).sentence(1)
    assert "about 2.0 hours with 2 at a time, 1.0 GiB" in Estimate(5, 2**30, 4 * 3600.0, 3).sentence(2)


def test_the_command_says_what_it_takes_ranks_and_gives_json(run) -> None:
    arguments = ["recommend", "--depth", "4", "--d-model", "16", "--archs", "preln,rezero", "--out", "m", *TINY]
    code, out, err = run(*arguments, "--dry-run")
    assert (code, out) == (0, "")
    assert "2 measurements of" in err
    assert not Path("m").exists()
    for config in wanted(Ask(4, 16, ("preln", "rezero"), given=parse_set(TINY[1::2])))[0]:
        measure(config, Path("m"), file_name(config))
    code, out, err = run(*arguments)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["architecture", "mean", "rank"]
    assert lines[1].split()[:2] == ["1", "preln"]
    assert lines[2].split()[:2] == ["2!", "rezero"]  # its encoder has no gradient before a factor has grown
    assert "What this cannot say: where training would end." in out
    assert "rezero: above eps" in out
    assert err.splitlines()[-1].startswith("2/2 ")
    assert "measurements of" not in err  # nothing was left to measure
    code, out, err = run(*arguments, "--json", "-q")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [place["arch"] for place in document["ranking"]] == ["preln", "rezero"]
    assert document["check"] is None
    assert len(document["measurements"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--archs", ","], 2, "--archs names no architecture"),
        (["--seeds", "x"], 2, "give them as 3..7 or 3,4,5"),
        (["--depth", "7"], 2, "--depth 7 is odd"),
        (["--check", "nowhere"], 4, "no folder nowhere"),
        (["--data", "text:a,b"], 4, "a"),
        (["--depth", "20000", "--d-model", "4096", "--archs", "preln"], 5, "GiB are free on"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments: list[str], code: int, said: str) -> None:
    ended, out, err = run("recommend", "-q", *arguments)
    assert (ended, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_ctrl_c_keeps_what_was_measured(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from stabilitylab.onestep import workers

    arguments = ["recommend", "-q", "--depth", "4", "--d-model", "16", "--archs", "preln,rezero", "--out", "m", *TINY]
    take = workers.Worker.take

    def once(worker: workers.Worker) -> tuple[str, str]:
        take(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.Worker, "take", once)
    code, out, err = run(*arguments)
    assert (code, out) == (130, "")
    assert "what was recorded is kept" in err
    assert len(list(Path("m").glob("*.json"))) == 1
