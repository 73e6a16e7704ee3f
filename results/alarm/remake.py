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
import say
import score
from corpus import HERE, read

sys.path.insert(1, str(HERE / "second"))
sys.path.append(str(HERE.parent))

import page_blocks
import second_corpus
import second_draw
import second_publish
import second_say
import second_score


def main() -> None:
    """Also the tables of the second corpus, once its test half was looked at."""
    train, test = read("train"), read("test")
    score.tables(train, test)
    diagnosed.main(("train", "test"))
    consequence.main()
    claims.main()
    draw.main(test=test)
    page_blocks.differing(say.PAGES, say.anew, write=True)
    if (second_corpus.HERE / "verdict.csv").exists():
        second_score.tables()
        second_publish.main()
        second_draw.main()
        page_blocks.differing(second_say.PAGES, second_say.anew, write=True)


if __name__ == "__main__":
    main()
