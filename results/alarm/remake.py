#!/usr/bin/env python
"""Makes every table, figure and page of the corpus anew, from the committed features.

python results/alarm/remake.py      # minutes; then git diff shows what changed
"""

from __future__ import annotations

import sys

import claims
import consequence
import diagnosed
import draw
import own_runs
import publish
import say
import score
from corpus import HERE, read

sys.path.insert(1, str(HERE / "second"))

import second_corpus
import second_score


def main() -> None:
    """Also the tables of the second corpus, once its test half was looked at."""
    train, test = read("train"), read("test")
    score.tables(train, test)
    diagnosed.main(("train", "test"))
    consequence.main()
    claims.main()
    draw.main(test=test)
    publish.main(test)
    own_runs.main()
    say.page_blocks.differing(say.PAGES, say.anew, write=True)
    if (second_corpus.HERE / "verdict.csv").exists():
        second_score.tables()


if __name__ == "__main__":
    main()
