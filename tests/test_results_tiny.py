"""The comparison of results/tiny: its questions against other formulas, its tables, and the pages that hold them."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from loose_scripts import scripts_of
from scipy import stats

from stabilitylab.diagnose import diagnose
from stabilitylab.experiments import SWEEPS, Experiment, Recipe, protocol
from stabilitylab.store import Run
from stabilitylab.sweep import Ledger
from stabilitylab.sweep.identity import key_of
from stabilitylab.train import load_model

HERE = Path(__file__).parents[1] / "results" / "tiny"
TEXT = {  # of Multi30k, whose files are part of a run's key
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}
TERMS = {"P1": (protocol.DEEP, protocol.SMALL), "P2": (protocol.BRANCH, protocol.DEEP)}


@pytest.fixture(autouse=True)
def scripts() -> Iterator[None]:
    with scripts_of("results/tiny"):
        yield


def made(rng: np.random.Generator, n: int = 6) -> dict[tuple[str, int], dict[int, float]]:
    """Losses of every arm: a seed's own level, an arm's own place, noise."""
    level = rng.normal(2, 0.5, n)
    return {
        (arm, layers): {3 + i: level[i] + rng.normal(0.3 * k, 0.02) for i in range(n)}
        for k, arm in enumerate(protocol.ARMS)
        for layers in protocol.LAYERS
    }


def test_a_question_is_a_paired_t_test_with_holm_over_the_four() -> None:
    import questions

    known = made(np.random.default_rng(1))
    found = questions.table(lambda arm, layers: known[arm, layers]).set_index("id")
    p_values = {}
    for id, (first, second) in TERMS.items():
        one, other = ([known[arm, 18][seed] for seed in protocol.SEEDS] for arm in (first, second))
        test = stats.ttest_rel(one, other)
        interval = test.confidence_interval(0.95)
        row = found.loc[id]
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
        assert row["mean"] == pytest.approx(np.mean(one) - np.mean(other))
        assert row["p"] == pytest.approx(test.pvalue)
        p_values[id] = test.pvalue
    deep, shallow = (
        np.array([known[protocol.DEEP, n][seed] - known[protocol.SMALL, n][seed] for seed in protocol.SEEDS])
        for n in (18, 6)
    )
    assert found.loc["P4", "mean"] == pytest.approx(np.mean(deep - shallow))
    least = found["p"].min()
    assert found["p_holm"].min() == pytest.approx(min(1, 4 * least))
    assert (found["p_holm"] >= found["p"]).all()


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.04, 0.04, "equivalent"),
        (0.01, 0.04, "equivalent"),  # it differs, and does not matter
        (0.06, 0.2, "matters"),
        (-0.2, -0.051, "matters"),
        (0.01, 0.2, "differs"),
        (-0.2, -0.01, "differs"),
        (-0.01, 0.2, "cannot tell"),
        (-0.2, 0.2, "cannot tell"),
    ],
)
def test_the_words_of_an_interval(low: float, high: float, word: str) -> None:
    import questions

    assert questions.answer(low, high) == word


def test_a_seed_that_an_arm_lacks_is_left_out_and_leaves_its_questions_open() -> None:
    import questions

    known = made(np.random.default_rng(2))
    del known[protocol.DEEP, 18][5]
    assert 5 not in questions.differences(questions.QUESTIONS[0], lambda arm, n: known[arm, n])
    answers = questions.table(lambda arm, n: known[arm, n]).set_index("id")["answer"]
    assert {*answers[["P1", "P2", "P4"]]} == {"open: 5 of 6 seeds"}
    assert not answers["P3"].startswith("open")
    one = {key: {3: losses[3]} for key, losses in known.items()}
    assert {*questions.table(lambda arm, n: one[arm, n])["answer"]} == {"open: 1 of 6 seeds"}


@pytest.mark.slow
def test_the_interval_over_sentences_covers_the_difference_of_the_whole_text() -> None:
    """2,000 texts of 300 sentences each, of different lengths, whose losses differ by .02 nats a token."""
    import questions

    rng = np.random.default_rng(3)
    question = questions.QUESTIONS[0]
    inside = []
    for _ in range(400):
        tokens = rng.integers(5, 25, 300)
        rows = [("tokens", *["tokens"] * 5, *tokens)]
        for k, arm in enumerate((question.first, question.second)):
            for seed in (3, 4):
                each = tokens * rng.normal(3 - 0.02 * k, 0.3, 300)
                rows.append((arm, 18, seed, protocol.chosen(arm, 18), 240, protocol.UPDATES, *each))
                rows.append((arm, 18, seed, protocol.chosen(arm, 18) / 4, 240, protocol.UPDATES, *(each * k)))
        names = ["arm", "layers", "seed", "lr", "T", "updates", *(f"s{i}" for i in range(300))]
        low, high = questions.over_sentences(question, pd.DataFrame(rows, columns=names), [3, 4])
        inside.append(low < 0.02 < high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.035)


def test_the_table_of_the_choice_names_the_best_of_each_arm() -> None:
    path = HERE / "second" / "choice.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["arm"], int(row["layers"])) for row in rows} == {
        (arm, layers) for layers in protocol.LAYERS for arm in protocol.arms(layers)
    }
    for layers in protocol.LAYERS:
        for arm in protocol.arms(layers):
            own = [row for row in rows if (row["arm"], int(row["layers"])) == (arm, layers)]
            means = {float(row["lr"]): (float(row["nll_100"]) + float(row["nll_101"])) / 2 for row in own}
            assert {*protocol.RATES} <= {*means}
            least, further = protocol.best(means)
            assert further is None
            assert [float(row["lr"]) for row in own if row["chosen"] == "1"] == [least]
            assert protocol.chosen(arm, layers) == least


def test_the_pages_hold_what_the_tables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import recompute

    monkeypatch.setattr(sys, "argv", ["recompute.py"])
    assert recompute.main() == 0, capsys.readouterr().err
    assert {page.name for page in recompute.PAGES} == {"README.md", *SETTINGS}


def test_a_changed_digit_is_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import recompute

    page = tmp_path / "results.md"
    monkeypatch.setattr(recompute, "PAGES", (page,))
    right = recompute.renewed("before\n<!-- results:choice -->\n<!-- end -->\nafter\n")
    digit = next(i for i in range(len(right) - 1, 0, -1) if right[i].isdigit())
    page.write_text(right[:digit] + str((int(right[digit]) + 1) % 10) + right[digit + 1 :])
    monkeypatch.setattr(sys, "argv", ["recompute.py"])
    assert recompute.main() == 1
    assert "results.md: the page differs" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["recompute.py", "--write"])
    assert recompute.main() == 0
    assert page.read_text() == right
    assert recompute.number(math.nan) == recompute.interval(math.nan, math.nan) == ""
    with pytest.raises(KeyError):
        recompute.renewed("<!-- results:nothing -->\n<!-- end -->\n")


@pytest.mark.slow
def test_what_is_kept_of_a_run_is_what_it_measured(tmp_path: Path) -> None:
    """On the synthetic task: the sentences' losses sum to the validation loss; other tables hold the run's numbers."""
    import keep
    import make

    small = {"data": {"sentences": 4, "held_out": 6, "validation": 20}}
    runs = [protocol.run(arm, 2, 3, 1e-3, 60, protocol.WITH_LAYERS, small) for arm in (protocol.BRANCH, protocol.DEEP)]
    ledger = Ledger(tmp_path / "ledger.csv")
    for _ in range(2):  # the second call finds all
        make.make(runs, tmp_path / "runs", ledger, (*make.COMPARED, *make.THIRD))
    made = [Run.open(tmp_path / "runs" / run.name) for run in runs]
    rows = pd.read_csv(tmp_path / "sentences.csv", dtype=str).iloc[:, len(keep.WHICH) :].astype(float).to_numpy()
    assert rows.shape == (3, 20)
    for each, run in zip(rows[1:], made, strict=True):
        assert each.sum() / rows[0].sum() == pytest.approx(run.metrics["validation_nll"].iloc[-1], rel=1e-5)
    course = pd.read_csv(tmp_path / "course.csv")
    assert len(course) == sum(run.metrics["held_out_nll"].notna().sum() for run in made)
    reading = pd.read_csv(tmp_path / "reading.csv")
    for name in ("source_worth", "encoder_distance_between"):
        own = pd.concat([run.metrics[["held_out_nll", name]].dropna()[name] for run in made])
        assert reading[name].tolist() == pytest.approx(own.tolist(), rel=1e-5)
    layers = pd.read_csv(tmp_path / "layers.csv")
    assert len(layers) == 2 * 3 * 4  # arms, steps, layers
    last = made[0].frame("cosine_similarity", by="layer").query("step == 60 and stack_name == 'decoder'")
    own = layers.query("arm == 'branchnorm' and step == 60 and stack_name == 'decoder'")
    assert own["cosine"].tolist() == pytest.approx(last["raw"].tolist(), rel=1e-5)
    activity = pd.read_csv(tmp_path / "activity.csv").query("arm == 'deepnorm'").set_index("step")
    blocks = made[1].frame("activation_sparsity")
    for step, own in activity.iterrows():
        of_decoder = blocks[(blocks["step"] == step) & (blocks["stack_name"] == "decoder")]
        assert own["decoder"] == pytest.approx(of_decoder["nonzero_fraction"].mean(), rel=1e-5)
    assert activity.index.tolist() == sorted({*blocks["step"]})
    shares = pd.read_csv(tmp_path / "shares.csv").query(
        "arm == 'branchnorm' and stack_name == 'decoder' and layer == 2"
    )
    norms = made[0].frame("branch_variance").query("step == 60 and stack_name == 'decoder' and layer == 2")
    assert len(norms) == 3
    assert shares["share"].tolist() == pytest.approx([(norms["branch"] / norms["total"]).mean()], rel=1e-5)
    assert_made_again(runs, made, tmp_path)
    source = pd.read_csv(tmp_path / "source.csv")
    assert source["own"].tolist() == pytest.approx([run.metrics["validation_nll"].iloc[-1] for run in made], rel=1e-5)
    assert source["other"].tolist() == pytest.approx([with_other_sources(run) for run in made], rel=1e-5)
    assert source["apart"].tolist() == pytest.approx([1 - alike(run) for run in made], rel=1e-4)
    said = pd.read_csv(tmp_path / "collapse.csv")
    for run, label in zip(made, ("branchnorm", "deepnorm"), strict=True):
        events = [event for event in diagnose(run).events if event.kind == "rank_collapse"]
        own = said[said["arm"] == label].dropna(subset="stack")
        assert own["begun"].tolist() == [event.step for event in events]
        assert own["severity"].tolist() == [event.severity for event in events]


def assert_made_again(runs: Sequence[Experiment], made: Sequence[Run], folder: Path) -> None:
    """The runs of the tables in ``folder`` have the numbers and verdicts of those that were kept."""
    import again

    kept = again.Kept(folder)
    for one, run in zip(runs, made, strict=True):
        line = kept.line(one)
        assert line is not None
        for name, probes in (("layers", again.layer_probes), ("activity", again.stack_probes)):
            again.write(one, kept, line, [each for each in probes(kept, line) if each is not None], folder / name)
        new = Run.open(folder / "layers" / one.name)
        assert new.verdict is not None
        assert dataclasses.replace(new.verdict, reason=run.verdict.reason) == run.verdict
        for table, column in (("cosine_similarity", "raw"), ("activation_sparsity", "nonzero_fraction")):
            keys = ["stack_name", "layer"]
            pair = [one.frame(table, by="layer").query("step == 60").set_index(keys)[column] for one in (run, new)]
            assert pair[1].to_dict() == pytest.approx(pair[0].to_dict(), rel=1e-5)
        for column in ("held_out_nll", "source_worth", "validation_nll"):
            pair = [one.metrics[column].dropna().tolist() for one in (run, new)]
            assert pair[1] == pytest.approx(pair[0], rel=1e-5)
        norms = (each.frame("branch_variance").query("step == 60") for each in (run, new))
        shares = [(own["branch"] / own["total"]).groupby([own["stack_name"], own["layer"]]).mean() for own in norms]
        assert shares[1].to_dict() == pytest.approx(shares[0].to_dict(), rel=1e-5)
        course = [one.frame("activation_sparsity").groupby(["step", "stack_name"])["nonzero_fraction"].mean()
                  for one in (run, Run.open(folder / "activity" / one.name))]  # fmt: skip
        assert course[1].to_dict() == pytest.approx(course[0].to_dict(), rel=1e-5)


@pytest.mark.slow
def test_the_claims_of_the_third_comparison_are_those_of_its_tables() -> None:
    import again

    known = pd.read_csv(HERE / "third" / "claims.csv", dtype={"layers": str})
    found = pd.DataFrame(again.judged(again.Kept()), columns=again.COLUMNS)
    words, numbers = ["layers", "claim", "verdict", "role", "effect", "why"], ["mean", "low", "high", "n", "p"]
    assert found[words].to_numpy().tolist() == known[words].fillna("").to_numpy().tolist()
    found = found[numbers].replace("", math.nan).astype(float)
    np.testing.assert_allclose(found, known[numbers], rtol=1e-4, atol=1e-15)


def test_a_table_takes_no_rows_of_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keep

    monkeypatch.setattr(keep, "which", lambda run: ("branchnorm", 6, 3, 1e-3, 240, 6000))
    run: Any = None
    keep._append(tmp_path / "source.csv", ("own", "other"), run, [(1.0, 2.0)])
    before = (tmp_path / "source.csv").read_bytes()
    with pytest.raises(SystemExit, match=r"has the columns arm,.*,own,other, not arm,.*,own,other,apart: move it away"):
        keep._append(tmp_path / "source.csv", ("own", "other", "apart"), run, [(1.0, 2.0, 3.0)])
    with pytest.raises(ValueError, match=r"a row of source\.csv has 7 cells, and its header 8"):
        keep._append(tmp_path / "source.csv", ("own", "other"), run, [(1.0,)])
    assert (tmp_path / "source.csv").read_bytes() == before


@pytest.mark.parametrize("path", sorted(HERE.rglob("*.csv")), ids=lambda path: path.stem)
def test_every_row_of_a_committed_table_has_all_columns(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert rows
    assert {len(row) for row in rows} == {len(header)}


def with_other_sources(run: Run) -> float:
    """Sentence by sentence, each alone with the source of the next one of its batch."""
    model, dataset, _ = load_model(run)
    total = tokens = 0.0
    for batch in dataset.validation():
        lengths = batch.weight.sum(1)
        real = int((lengths > 0).sum())
        for place in range(real):
            other = (place + 1) % real
            given = {name: value[[other]] for name, value in batch.inputs.items() if name != "target"}
            with torch.inference_mode():
                logits = model(**given, target=batch.inputs["target"][[place]]).double()
            p = logits.log_softmax(-1)[0].gather(-1, batch.labels[place][:, None])[:, 0]
            total -= float((p * batch.weight[place]).sum())
            tokens += float(lengths[place])
    return total / tokens


def alike(run: Run) -> float:
    """Mean cosine of a token of the encoder's last layer with each other one of its sentence, pair by pair."""
    model, dataset, _ = load_model(run)
    found: list[float] = []
    for batch in dataset.validation():
        outputs: list[torch.Tensor] = []
        hook = model.encoder.layers[-1].register_forward_hook(lambda *given, kept=outputs: kept.append(given[-1]))
        with torch.inference_mode():
            model(**batch.inputs)
        hook.remove()
        for tokens, words in zip(batch.inputs["source"], outputs[0].double(), strict=True):
            real = words[tokens != 0]
            cosines = torch.nn.functional.cosine_similarity(real[:, None], real[None], dim=-1)
            if (n := len(real)) > 1:
                found += ((cosines.sum(1) - 1) / (n - 1)).tolist()
    return float(np.mean(found))


