"""Two ranks and a watcher: training is not changed, collectives are counted, and what is not known is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_toys import ListSink

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher


def test_a_watched_run_equals_an_unwatched_one_and_needs_its_reshard_for_it(ranks: Any) -> None:
    for found in ranks("bitwise"):
        assert found["ddp", ""] == []
        assert found["fsdp", ""] == []
        assert found["fsdp", "no reshard"] != []


def test_one_collective_a_row_and_one_more_for_maxima(ranks: Any) -> None:
    for calls in ranks("collectives"):
        with_maxima = ["SUM", "MAX", "SUM", "SUM", "MAX", "SUM", "SUM", "MAX"]
        assert calls == [["SUM"] * 5, with_maxima] * 2
    for result in ranks("maxima"):
        assert result["calls"] == ["SUM", "MAX"] * 3  # the last is the reference row, which has maxima too


def test_metrics_are_averaged_and_read_after_the_optimizers_step(ranks: Any) -> None:
    results = ranks("reading")
    mean = sum(result["loss"] for result in results) / 2
    for rank, result in enumerate(results):
        assert result["early"].startswith("UsageError: row 0 is added up over ranks after the optimizer's step")
        first = result["first"]
        assert first["loss"] == pytest.approx(mean, rel=1e-12)
        assert (first["mine"], first["half"], first["none"], first["own"]) == (1.5, 4.0, None, 10.0 + rank)
    assert results[0]["unprobed"] == results[1]["unprobed"]
    assert results[0]["unprobed"].keys() == {"loss", "grad_norm_total"}


def test_a_rank_that_fails_waits_for_nobody(ranks: Any) -> None:
    assert ranks("failing") == ([[], [0]], [[], []])  # the row that was not added up is lost, the other kept


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            "tensor parallel over a part of the ranks",
            "over 1 of 2 ranks: the probes know DDP, FSDP2 .* and FSDP2 around",
        ),
        ("tensor parallel over two meshes", "parallelize_module was given several meshes"),
        ("tensor parallel and compiled", "leave torch.compile out"),
        ("tensor parallel beside fully_shard", "call fully_shard on the whole model too"),
        ("tensor parallel, said to be averaged", "parallel = 'ddp' does not fit a model of DTensors"),
        ("a part of the ranks", r"over 1 of 2 ranks: the probes know"),
        ("partial", r"laid out as \(Partial\(sum\),\)"),
        ("replicated in part", "some parameters are sharded over other ranks than others"),
        ("offloaded", "leave out offload_policy"),
        ("DDP of a part of the ranks", "spans only a part of the ranks"),
        ("replicated", r"laid out as \(Replicate\(\),\)"),
        ("half sharded", "is not sharded though others are"),
        ("half in DDP", "nothing here averages the gradient of 'layers.1.norm.weight' over them"),
        ("not averaged", "give parallel='ddp' if the loop averages"),
        ("summed", "leave out set_gradient_divide_factor"),
        ("FSDP1", "use fully_shard"),
        ("sharded, said to be off", "parallel = 'off' does not fit a model of DTensors"),
        ("different probes", "the ranks watch different models, sites or probes"),
    ],
)
def test_a_layout_that_would_be_read_wrongly_is_refused(ranks: Any, layout: str, message: str) -> None:
    for found in ranks("refusals"):
        with pytest.raises(AssertionError, match=f"^UsageError: .*{message}"):
            raise AssertionError(found[layout])


def test_the_caller_may_say_who_averages(ranks: Any) -> None:
    first, second = ranks("unwrapped")
    for found in (first, second):
        for parallel in ("ddp", "off"):
            recorded, expected = found[parallel]
            assert recorded == pytest.approx(expected, rel=1e-6)
    assert first["ddp"] == second["ddp"]
    assert first["off"] != second["off"]
    assert (first["ddp rows"], second["ddp rows"], first["off rows"], second["off rows"]) == (1, 0, 1, 1)


def test_rank_0_alone_makes_the_run_directory(ranks: Any) -> None:
    first, second = ranks("directory")
    assert first == second
    assert "exists already" in first["again"]
    assert "attention_entrop" in first["nameless"]
    assert "rank-0.json (No such file or directory)" in first["fileless"]
    assert first["left"] == ["run"]
    assert (first["rank"], first["status"], first["steps"]) == (0, "finished", [0, 1, 2])


def test_an_unknown_way_to_share_a_model_is_refused() -> None:
    known = "use 'auto', 'later', 'ddp', 'off' or a pipeline's schedule"
    with pytest.raises(UsageError, match=f"parallel = 'tp' is unknown: {known}"):
        Watcher(torch.nn.Linear(2, 2), ListSink(), parallel="tp")  # type: ignore[arg-type]
