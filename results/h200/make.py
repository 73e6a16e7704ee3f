"""The evidence of one GPU, in parts that stop in time: each call goes on where the last one stopped.

    python results/h200/make.py prepare                                        # where there is a package index, once
    python results/h200/make.py --data PATH/multi30k --out DIR --work FOLDER   # on the GPU, until all is complete

``prepare`` downloads the wheels that a bare machine lacks into results/h200/carried/wheels, which git ignores and the
script itself puts on the path. Occasion 1: ``checks``, ``benchmarks``, ``figure5`` (DeepNet); 2: ``figures89``
(BranchNorm, 18L-18L); 3: ``figure3`` (BranchNorm, 50L-50L); 4 to 6: ``rungs``, ``judged`` and ``rest``, Protocol 3 of
results/tiny at 18 layers a side; 7: ``studies``, those of language models; each with ``report``. A call ends before
``--minutes`` are over: runs are asked to write a checkpoint and stop. Whatever was finished is in DIR by then, at most
eight files, also where the call is cut. Call it again until it says that all is complete (exit code 0; 1 where
something is left or failed; what failed is tried again). On another machine put the files kept-*.tar.gz and
cache.tar.gz into results/h200/carried/kept. ``--smoke`` tries all of it on a CPU, as small as can be, and measures
nothing.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path

import bare

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
OCCASIONS = {
    "1": ("checks", "benchmarks", "figure5"),
    "2": ("figures89",),
    "3": ("figure3",),
    "4": ("rungs",),
    "5": ("judged",),
    "6": ("rest",),
    "7": ("studies",),
}
PARTS = (*(part for parts in OCCASIONS.values() for part in parts), "report")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="measure", choices=("measure", "prepare"))
    parser.add_argument("--data", type=Path, help="folder of Multi30k: train, val, test_2016_flickr as .de and .en")
    parser.add_argument("--out", type=Path, help="folder of what comes back: archives, log, table")
    parser.add_argument("--work", type=Path, help="folder of everything else; OUT-work unless given")
    parser.add_argument("--carried", type=Path, default=bare.CARRIED, help="folder of wheels/, and of kept/")
    parser.add_argument("--occasion", default="all", choices=("all", *OCCASIONS))
    parser.add_argument("--part", choices=PARTS, help="this one alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--total", type=float, default=18.0, help="minutes of occasion 2, for the length of its runs")
    parser.add_argument("--smoke", action="store_true", help="a trial on a CPU with made-up text")
    asked = parser.parse_args()
    if asked.what == "measure" and asked.out is None:
        parser.error("the following arguments are required: --out")
    return asked


def main(asked: argparse.Namespace, carried: list[str]) -> int:
    import collect
    from parts import MAKING, due
    from place import RESERVE, Clock, Log, Place, State, check_device, settle

    from stabilitylab.errors import UsageError

    clock = Clock(60 * asked.minutes)
    if asked.minutes <= 0 or asked.total <= 0:
        raise UsageError("--minutes and --total are numbers of minutes above 0.")
    if asked.data is None and not asked.smoke and asked.part != "report":
        raise UsageError("name the corpus with --data PATH/multi30k, or give --smoke.")
    out, kept = asked.out.resolve(), asked.carried.resolve() / "kept"
    settle(work_of(asked), out, None if asked.smoke else asked.data)
    found = collect.unpack(kept, out)
    state, log = State.read(Path("state.json")), Log(Path("log.txt"))
    archives = collect.Archives(out, state)
    place = Place(Path.cwd(), log, state, 60 * asked.total, asked.smoke, keep=archives.keep)
    facts = {} if asked.part == "report" else check_device(asked.smoke)
    what = asked.part or f"occasion {asked.occasion}"
    call = {"began": time.strftime("%Y-%m-%d %H:%M:%S"), "part": what, "minutes": asked.minutes, **facts}
    log.line(f"call {len(state.calls) + 1}: {', '.join(f'{key} {value}' for key, value in call.items())}")
    if found:
        log.line(f"goes on from {found} archive{'s' if found > 1 else ''}")
    for sentence in ([f"carried: {', '.join(carried)}"] if carried else []) + bare.left_out():
        log.line(sentence)
    wanted = (asked.part,) if asked.part else OCCASIONS.get(asked.occasion, PARTS)
    try:
        for name, seconds in due(place, [part for part in wanted if part in MAKING]):
            left = clock.left() - min(RESERVE, 0.25 * max(clock.left(), 0.0))
            if clock.left() <= 1.5 * RESERVE and not asked.smoke and not asked.part:
                break
            one(place, name, MAKING[name], clock.within(min(seconds, left)))
        if not asked.part or asked.part == "report":
            one(place, "report", collect.report, clock.within(0.8 * clock.left()))
    finally:
        state.calls.append({**call, "seconds": round(clock.passed(), 1)})
        state.save()
        pieces = archives.keep()
        size = sum(piece.stat().st_size for piece in pieces) / 2**20
        log.line(f"{clock.passed():.0f} s in this call; {len(pieces)} files in {out.name}, {size:.1f} MiB")
        archives.texts()
    return verdict(place, wanted if asked.part else (*(part for part in wanted if part != "report"), "report"))


def work_of(asked: argparse.Namespace) -> Path:
    return (asked.work or asked.out.with_name(f"{asked.out.name}-work")).resolve()


def one(place, name: str, part, clock) -> None:
    """Carries out a part, and notes how it stands and what it took; then what there is goes into the archives."""
    from parts import Progress

    from stabilitylab.errors import StabilityLabError

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
        place.keep()


def verdict(place, names: tuple[str, ...]) -> int:
    """Says what is left; the exit code."""
    left = [name for name in names if place.state.stands(name) != "complete"]
    if not left:
        place.log.line("all is complete" if len(names) > 1 else f"{names[0]} is complete")
        return 0
    failed = [name for name in left if place.state.stands(name) == "failed"]
    why = f"; failed: {', '.join(failed)} (log.txt says why)" if failed else ""
    place.log.line(f"the same command goes on with {', '.join(left)}{why}")
    return 1


def start() -> int:
    """What comes before the project can be imported: arguments, and packages that a bare machine lacks."""
    asked = arguments()
    if asked.what == "prepare":
        return bare.download(asked.carried / "wheels")
    carried = bare.provide(work_of(asked) / "site", asked.carried / "wheels")
    if missing := bare.lacking():
        print(
            f"make.py: {missing[0]} is missing: pip install -e . in the project's folder; or, for a machine without a "
            "package index, make.py prepare where there is one, and carry results/h200/carried along.",
            file=sys.stderr,
        )
        return 5
    from stabilitylab.errors import StabilityLabError

    try:
        return main(asked, carried)
    except StabilityLabError as error:
        print(f"make.py: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process is left behind
    try:
        sys.exit(start())
    except KeyboardInterrupt:
        print("make.py: stopped by Ctrl-C; the same command goes on.", file=sys.stderr)
        sys.exit(130)
