"""Keeps of the runs of curvature:edge what its claims are judged on: python results/curvature/keep.py RUNS

Writes rows.csv (a line a row of a table that was measured) and claims.json (the three claims) beside itself.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from stabilitylab.reports import CLAIMS, Runs, judge

HERE = Path(__file__).parent
COLUMNS = {
    "preconditioned_sharpness": ("value", "to_edge", "along_gradient", "residual", "products"),
    "sharpness": ("value", "residual"),
    "critical_sharpness": ("headroom", "critical_rate", "low", "high", "least", "most", "forwards"),
}


def main(folder: str) -> None:
    runs = Runs.load(folder).where(lambda run: run.ended)
    with (HERE / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "seed", "table", "step", "column", "value"))
        for run in sorted(runs, key=lambda run: run.name):
            for table, columns in COLUMNS.items():
                frame = run.frame(table, list(columns)) if table in run.tables else ()
                for _, line in frame.iterrows() if len(frame) else ():
                    for column in columns:
                        if line[column] == line[column]:
                            name = run.name.rpartition("/")[2]
                            writer.writerow((name, run.seed, table, int(line["step"]), column, f"{line[column]:.6g}"))
    found = [judge(CLAIMS[id], runs).as_dict() for id in ("C56", "C57", "C58")]
    (HERE / "claims.json").write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
