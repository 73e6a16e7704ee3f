#!/usr/bin/env python
"""Makes every table, figure and page of the corpus anew, from the committed features.

python results/alarm/remake.py      # minutes; then git diff shows what changed
"""

from __future__ import annotations

import claims
import consequence
import diagnosed
import draw
import own_runs
import publish
import say
import score
from corpus import read


def main() -> None:
    train, test = read("train"), read("test")
    score.tables(train, test)
    diagnosed.main(("train", "test"))
    consequence.main()
    claims.main()
    draw.main(test=test)
    publish.main(test)
    own_runs.main()
    say.page_blocks.differing(say.PAGES, say.anew, write=True)


if __name__ == "__main__":
    main()
