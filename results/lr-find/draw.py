#!/usr/bin/env python
"""Draws ``figures/regret.png``: the regret of lr-find and of its rivals, a row a model.

python results/lr-find/draw.py [--folder results/lr-find]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from make import HERE
from score import OWN, RIVALS, Scores

from stabilitylab.reports import DIVERGED, Map, Panel, Picture
from stabilitylab.reports.paper import write

WORST = 1.0  # nats: a larger regret has the colour of this one


def picture(scores: Scores) -> Picture:
    """A table of regrets [nats]; rates at which a seed fails are marked. Raises ValueError without a truth."""
    if not scores.regrets:
        raise ValueError("no truth is made yet: run make.py")
    models, columns = [*scores.regrets], [OWN, *RIVALS]
    names = [column.replace(", ", ",\n") for column in columns]
    z = np.array([[own.get(who, math.nan) for who in columns] for own in scores.regrets.values()])
    finding = np.where(np.isinf(z), DIVERGED, 0)
    text = np.array([[_text(regret) for regret in row] for row in z], object)
    shown = np.where(np.isfinite(z), np.clip(z, 0.0, WORST), np.nan)
    drawn = Map(
        [*range(len(columns))], [*range(len(models))], shown, finding, "regret [nats]", log=False, x_names=names,
        y_names=models, text=text, colours=(0.0, WORST),
    )  # fmt: skip
    own = [one[OWN] for one in scores.regrets.values()]
    median = float(np.median(own))
    told = "fails" if math.isinf(median) else f"{median:.3f} nats"
    sentence = f"The median regret of {OWN} over {len(models)} models is {told}, its largest {max(own):.3f}."
    return Picture([Panel("", "", "", map=drawn)], sentence, columns=1, provenance=f"{len(models)} models, three seeds")


def _text(regret: float) -> str:
    return "" if math.isnan(regret) else "fails" if math.isinf(regret) else f"{regret:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    given = parser.parse_args(arguments)
    write(picture(Scores(given.folder)), given.folder / "figures", "regret", "Regret of recommended rates")
    return 0


if __name__ == "__main__":
    main()
