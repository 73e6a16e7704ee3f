"""The evidence of one GPU, in parts that stop in time: each call goes on where the last one stopped.

    python results/h200/make.py --data PATH/multi30k --out DIR

Parts, in this order: ``tests`` (pytest -m gpu), ``benchmarks``, ``figure5`` (DeepNet), ``figure3`` and ``figures89``
(BranchNorm), ``report``. A call ends before ``--minutes`` are over: runs are asked to write a checkpoint and stop. Call
it again, with the same DIR, until it says that all is complete (exit code 0; 1 where something is left or failed). On
another machine DIR needs no more than the files kept-*.tar.gz. README.md beside this file says what is measured, and
which hypotheses were fixed beforehand. ``--smoke`` tries all of it on a CPU, as small as can be, and measures nothing.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
try:
    import collect
    from parts import MAKING, Part, Progress, due
    from place import RESERVE, Clock, Log, Place, State, check_device, settle

    from stabilitylab.errors import StabilityLabError, UsageError
except ModuleNotFoundError as error:
    print(f"make.py: the package {error.name} is missing: pip install -e . in the project's folder.", file=sys.stderr)
    sys.exit(5)

PARTS = (*MAKING, "report")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of Multi30k: train, val, test_2016_flickr as .de and .en")
    parser.add_argument("--out", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--total", type=float, default=27.0, help="minutes of all calls, for the length of figures89")
    parser.add_argument("--smoke", action="store_true", help="a trial on a CPU with made-up text")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    clock = Clock(60 * asked.minutes)
    if asked.minutes <= 0 or asked.total <= 0:
        raise UsageError("--minutes and --total are numbers of minutes above 0.")
    if asked.data is None and not asked.smoke and asked.part != "report":
        raise UsageError("name the corpus with --data PATH/multi30k, or give --smoke.")
    settle(asked.out, None if asked.smoke else asked.data)
    found = collect.unpack()
    state, log = State.read(Path("state.json")), Log(Path("log.txt"))
    place = Place(Path.cwd(), log, state, 60 * asked.total, asked.smoke)
    facts = {} if asked.part == "report" else check_device(asked.smoke)
    call = {"began": time.strftime("%Y-%m-%d %H:%M:%S"), "part": asked.part, "minutes": asked.minutes, **facts}
    log.line(f"call {len(state.calls) + 1}: {', '.join(f'{key} {value}' for key, value in call.items())}")
    if found:
        log.line(f"goes on from {found} archive{'s' if found > 1 else ''}")
    try:
        if asked.part == "all":
            for name, seconds in due(place):
                if clock.left() <= 1.5 * RESERVE and not asked.smoke:
                    break
                one(place, name, MAKING[name][0], clock.within(min(seconds, clock.left() - reserve(clock))))
            one(place, "report", collect.report, clock.within(0.8 * clock.left()))
        else:
            own = collect.report if asked.part == "report" else MAKING[asked.part][0]
            one(place, asked.part, own, clock.within(clock.left() - reserve(clock) / 3))
    finally:
        state.calls.append({**call, "seconds": round(clock.passed(), 1)})
        state.save()
        pieces = collect.keep()
        size = sum(piece.stat().st_size for piece in pieces) / 2**20
        log.line(f"{clock.passed():.0f} s in this call; {len(pieces)} archives kept-*.tar.gz, {size:.1f} MiB")
    return verdict(place, PARTS if asked.part == "all" else (asked.part,))


def reserve(clock: Clock) -> float:
    """Seconds for the tables and the archive: less in a call of a minute or two."""
    return min(RESERVE, 0.25 * max(clock.left(), 0.0))


def one(place: Place, name: str, part: Part, clock: Clock) -> None:
    """Carries out a part, and notes how it stands and what it took."""
    place.log.line(f"part {name}, {clock.left():.0f} s at most")
    before, began = place.state.seconds(name), time.monotonic()
    progress = Progress("partial", "stopped from outside")
    try:
        progress = part(place, clock)
    except StabilityLabError as error:
        progress = Progress("failed", str(error))
    finally:
        seconds = round(before + time.monotonic() - began, 1)
        place.state.parts[name] = {**vars(progress), "seconds": seconds}
        place.state.save()
        place.log.line(f"part {name}: {progress.state}; {progress.sentence}")


def verdict(place: Place, names: tuple[str, ...]) -> int:
    """Says what is left; the exit code."""
    left = [name for name in names if place.state.stands(name) != "complete"]
    if not left:
        place.log.line("all is complete" if names == PARTS else f"{names[0]} is complete")
        return 0
    again = [name for name in left if place.state.stands(name) in ("new", "partial")]
    failed = [name for name in left if name not in again]
    said = [f"the same command goes on with {', '.join(again)}"] if again else []
    said += [f"failed: {', '.join(failed)} (log.txt says why; --part NAME tries again)"] if failed else []
    place.log.line("; ".join(said))
    return 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process is left behind
    try:
        sys.exit(main())
    except StabilityLabError as error:
        print(f"make.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("make.py: stopped by Ctrl-C; the same command goes on.", file=sys.stderr)
        sys.exit(130)
