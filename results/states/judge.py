#!/usr/bin/env python
"""Holds the states against what became of the runs: the confusion matrix, with intervals and a rival rule.

    python results/states/judge.py [--write]

Reads ``runs.csv`` and ``course.csv``; prints ``confusion.md``, or writes it and ``states.csv``, a line a run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from cells import CHOICE, LATER, TEST, UPDATES

from stabilitylab.reports.statistics import share_interval
from stabilitylab.verdict import LEVEL_NATS, STATES, Baseline, Evaluation, Verdict, judge

HERE = Path(__file__).parent
CAUSES = ("depth", "rate", "initialisation", "ramp", "none")


def state(run: pd.Series, course: pd.DataFrame) -> Verdict:
    """The state after 160 updates, by what was known then."""
    own = course[course["step"] <= UPDATES]
    evaluations = [Evaluation(int(r.step), float(r.nll), float(r.accuracy)) for r in own.itertuples()]
    last = Evaluation(UPDATES, run["nll_160"], run["accuracy_160"])
    zero = Baseline(run["validation_unigram"], run["unigram_accuracy"])
    return judge(evaluations, Baseline(run["unigram"]), steps=UPDATES, validation=(last, zero, int(run["sentences"])))


def judged(folder: Path) -> pd.DataFrame:
    """A line a run: its state after 160 updates, and whether it was stuck after 1600."""
    runs, course = pd.read_csv(folder / "runs.csv"), pd.read_csv(folder / "course.csv")
    lines = []
    for _, run in runs.iterrows():
        own = course[(course["cell"] == run["cell"]) & (course["seed"] == run["seed"])]
        found = state(run, own.sort_values("step"))
        later = run["nll_1600"] - run["validation_unigram"]
        moving = found.trend
        assert moving is not None
        lines.append(
            {
                **{key: run[key] for key in ("cell", "seed", "cause", "arch", "layers")},
                "state": found.state,
                "gap": found.nll_gap,
                "fall": moving.fall,
                "low": moving.low,
                "high": moving.high,
                "gap_later": later,
                "stuck_later": not later < -LEVEL_NATS,  # a loss that is no number is no better
            }
        )
    return pd.DataFrame(lines).sort_values(["cell", "seed"], ignore_index=True)


def share(count: int, n: int) -> str:
    if not n:
        return "-"
    low, high = share_interval(count, n)
    return f"{count} of {n}: {count / n:.2f} [{low:.2f}, {high:.2f}]"


def matrix(table: pd.DataFrame) -> list[str]:
    """State after 160 updates against what was found after 1600."""
    lines = [f"| after {UPDATES} updates | runs | stuck after {LATER} | share [95 %] |", "|---|---|---|---|"]
    for name in STATES:
        own = table[table["state"] == name]
        if len(own):
            count = int(own["stuck_later"].sum())
            lines.append(f"| {name} | {len(own)} | {count} | {share(count, len(own)).split(': ')[1]} |")
    return lines


def errors(table: pd.DataFrame, called: pd.Series) -> list[str]:
    """How often a rule is wrong that calls these runs stuck: of those called, and of those that were."""
    truth = table["stuck_later"]
    cells = table[called].groupby("cell")["stuck_later"]
    return [
        share(int((called & ~truth).sum()), int(called.sum())),
        share(int((truth & ~called).sum()), int(truth.sum())),
        f"{int(cells.all().sum())} of {cells.ngroups}",
    ]


def document(table: pd.DataFrame) -> str:
    test, choice = (table[table["seed"].isin(seeds)].reset_index(drop=True) for seeds in (TEST, CHOICE))
    stuck = test[test["state"] == "stuck"]
    named = {name: ", ".join(sorted(set(stuck[name]))) for name in ("arch", "cause")}
    rules = {
        "`stuck` by the rule": test["state"] == "stuck",
        "Post-LN means stuck": test["arch"] == "postln",
        "Post-LN of 36 layers means stuck": (test["arch"] == "postln") & (test["layers"] == 36),
        "at or above the baseline means stuck": test["gap"] >= -LEVEL_NATS,
    }
    rows = [f"| {name} | {' | '.join(errors(test, called))} |" for name, called in rules.items()]
    by_cause = [
        f"| {cause} | {len(own)} | {share(int((~own['stuck_later']).sum()), len(own))} |"
        for cause in CAUSES
        if len(own := stuck[stuck["cause"] == cause])
    ]
    return "\n".join(
        [
            "<!-- written by judge.py -->",
            f"Seeds {', '.join(map(str, TEST))}, which made no constant: {len(test)} runs of {test['cell'].nunique()} "
            f"configurations; called stuck are runs of {named['arch']}, for reasons of {named['cause']}.",
            "",
            *matrix(test),
            "",
            "| rule | called stuck and was not | was stuck and not called | configurations of which all called were |",
            "|---|---|---|---|",
            *rows,
            "",
            "| cause | called stuck | and was not |",
            "|---|---|---|",
            *by_cause,
            "",
            f"Seeds {', '.join(map(str, sorted(set(choice['seed']))))}, on which the constants were looked at: "
            f"{len(choice)} runs.",
            "",
            *matrix(choice),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write confusion.md and states.csv")
    parser.add_argument("--folder", type=Path, default=HERE)
    given = parser.parse_args()
    table = judged(given.folder)
    text = document(table)
    print(text)
    if given.write:
        (given.folder / "confusion.md").write_text(text)
        table.to_csv(given.folder / "states.csv", index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