def test_the_warning_is_held_against_what_the_source_is_worth() -> None:
    import recompute

    told = [line.split(" | ") for line in recompute.collapse() if "the comparison" in line]
    assert [(row[1], int(row[2]), int(row[3].strip("| "))) for row in told] == [
        ("nothing", 24, 24), ("less than a nat", 6, 6), ("a nat or more", 24, 0),
    ]  # fmt: skip
    assert sum(int(line.split(" | ")[4].split(" of ")[0]) for line in recompute.source()[2:]) == 24


def test_numbers_within_sentences_are_those_of_the_tables() -> None:
    import recompute

    with (HERE / "claims.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["id"] == "C21" and row["effect_role"] == "primary")
    mean, low, high = (round(float(row[f"effect_{end}"]), 2) for end in ("mean", "low", "high"))
    assert mean < 0
    said = f"-{-mean:.2f} [-{-low:.2f}, -{-high:.2f}]".replace("0.", ".")
    assert recompute.renewed("it is <!--=C21-->9<!--/-->.") == f"it is <!--=C21-->{said}<!--/-->."
    closer = recompute.renewed("<!--=C21:3--><!--/-->").removeprefix("<!--=C21:3-->").partition(" ")[0]
    assert float(closer) == pytest.approx(mean, abs=0.005)
    assert len(closer) == len("-.123")
    assert recompute.renewed("<!--=unread--><!--/-->") == "<!--=unread-->24 of 54<!--/-->"
    apart = np.mean(
        [recompute.losses(protocol.BRANCH, 18)[n] - recompute.losses(protocol.DEEP, 18)[n] for n in range(3, 9)]
    )
    assert recompute.renewed("<!--=P2--><!--/-->") == f"<!--=P2-->{apart:.2f}<!--/-->".replace("0.", ".")
    assert "-.00" not in recompute.renewed("<!--=C33--><!--/-->")  # its interval begins a little below 0
    for nothing in ("C99", "P9", "read", "C21:x"):
        with pytest.raises(KeyError):
            recompute.renewed(f"<!--={nothing}--><!--/-->")


def keys(experiments: Iterable[Experiment]) -> set[str]:
    return {key_of(each.config, TEXT) for each in experiments}


def in_ledger(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_keys_of_the_planned_runs_are_those_of_the_ledgers() -> None:
    """Whoever sees this fail has changed runs that were made: they would be made again under other keys."""
    import make

    ask = make.recipe(Path())
    parts = make.PARTS.values()
    known = keys(each for part in parts if part.out == make.SECOND for each in part.experiments(ask, (), ()))
    for row in in_ledger("second/ledger.csv"):
        assert row["key"] in known, row["label"]
    for part in (own for own in parts if own.out != make.SECOND):
        path = HERE / part.out / "ledger.csv"
        if path.exists():
            made = in_ledger(f"{part.out}/ledger.csv")
            depths = sorted({int(row["layers"]) // 2 for row in made})
            known = keys(part.experiments(make.recipe(Path(), part.judged_on), depths, protocol.SEARCHED_ARMS))
            others = [row for row in made if row["key"] not in known]
            # A first version of the rule judged BranchNorm at this rate (docs/results.md).
            first = [("branchnorm", "12", "0.0005")] * 8 if part.out == "third" else []
            assert [(row["label"], row["layers"], row["lr"]) for row in others] == first, part.out
    rates = {arm: tuple(protocol.RATES[0] * 2.0**power for power in range(-4, 8)) for arm in protocol.CHOSEN}
    tried = keys(each for layers in protocol.LAYERS for each in protocol.choice(layers, ask.settings, rates))
    assert {row["key"] for row in in_ledger("second/rates.csv")} <= tried


@pytest.mark.parametrize(
    ("figure", "key"),
    [
        ("branchnorm:3", "f0e021d3a7d0c674"),
        ("branchnorm:5", "0479fce77539dfc1"),
        ("branchnorm:6", "3b9835dc535b3f51"),
        ("branchnorm:7", "1168bbbf5ade75e4"),
        ("branchnorm:8", "528636381fcbce59"),
        ("branchnorm:T", "6eb07a1b62714e68"),
        ("deepnet:4", "42caebc008212182"),
        ("admin:grid", "aaf3b38be41e3006"),
        ("table:stability", "8e10916ef0d2a52d"),
    ],
)
def test_the_key_of_a_figures_first_run_stays_what_it_was(figure: str, key: str) -> None:
    assert key_of(next(iter(SWEEPS[figure](Recipe("tiny", {})))).config) == key


SETTINGS = {  # decimals within sentences that no table has: what was set, and names of papers
    "results.md": {".05", ".1", ".4", ".001", ".0005", ".000707", "2103.03404", "2206.03126"},
    "withdrawn.md": {".05", ".01", "2103.03404", "2206.03126"},
    "findings.md": set(),
    "ledger.md": set(),
}


def unmarked(text: str) -> set[str]:
    """The decimals of a page's sentences outside code, generated blocks and marked numbers."""
    for made in (
        r"```.*?```",
        r"<!-- \w+:\w+ -->.*?<!-- end -->",
        r"<!--=[\w:]+-->.*?<!--/-->",
        r"`[^`\n]*`",
        r"\]\([^)]*\)",
    ):
        text = re.sub(made, " ", text, flags=re.DOTALL)
    return set(re.findall(r"(?<![\w.])\d*\.\d+", text))


@pytest.mark.parametrize("page", [f"docs/{name}" for name in SETTINGS])
def test_every_decimal_of_a_page_is_recomputed_or_a_setting(page: str) -> None:
    path = HERE.parents[1] / page
    left = unmarked(path.read_text(encoding="utf-8")) - SETTINGS[path.name]
    assert not left, f"{page}: mark these numbers as <!--=NAME-->, or list them among the settings: {sorted(left)}"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}" for name in SETTINGS)])
def test_no_line_begins_with_a_marked_number(page: str) -> None:
    """Markdown takes such a line for HTML, and shows the rest of it as it is written."""
    lines = (HERE.parents[1] / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.lstrip().startswith("<!--=")] == []


def test_the_sentences_about_the_comparison_are_what_its_tables_hold() -> None:
    import judge

    models = judge.models_of(judge.TABLES)
    each = [model for runs in models.values() for model in runs.values()]
    assert len(each) == sum(model.eligible for model in each) == 80
    assert not any(model.constant for model in each)
    assert max(model.worth for model in models[protocol.POST, 18].values()) < 1
    for layers in protocol.LAYERS:
        rates = {arm: protocol.SEARCH[arm][layers] for arm in protocol.SEARCHED_ARMS}
        assert 0.3 < rates[protocol.BRANCH] / rates[protocol.DEEP] < 0.4
    course = pd.read_csv(judge.TABLES / "reading.csv")
    place = ["arm", "layers", "lr", "seed"]
    ends = course.sort_values("step").groupby(place).tail(1).set_index(["arm", "layers"])
    collapsed = ends.loc[(protocol.POST, 18)]
    assert collapsed["encoder_distance_within"].max() < 1e-6
    assert collapsed["encoder_distance_between"].min() > 0.01
    late = course[course["step"] >= 0.8 * protocol.UPDATES].sort_values("step").groupby(place)["held_out_nll"]
    fell = (late.first() - late.last()).groupby(["arm", "layers"]).mean()
    assert len(fell) == 10
    assert (fell > 0.01).all()


def test_the_sentences_about_half_the_rates_are_what_its_tables_hold() -> None:
    """All models read, no sign turns, every difference and every loss is larger, and P4's is beyond the margin."""
    import judge

    models, halved = judge.models_of(judge.TABLES), judge.models_of(judge.HALVED, 0.5)
    assert all(model.eligible for runs in halved.values() for model in runs.values())
    found = {one.id: judge.robustness(one, models, halved) for one in judge.QUESTIONS}
    assert {one.said() for one in found.values()} == {"depends on the rate"}
    assert all(one.half.low > one.at.mean > 0 and one.change.low > 0 for one in found.values())
    assert found["P4"].half.low > 0.05
    for place, runs in halved.items():
        assert all(model.loss > models[place][seed].loss for seed, model in runs.items())
    arms = [protocol.SMALL, protocol.DEEP, protocol.BRANCH]
    means = [np.mean([model.loss for model in halved[arm, 18].values()]) for arm in arms]
    assert means == sorted(means)


def test_the_sentences_about_equal_rates_are_what_the_search_found() -> None:
    import questions

    data = pd.read_csv(HERE / "rungs-choice.csv")
    data = data[data["seed"].isin(protocol.CHOICE_SEEDS)]
    loss = data.pivot_table("loss", ["layers", "updates", "lr"], "arm")
    early = loss.xs(protocol.RUNG_UPDATES, level="updates")
    for layers, most in ((6, 5e-4), (18, 2.5e-4)):
        low = early.loc[layers].loc[:most].dropna(subset=[protocol.BRANCH, protocol.DEEP])
        assert len(low) >= 2
        assert (low[protocol.BRANCH] - low[protocol.SMALL]).abs().max() < questions.MARGIN
        assert (low[protocol.BRANCH] < low[protocol.DEEP] - 0.1).all()
    at = early.loc[(6, 1e-3)]
    assert at[protocol.BRANCH] > max(at[protocol.SMALL], at[protocol.DEEP]) + 0.1
    ended = loss.loc[(6, protocol.UPDATES, 1e-3)]
    assert ended[protocol.BRANCH] == pytest.approx(ended[protocol.DEEP], abs=0.02)


def test_an_unmarked_decimal_is_seen() -> None:
    page = "At .5 of `0.7` it is <!--=C20-->.56 [.54, .57]<!--/-->, or 3.17.\n<!-- results:x -->\n0.1\n<!-- end -->\n"
    assert unmarked(page) == {".5", "3.17"}


def test_each_claim_stands_in_one_group_and_its_withdrawal_is_counted() -> None:
    import verdicts

    groups = [verdicts.of_stage(name)[2:] for name in (verdicts.START, verdicts.EARLY, verdicts.TRAINED)]
    ids = [row.split(" | ")[0].strip("| ") for rows in groups for row in rows]
    with (HERE / "claims.csv").open(newline="") as file:
        assert sorted(ids) == sorted({row["id"] for row in csv.DictReader(file)})
    assert {"C01", "C11", "C25"} <= {row.split(" | ")[0].strip("| ") for row in groups[0]}
    assert "C31" in ids[len(groups[0]) + len(groups[1]) :]
    assert verdicts.verdict("C10") == "withdrawn (contradicted): 12 of 12 models ignore their source"
    assert verdicts.verdict("C43") == "contradicted"  # by the third comparison
    assert verdicts.verdict("C09") == "not reproduced"  # of the first updates, whatever was learnt later
    source = pd.read_csv(HERE / "second" / "source.csv")
    ramps = source[(source["updates"] == protocol.RAMP_UPDATES) & (source["layers"] == 18)]
    assert verdicts.ignoring("C38") == (int((ramps["other"] - ramps["own"] < 1e-3).sum()), len(ramps))
    counts = [[int(cell) for cell in row.strip("| ").split(" | ")[1:]] for row in verdicts.standing()[2:]]
    assert sum(row[0] for row in counts) == len(ids)
    assert all(row[0] == sum(row[1:7]) and row[7] <= row[0] for row in counts)
    assert sum(row[5] for row in counts) == sum("| withdrawn (" in line for rows in groups for line in rows)


def forget(verdicts: ModuleType) -> None:
    verdicts.ledger.cache_clear()
    verdicts.judged_again.cache_clear()


@pytest.fixture
def without_the_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """verdicts.py as it is before the third comparison is complete."""
    import verdicts

    (none := tmp_path / "none.csv").write_text("layers,claim,verdict,role,effect,mean,low,high,n,p,why\n")
    monkeypatch.setattr(verdicts, "AGAIN", none)
    forget(verdicts)
    yield verdicts
    forget(verdicts)


def test_the_third_comparison_takes_the_place_of_withdrawn_judgements_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_the_third: ModuleType
) -> None:
    old, survivors = without_the_third.ledger(), without_the_third.standing()
    verdicts = without_the_third
    lines = [
        "6,C37,contradicted,primary,difference,0.4,0.3,0.5,8,1e-9,",  # at one depth: it waits
        "6 and 18,C43,contradicted,primary,layers below,0,0,.05,8,1e-9,",
        "6 and 18,C43,contradicted,descriptive,encoder,0,0,.1,8,,",
        "6 and 18,C41,not testable,primary,,,,,,,1 of 16 models ignore their source",
    ]
    table = tmp_path / "claims.csv"
    table.write_text("\n".join(["layers,claim,verdict,role,effect,mean,low,high,n,p,why", *lines]) + "\n")
    monkeypatch.setattr(verdicts, "AGAIN", table)
    forget(verdicts)
    new = verdicts.ledger()
    assert verdicts.verdict("C37").startswith("withdrawn (")
    assert verdicts.verdict("C43") == "contradicted"
    assert verdicts.verdict("C41") == "not testable: 1 of 16 models ignore their source"
    assert verdicts.measured(new.loc["C43"]) == "layers below: 0 [0, 0.05], n = 8"
    assert new.loc["C43", "survives"]
    assert new.loc["C41", "survives"] is None
    untouched = old.index.drop(["C41", "C43"])
    assert new.loc[untouched, "effect_mean"].tolist() == old.loc[untouched, "effect_mean"].tolist()
    assert verdicts.count("withdrawn") == "6"
    assert verdicts.standing() != survivors


def test_holms_correction_is_that_of_the_package(without_the_third: ModuleType) -> None:
    """claims.csv has what ``stabilitylab report`` said of the same p values."""
    data = pd.read_csv(HERE / "claims.csv").drop_duplicates("id").set_index("id").sort_index()["survives"]
    said = without_the_third.ledger()["survives"]
    assert [bool(one) for one in said] == [one == True for one in data]  # noqa: E712 (True, False or none)
    assert said.astype(bool).sum() > 20


def test_a_ramp_is_compared_where_all_models_read_and_a_rate_is_shown_when_it_is_whole(scripts) -> None:
    import judge
    import searched_ramps

    plan = searched_ramps.planned()
    rates, base = [*plan], protocol.share(protocol.RAMP_UPDATES)
    assert rates[:2] == [protocol.SEARCH[protocol.BRANCH][18], protocol.SEARCH[protocol.BRANCH][18] / 2]
    assert all(ramps == [3, 12, 120, 600] for ramps in plan.values())
    known = {
        (rates[0], T): {
            seed: judge.Model(3.0 - 0.1 * (base > T) + 0.01 * seed, 1.0 * (base >= T), 1.0) for seed in protocol.SEEDS
        }
        for T in plan[rates[0]]
    }
    known[rates[1], 3] = {3: judge.Model(3.0, 1.0, 1.0)}
    first, *others = searched_ramps.rows(known, plan)
    assert first[:3] == (f"{rates[0]:g}", 3, "0.1 %")
    assert first[4:] == ("-0.100", "[-0.100, -0.100]", "6 of 6", "1.00 to 1.00")
    assert others[1][4:6] == ("", "")  # 4 % itself
    assert others[2][4:7] == ("", "", "0 of 6")  # its models ignore their source
    assert [row[3] for row in others[3:]] == ["open: 1 of 24 runs", "open: 0 of 24 runs"][: len(rates) - 1]
