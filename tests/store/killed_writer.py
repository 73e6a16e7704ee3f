"""Started by test_store_kill.py: a process that writes runs until it is killed.

The server imports once and forks a real process for each line ``run-path acknowledgements-path part step`` on its
standard input (part 0: a new run), prints its number, and prints "dead" when it has ended.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pandas  # noqa: F401  (before the forks, not in each of them)
from store_cases import TABLES, new_run, put

from stabilitylab.store import RunWriter


def write_until_killed(path: Path, acknowledgements: Path, part: int, step: int) -> None:
    acknowledge = os.open(acknowledgements, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance = random.Random(os.getpid())
    if part:
        writer = RunWriter.resume(path, part)
        writer.open(TABLES)
    else:
        writer = new_run(path)
    writer.journal_limit = 20_000
    for done in range(step, step + 20_000):  # not for ever: the test may be gone before it kills
        put(writer, done)
        os.write(acknowledge, f"step {done}\n".encode())
        if chance.random() < 0.1:
            os.write(acknowledge, f"checkpoint {writer.seal()} {done + 1}\n".encode())


def serve() -> None:
    for line in sys.stdin:
        path, acknowledgements, part, step = line.split()
        child = os.fork()
        if not child:
            write_until_killed(Path(path), Path(acknowledgements), int(part), int(step))
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    serve()
