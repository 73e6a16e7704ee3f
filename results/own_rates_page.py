"""Tables and the figure of a comparison at own rates, for its page: from committed tables alone, without any text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import page_blocks
from own_rates import FAILED, Answer, End, Ends, Study, chosen, difference, end_of_line
from page_blocks import table
from shared import rows_of

from stabilitylab.labels import label
from stabilitylab.reports.statistics import Interval, t_interval

mpl.use("agg")
import matplotlib.pyplot as plt

Titles = Mapping[str, tuple[str, str]]  # arm -> its name and colour


@dataclass(frozen=True)
class StudyPage:
    """The pages of a study: README.md in its folder ``out``, and docs/decoders.md, whose blocks have its ``mark``.
    ``beside``: the arm from which the losses of the others are taken off."""

    study: Study
    out: Path
    titles: Titles
    beside: str
    mark: str
    questions: Callable[[Ends], list[str]]
    more: page_blocks.Blocks

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.out / "README.md", self.out.parents[1] / "docs" / "decoders.md"

    def renewed(self, text: str) -> str:
        """A page with its blocks made anew."""
        ends = ends_on_page(self.study, self.out)
        blocks = {
            "rates": lambda: rates(self.study, self.out, self.titles),
            "losses": lambda: losses(self.study, ends, self.beside, self.titles),
            "answers": lambda: self.questions(ends),
            "order": lambda: order(self.study, self.out, ends, self.titles),
            **self.more,
        }
        return page_blocks.renewed(page_blocks.renewed(text, blocks), blocks, self.mark)

    def main(self, doc: str | None) -> int:
        """Draw ``figures/trained.png``, and compare the pages with the ledgers, or write them with ``--write``."""
        if ends := whole(self.study, ends_on_page(self.study, self.out)):
            draw(self.study, ends, self.titles, self.out / "figures" / "trained.png")
        return page_blocks.main(doc, self.paths, self.renewed)


def ends_on_page(study: Study, out: Path) -> dict[tuple[str, int], dict[int, End]]:
    """Return the ends of the judged runs: (arm, layers) -> seed -> end."""
    found: dict[tuple[str, int], dict[int, End]] = {}
    lines = rows_of(out / "ledger.csv")
    if len({line["data"] for line in lines}) > 1:
        raise SystemExit(f"{out / 'ledger.csv'} has runs of several texts.")
    for (arm, layers), rate in chosen(out).items():
        for own, seed, line in runs_of(lines, study, arm, layers, study.updates):
            if own == rate and seed in study.seeds:
                found.setdefault((arm, layers), {})[seed] = end_of_line(line)
    return found


def whole(study: Study, ends: Ends) -> Ends:
    """Return the arms of which all runs are in: nobody looks at a part of one before."""
    return {place: found for place, found in ends.items() if len(found) == len(study.seeds)}


def runs_of(
    lines: Sequence[Mapping[str, str]], study: Study, arm: str, layers: int, updates: int
) -> Iterator[tuple[float, int, Mapping[str, str]]]:
    """Yield (rate, seed, line) of an arm's runs of so many updates. Runs are known by what their lines say, which needs
    no text; ``judge.py`` finds them by all of their settings."""
    wanted = label_of(study, arm, layers), layers, updates
    for line in lines:
        if (line["label"], int(line["layers"]), int(line["steps"])) == wanted:
            yield float(line["lr"]), int(line["seed"]), line


def label_of(study: Study, arm: str, layers: int) -> str:
    """Return the label of an arm's runs in the ledgers."""
    return label(study.experiment(arm, layers, 1e-3, study.seeds[0], {"data": {"source": "synthetic"}}).config.model)


def rates(study: Study, out: Path, titles: Titles) -> list[str]:
    """The table of the searches: the own rate of each arm, and the loss of the searching seeds by rate (mean)."""
    own, tried = chosen(out), {}
    for arm, layers in own:
        losses: dict[float, list[float]] = {}
        for line in rows_of(out / "searches" / f"{arm}-{layers}.csv"):
            if int(line["updates"]) == study.updates and int(line["seed"]) in study.search_seeds:
                losses.setdefault(float(line["lr"]), []).append(float(line["loss"]))
        tried[arm, layers] = {rate: np.mean(found) for rate, found in losses.items()}
    if not own:
        return ["No rate is chosen yet."]
    columns = sorted({rate for losses in tried.values() for rate in losses})
    lines = [
        (layers, titles[arm][0], f"{own[arm, layers]:g}", *(_loss(losses.get(rate)) for rate in columns))
        for (arm, layers), losses in sorted(tried.items(), key=lambda one: one[0][1])
    ]
    return table(("layers", "arm", "own rate", *(f"{rate:.3g}" for rate in columns)), lines)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if math.isfinite(value) else "not finite"


def losses(study: Study, ends: Ends, beside: str, titles: Titles) -> list[str]:
    """The table of losses, each arm less ``beside`` by seed."""
    lines, known = [], whole(study, ends)
    for layers in study.layers:
        for arm in study.arms(layers):
            found = ends.get((arm, layers), {})
            fine = [end.loss for end in known.get((arm, layers), {}).values() if not end.failed]
            other = difference(study, known, arm, beside, layers) if arm != beside else None
            apart = other.interval if other and other.losses[0] else None
            lines.append(
                (
                    layers, titles[arm][0], f"{len(found)} of {len(study.seeds)}", _verdicts(found.values()),
                    *(_told(t_interval(fine), "{:.3f}") if fine else ("", "")),
                    *(_told(apart, "{:+.3f}") if apart else ("", "")),
                )
            )  # fmt: skip
    columns = ("layers", "arm", "runs that are in", "verdicts", "loss on the judged text [nats/token]", "95 %")
    return table((*columns, f"minus {titles[beside][0]}, by seed", "95 %"), lines)


