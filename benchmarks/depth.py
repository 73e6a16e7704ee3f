"""Step time and memory against depth: each depth in its own process, one thread, so that peak memory is its own.

    python benchmarks/depth.py --depths 12,48,200,500,1000 --steps 8

Prints, per depth: CPU seconds of a bare update (median), the same over depth 12's, per layer, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def child(depth: int, steps: int, arch: str) -> None:
    from stabilitylab.config import parse_set, resolve
    from stabilitylab.store import RunWriter
    from stabilitylab.train import plan
    from stabilitylab.train.loop import Trainer

    prepared = plan(resolve(parse_set([f"model.arch={arch}", "probes.names=['none']"]), depth=depth))
    with tempfile.TemporaryDirectory() as folder:
        run = RunWriter.create(Path(folder) / "run", {"config": {}})
        trainer = Trainer(prepared.config, prepared.dataset, run, prepared.device)
        seconds = []
        for _ in range(steps):
            began = time.process_time()
            trainer.update()
            trainer.row += 1
            seconds.append(time.process_time() - began)
        trainer.watcher.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"depth": depth, "seconds": statistics.median(seconds[1:]), "peak_bytes": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="12,48,200,500,1000")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--arch", default="branchnorm")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.steps, arguments.arch)
        return
    print(f"{'depth':>6} {'CPU s/update':>13} {'ms/layer':>9} {'x depth':>8} {'peak MiB':>9}")
    for depth in (int(text) for text in arguments.depths.split(",")):
        command = [sys.executable, __file__, "--child", str(depth), "--steps", str(arguments.steps)]
        output = subprocess.run([*command, "--arch", arguments.arch], check=True, capture_output=True, text=True).stdout
        row = json.loads(output.splitlines()[-1])
        if depth == int(arguments.depths.split(",")[0]):
            first = row
        growth = row["seconds"] / first["seconds"] / (depth / first["depth"])
        per_layer = 1e3 * row["seconds"] / depth
        print(f"{depth:>6} {row['seconds']:>13.3f} {per_layer:>9.2f} {growth:>8.2f} {row['peak_bytes'] / 2**20:>9.0f}")


if __name__ == "__main__":
    main()
