"""The small lines in the table of runs, against numbers that are known."""

from __future__ import annotations

import math
import re
from pathlib import Path

from making import make_run

from stabilitylab.reports.collection import Runs
from stabilitylab.reports.page.sparks import EDGE, HEIGHT, WIDTH, spark


def test_a_line_falls_from_the_upper_left_to_the_lower_right(tmp_path: Path) -> None:
    make_run(tmp_path, "a", metrics={"loss": [4.0, 3.0, 2.0]})
    found = spark(Runs.load(tmp_path)[0])
    assert found["path"] == f"M{EDGE}.0 {EDGE}.0L{WIDTH / 2:.1f} {HEIGHT / 2:.1f}L{WIDTH - EDGE}.0 {HEIGHT - EDGE}.0"
    assert (found["lost"], found["last"], found["told"]) == (None, "2", "Loss from 4 to 2")


def test_what_is_not_finite_is_a_mark_where_it_happened(tmp_path: Path) -> None:
    make_run(tmp_path, "a", metrics={"loss": [4.0, 2.0, math.nan, math.inf, 3.0]})
    found = spark(Runs.load(tmp_path)[0])
    assert found["lost"] == {"x": WIDTH / 2, "y": HEIGHT - EDGE, "step": 2}  # as high as the number before it
    assert re.findall("[ML]", found["path"]) == ["M", "L", "M"]  # no line leads over the gap
    assert found["told"].endswith("not finite from step 2 on")


def test_a_run_that_was_never_finite_and_one_without_a_loss(tmp_path: Path) -> None:
    make_run(tmp_path, "a", metrics={"loss": [math.nan, math.nan]})
    make_run(tmp_path, "b", metrics={"grad_norm_total": [1.0]})
    lost, none = map(spark, Runs.load(tmp_path))
    assert (lost["path"], lost["lost"]["step"]) == ("", 0)
    assert none == {}