def order(study: Study, out: Path, ends: Ends, titles: Titles) -> list[str]:
    """The arms by their mean loss at each depth of which all runs are in, and what is known of those that failed."""
    lines, known = [], whole(study, ends)
    for layers in study.layers:
        own = {arm: known.get((arm, layers), {}) for arm in study.arms(layers)}
        if not all(own.values()):
            continue
        means = {arm: _mean([end.loss for end in found.values() if not end.failed]) for arm, found in own.items()}
        sorted_arms = sorted((arm for arm in own if math.isfinite(means[arm])), key=lambda arm: means[arm])
        told = "; ".join(f"{titles[arm][0]} ({means[arm]:.3f})" for arm in sorted_arms)
        lines.append(f"- {layers} layers, from the lowest mean loss to the highest: {told}.")
        for arm, found in own.items():
            if failed := sum(end.failed for end in found.values()):
                searched = _search(study, out, arm, layers)
                lines.append(f"  {titles[arm][0]}: {failed} of {len(found)} runs fail.{searched}")
    return lines or ["No depth is complete yet."]


def _search(study: Study, out: Path, arm: str, layers: int) -> str:
    """Say how many runs of a search failed, of all lengths, and at which rates."""
    label = label_of(study, arm, layers)
    own = [row for row in rows_of(out / "search.csv") if row["label"] == label and int(row["layers"]) == layers]
    if not own:
        return ""
    rates = [float(row["lr"]) for row in own]
    failed = f"{sum(row['verdict'] in FAILED for row in own)} of the {len(own)} runs of its search fail too"
    others = Counter(f'"{row["verdict"]}" after {row["step"]} updates' for row in own if row["verdict"] not in FAILED)
    told = f" The other verdicts: {', '.join(f'{count} {word}' for word, count in others.items())}." if others else ""
    return f" {failed}, at rates from {min(rates):g} to {max(rates):g}.{told}"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _verdicts(ends: Iterable[End]) -> str:
    said = [end.verdict for end in ends]
    return ", ".join(f"{said.count(verdict)} {verdict}" for verdict in dict.fromkeys(said))


def _told(found: Interval, form: str) -> tuple[str, str]:
    span = f"[{form.format(found.low)}, {form.format(found.high)}]" if found.n > 1 else ""
    return form.format(found.mean), span


def answers(found: Sequence[Answer], seeds: int, titles: Titles) -> list[str]:
    """The table of the answers."""
    lines = []
    for number, one in enumerate(found, 1):
        asked = f"P{number}: {titles[one.first][0]} - {titles[one.second][0]}, {one.layers} layers"
        told = _told(one.interval, "{:+.3f}") if one.interval.n and one.word != "open" else ("", "")
        lines.append((asked, *told, f"{one.interval.n} of {seeds}", f"{one.p:.2g}", one.word))
    return table(("question", "difference [nats/token]", "95 %", "seeds", "p (Holm)", "answer"), lines)


def _beyond(lost: Sequence[End]) -> str:
    """The runs that failed, and where they ended, to the right of what is drawn: ``6 stuck, at 5.76 →``."""
    losses = [end.loss for end in lost if math.isfinite(end.loss)]
    where = f", at {np.mean(losses):.2f} \N{RIGHTWARDS ARROW}" if losses else ""
    return _verdicts(lost) + where


def draw(study: Study, ends: Ends, titles: Titles, path: Path) -> None:
    """Draw the loss of each seed by arm, with its mean and 95 % interval; a panel a depth that has runs."""
    depths = [layers for layers in study.layers if any(at == layers for _, at in ends)]
    figure, axes = plt.subplots(
        1, len(depths), figsize=(4.8 * len(depths), 3.4), layout="constrained", squeeze=False, sharex=True
    )
    for axis, layers in zip(axes[0], depths, strict=True):
        arms = [arm for arm in study.arms(layers) if (arm, layers) in ends]
        for height, arm in enumerate(reversed(arms)):
            colour = titles[arm][1]
            own = ends[arm, layers].values()
            fine = np.array([end.loss for end in own if not end.failed])
            axis.plot(fine, np.full(len(fine), height), "o", color=colour, alpha=0.4, markersize=4)
            if len(fine) > 1:
                span = t_interval(fine)
                ends_of = [[span.mean - span.low], [span.high - span.mean]]
                axis.errorbar(span.mean, height, xerr=ends_of, fmt="|", color=colour, capsize=3, markersize=12)
            if lost := [end for end in own if end.failed]:
                place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (-3, 0)}
                axis.annotate(_beyond(lost), (1, height), **place, ha="right", va="center", fontsize=8)
        axis.set_yticks(range(len(arms)), [titles[arm][0] for arm in reversed(arms)], fontsize=8)
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.set_title(f"{layers} layers, {study.updates:,} updates", fontsize=9)
        axis.set_xlabel("loss on the judged text [nats/token]", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
