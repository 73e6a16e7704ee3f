"""The lists of runs: complete, uniquely named, and what the figures and claims say that they need."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

import pytest

from stabilitylab.config import Config, resolve
from stabilitylab.errors import UsageError
from stabilitylab.experiments import (
    SWEEPS,
    Experiment,
    Recipe,
    command,
    experiments,
    folder,
    minutes,
    name_of,
    protocol,
    slug,
)
from stabilitylab.labels import label
from stabilitylab.models import ARCHS, canonical
from stabilitylab.probes._engine.cadence import is_due
from stabilitylab.probes._engine.selection import chosen
from stabilitylab.reports import FIGURES
from stabilitylab.train.recipe import learning_rate

TEXT = {"source": "text:a.de,a.en"}
GAIN_1 = ("postln gain=1", "postln-init gain=1")
ONE_STEP = (
    *GAIN_1,
    "postln",
    "preln",
    "postln-init",
    "postln+beta",
    "deepnorm",
    "branchnorm",
    "branchnorm T=1",
    "admin",
)
ADMIN = ("postln", "preln", "admin")
FIVE, SIX = range(3, 8), range(3, 9)
# at scale tiny: layers a side, and the seeds of each label
TINY: dict[str, tuple[set[int], dict[str, range]]] = {
    "branchnorm:1": ({6, 18}, dict.fromkeys(("postln gain=1", "deepnorm"), SIX)),
    "branchnorm:3": ({6, 18}, dict.fromkeys(protocol.ARMS, SIX)),
    "branchnorm:5": ({3, 6, 18}, dict.fromkeys(("deepnorm", "branchnorm"), range(3, 6))),
    "branchnorm:6": ({6}, dict.fromkeys(("deepnorm", "branchnorm"), SIX)),
    "branchnorm:7": ({6}, dict.fromkeys(("branchnorm", "branchnorm exp", "branchnorm sigmoid"), SIX)),
    "branchnorm:T": ({18}, {"branchnorm": SIX}),
    "deepnet:3": ({6, 12, 18, 24}, dict.fromkeys((*GAIN_1, "postln", "postln-init"), FIVE)),
    "admin:5": ({6}, dict.fromkeys(ADMIN, FIVE)),
    "admin:6": ({6}, dict.fromkeys(ADMIN, range(3, 6))),
    "admin:7": ({18}, dict.fromkeys(ADMIN, range(3, 6))),
    "admin:grid": ({6}, dict.fromkeys(ADMIN[:2], range(3, 6))),
}


def rows(figure: str, **changes: Any) -> list[tuple[str, Config]]:
    return [(label(each.config.model), each.config) for each in experiments(figure, **changes)]


def everything() -> list[tuple[str, str, list[Experiment]]]:
    known = [(figure, scale) for figure in SWEEPS for scale in SWEEPS[figure].scales]
    return [(figure, scale, experiments(figure, scale, data=TEXT)) for figure, scale in known]


def test_sweeps_are_those_of_figures_and_of_the_fast_claims() -> None:
    assert {*SWEEPS} - {*FIGURES} == {"claims:fast"}, "these sweeps have no figure"
    without = {"admin:3", "rates:loss", "histograms:ridges", "fingerprints:error"}  # of others, of lr-find, of any run
    assert {*FIGURES} - {*SWEEPS} == without, "these figures have no sweep"


@pytest.mark.slow
def test_names_are_unique_readable_and_need_no_quoting() -> None:
    for figure, scale, runs in everything():
        assert runs, f"{figure} at {scale} has no runs"
        names = Counter(each.name for each in runs)
        assert max(names.values()) == 1, f"{figure} at {scale}: several runs have the name {names.most_common(1)}"
        for each in runs:
            model, where = each.config.model, f"{figure} at {scale}: the name {each.name!r}"
            assert shlex.quote(each.name) == each.name, f"{where} needs quotes in a shell"
            assert each.name.startswith(f"{slug(label(model))}-{model.depth}-"), f"{where} lacks label and depth"
            assert each.name.endswith(f"-s{each.config.train.seed}"), f"{where} does not end with the seed"
    assert slug("branchnorm alpha=0") == "branchnorm-alpha0"
    assert slug("postln/preln") == "postln-preln"


@pytest.mark.slow
def test_no_two_runs_of_a_figure_are_the_same_run() -> None:
    for figure, scale, runs in everything():
        different = {each.config.model_dump_json() + each.kind for each in runs}
        assert len(different) == len(runs), f"{figure} at {scale} makes one run several times"


@pytest.mark.slow
def test_figures_that_share_a_folder_agree_on_the_runs_in_it() -> None:
    found: dict[tuple[str, str], Experiment] = {}
    shared = 0
    for figure, scale, runs in everything():
        for each in runs:
            first = found.setdefault((folder(figure, scale), each.name), each)
            assert first == each, (
                f"{figure} at {scale}: another run has the name {each.name} in {folder(figure, scale)}"
            )
            shared += first is not each
    assert shared > 200
    assert folder("9") == folder("branchnorm:8") == "tiny/branchnorm-8"
    assert folder("table") == folder("deepnet:6") == "tiny/table"
    assert folder("branchnorm:4") == "tiny/branchnorm-8"
    assert folder("branchnorm:7", "paper") == folder("branchnorm:T", "paper") == "paper/branchnorm-T"
    for figure in SWEEPS:
        for scale in SWEEPS[figure].scales:
            home = SWEEPS[
                SWEEPS[figure].folders.get(scale, figure)
            ]  # it has the folder to itself, and is at that scale
            assert folder(home.name, scale) == folder(figure, scale)
            assert scale in home.scales


@pytest.mark.slow
def test_every_run_is_one_that_can_be_trained() -> None:
    for figure, _, runs in everything():
        for each in runs:
            model = each.config.model
            where = f"{figure}: {each.name}"
            assert canonical(model) == model, f"{where} does not spell its architecture as the registry does"
            assert {model.arch, model.decoder_arch or model.arch} <= ARCHS.keys(), f"{where}: no such architecture"
            assert bool(chosen(each.config.probes.names)) is (each.config.probes.names != ("none",)), f"{where}: probes"
            assert resolve(each.config.model_dump()) == each.config, f"{where}: its configuration is not resolved"


@pytest.mark.slow
def test_seeds_pair_the_architectures_and_leave_the_pilots_out() -> None:
    for _, _, runs in everything():
        for each in runs:
            assert each.config.train.seed == each.config.data.seed >= 3
    for _, _, runs in everything():
        batches: dict[tuple[int, int, int, str], set[str]] = {}
        for each in runs:
            data = each.config.data.model_dump_json()
            size = (each.config.data.max_length, each.config.data.sentences)
            key = (each.config.train.seed, *size, str(each.config.data.fraction))
            batches.setdefault(key, set()).add(data)
        assert all(len(data) == 1 for data in batches.values())


@pytest.mark.parametrize("figure", TINY)
def test_labels_layers_and_seeds_at_scale_tiny(figure: str) -> None:
    layers, expected = TINY[figure]
    found: dict[str, set[int]] = {}
    for name, config in rows(figure):
        assert (config.model.d_model, config.model.d_ffn, config.model.heads) == (64, 128, 2)
        assert config.model.encoder_layers == config.model.decoder_layers
        found.setdefault(name, set()).add(config.train.seed)
    assert found == {name: set(seeds) for name, seeds in expected.items()}
    assert {config.model.encoder_layers for _, config in rows(figure)} == layers
    for name in expected:
        assert {config.model.encoder_layers for own, config in rows(figure) if own == name} == layers


def by_protocol(config: Config) -> None:
    """T and warm-up are 4 % of the run, and the rate falls linearly to 0 after it."""
    ramp = max(1, round(0.04 * config.train.steps))
    assert (config.train.warmup, config.train.schedule) == (ramp, "linear")
    assert config.model.T in (ramp, 1)


def test_the_comparison_has_all_arms_at_both_depths_each_at_its_own_rate() -> None:
    for figure in ("4", "8", "9"):
        assert experiments(figure) == experiments("branchnorm:8")
    cells = Counter((name, c.model.encoder_layers, c.train.lr) for name, c in rows("8"))
    arms = {(arm, 18) for arm in protocol.ARMS} | {(arm, 6) for arm in (*protocol.ARMS, protocol.ALPHA_ALONE)}
    assert {cell[:2] for cell in cells} == arms
    assert {*cells.values()} == {6}
    assert all(lr == protocol.chosen(name, layers) for name, layers, lr in cells)
    for name, config in rows("8"):
        by_protocol(config)
        assert (config.train.steps, config.train.warmup) == (6000, 240)
        assert (config.model.T == 1) is (name == "branchnorm T=1")
        assert config.probes.names == ("default", "branch_variance")
    first = [(name, c.model.encoder_layers) for name, c in rows("8")][:9]
    assert {*first} == arms  # whatever is finished has a seed of all
    assert {each.name for each in experiments("1")} < {each.name for each in experiments("8")}


def test_a_comparison_of_another_length_keeps_its_shares() -> None:
    for figure in ("8", "3", "7", "branchnorm:T"):
        for each in experiments(figure, steps=1500):
            assert each.config.train.warmup == 60
            assert "-steps1500-" in each.name
    assert {c.train.steps for _, c in rows("8", steps=1500)} == {1500}
    assert experiments("8", steps=6000) == experiments("8")


def test_branchnorm_3_has_the_norm_of_every_step_of_the_ramp_of_the_comparison() -> None:
    longer = {(n, c.model.encoder_layers, c.train.seed): c for n, c in rows("8")}
    for name, config in rows("3"):
        train, whole = config.train, longer[name, config.model.encoder_layers, config.train.seed]
        assert train.steps == train.warmup == 240
        assert all(is_due(row, config.probes.every) for row in range(240))
        assert (config.probes.names, config.probes.update_every) == (("grad_norm",), 10)
        assert (config.model, config.data) == (whole.model, whole.data)
        rates = [[learning_rate(one.train, row) for row in range(240)] for one in (config, whole)]
        assert rates[0] == rates[1]  # the first rows of that run, bit for bit


def test_branchnorm_5_crosses_depth_with_the_size_of_the_data() -> None:
    cells = Counter((name, c.model.encoder_layers, c.data.fraction) for name, c in rows("branchnorm:5"))
    assert len(cells) == 18
    assert set(cells.values()) == {3}
    assert {fraction for *_, fraction in cells} == {0.01, 0.1, 1.0}
    for _, config in rows("branchnorm:5"):
        by_protocol(config)
        assert config.train.steps == 400
    paper = rows("branchnorm:5", scale="paper", data=TEXT)
    assert {(c.data.fraction, c.model.dropout) for _, c in paper} == {(0.01, 0.4), (0.1, 0.2), (1.0, 0.1)}


def test_branchnorm_1_at_full_size() -> None:
    paper = rows("1", scale="paper", data=TEXT)
    assert {c.model.encoder_layers for _, c in paper} == {6, 12, 18, 24, 30}
    assert {name for name, _ in paper} == {"postln", "deepnorm"}


def test_branchnorm_4_is_50_layers_at_full_size() -> None:
    paper = rows("4", scale="paper", data=TEXT)
    assert {(name, c.model.encoder_layers) for name, c in paper} == {
        (name, 50) for name in ("deepnorm", "branchnorm", "branchnorm T=1")
    }


def test_branchnorm_6_is_a_whole_grid_of_the_papers_shares_and_of_its_rates_scaled_by_width() -> None:
    cells = Counter((name, c.train.warmup, round(c.train.lr, 9)) for name, c in rows("6"))
    rates = (4e-3, 6.4e-3, 8e-3, 1.2e-2)
    assert cells == {(n, w, r): 6 for n in ("deepnorm", "branchnorm") for w in (0, 1, 5, 20) for r in rates}
    assert {(c.train.steps, c.model.T, c.probes.names) for _, c in rows("6")} == {(500, 20, ("none",))}
    paper = {(c.train.warmup, c.train.lr) for _, c in rows("6", scale="paper", data=TEXT)}
    assert paper == {(w, r) for w in (0, 100, 1000, 4000) for r in (5e-4, 8e-4, 1e-3, 1.5e-3)}
    assert {c.model.encoder_layers for _, c in rows("6", scale="paper", data=TEXT)} == {100}


def test_branchnorm_7_and_t_differ_in_the_ramp_alone() -> None:
    for figure, scale in (("7", "tiny"), ("branchnorm:T", "tiny"), ("7", "paper"), ("branchnorm:T", "paper")):
        found = rows(figure, scale=scale, data=TEXT)
        assert len({c.train.warmup for _, c in found}) == len({c.train.steps for _, c in found}) == 1
        ramps = {120} if scale == "tiny" else {4000}
        if figure == "branchnorm:T":  # the paper's shares of the run
            ramps = {3, 12, 120, 600} if scale == "tiny" else {100, 400, 4000, 20_000}
        assert {c.model.T for _, c in found} == ramps
        own = (5e-4, 1.5e-3) if (figure, scale) == ("branchnorm:T", "paper") else (found[0][1].train.lr,)
        assert {c.train.lr for _, c in found} == {*own}
        assert {c.model.growth for _, c in found} == ({"linear", "exp", "sigmoid"} if figure == "7" else {"linear"})
    shares = [config.model.T / config.train.steps for _, config in rows("branchnorm:T")]
    assert {*shares} == {*protocol.SHARES}


def test_rates_are_chosen_from_four_until_the_best_is_within() -> None:
    runs = [*protocol.choice(6, {}), *protocol.choice(18, {})]
    assert len(runs) == (5 + 4) * 4 * 2
    assert {run.config.train.seed for run in runs} == {100, 101}
    for run in runs:
        by_protocol(run.config)
        assert run.config.train.steps == 1500
    inf, nan = float("inf"), float("nan")
    assert protocol.best({1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}) == (2e-3, None)
    assert protocol.best({1e-3: 1.0, 2e-3: 2.0, 4e-3: 3.0}) == (1e-3, 5e-4)
    assert protocol.best({1e-3: 3.0, 2e-3: 2.0, 4e-3: 1.0}) == (4e-3, 8e-3)
    assert protocol.best({1e-3: nan, 2e-3: 2.0, 4e-3: inf}) == (2e-3, None)
    assert protocol.best({protocol.LEAST_RATE: 1.0, 1e-3: 2.0}) == (protocol.LEAST_RATE, None)


def test_the_deepest_models_vary_rate_and_ramp_about_the_recipe_of_figures() -> None:
    runs = list(protocol.deepest(Recipe("tiny", {})))
    cells = Counter((c.train.lr, c.model.T) for c in (run.config for run in runs))
    assert cells == {(lr, T): 6 for lr in (3e-4, 1e-3) for T in (1, 6, 100)}
    short = {"seed": 3, "steps": 160, "warmup": 40}
    usual = resolve({"train": short, "data": {"seed": 3}}, depth=200)
    same = next(run.config for run in runs if (run.config.train.lr, run.config.model.T) == (3e-4, 6))
    assert same.model_copy(update={"probes": usual.probes}) == usual


def test_deepnet_3_measures_every_depth_at_the_start_and_at_step_100_and_follows_the_loss_at_18_layers() -> None:
    early = [(n, c) for n, c in rows("deepnet:3") if c.train.warmup == 4000]
    late = [(n, c) for n, c in rows("deepnet:3") if c.train.warmup != 4000]
    assert {(c.train.lr, c.train.steps) for _, c in early} == {(5e-4, 101)}
    assert len(early) == 4 * 4 * 5
    assert all(is_due(0, c.probes.every) and is_due(100, c.probes.every) for _, c in early)
    assert {(c.model.encoder_layers, c.train.lr, c.train.warmup, c.train.steps) for _, c in late} == {
        (18, 3e-4, 40, 160)
    }
    assert len(late) == 4 * 5


def test_deepnet_4_has_every_step_of_each_variant() -> None:
    variants: dict[tuple[str, int], set[int]] = {}
    for name, config in rows("deepnet:4"):
        variants.setdefault((name, config.train.warmup), set()).add(config.train.seed)
        assert (config.model.encoder_layers, config.train.lr, config.train.steps) == (18, 5e-4, 101)
        assert (config.probes.every, config.probes.update_every) == (1, 1)
        assert set(config.probes.names) == {"ln_input", "activation_grad_norm", "grad_norm", "model_update"}
    both = (*GAIN_1, "postln", "postln-init")
    warm = {(name, 4000) for name in (*both, "deepnorm", "branchnorm")}
    assert variants.keys() == {(name, 0) for name in both} | warm
    ten = {("postln", 0), ("postln gain=1", 0)}
    assert all(variants[key] == set(range(3, 13)) for key in ten)
    assert all(seeds == {3, 4, 5, 6, 7} for key, seeds in variants.items() if key not in ten)


def test_the_table_has_every_architecture_at_three_depths_with_the_presets_recipe_or_its_own() -> None:
    assert rows("table") == rows("deepnet:6")
    cells = Counter((name, c.model.encoder_layers, c.model.decoder_layers) for name, c in rows("table"))
    assert cells == {(name, n, n): 3 for name in ARCHS for n in (6, 18, 50)}
    for name, config in rows("table"):
        train = config.train
        assert (train.lr, train.warmup, train.steps) == (3e-4, 0 if name == "tfixup" else 40, 160)
        # the ramp is 4 % of the run; 100 is recorded where nothing ramps
        assert (config.model.T, config.probes.names) == (6 if name == "branchnorm" else 100, ("none",))
    paper = rows("deepnet:6", scale="paper", data=TEXT)
    assert {c.model.decoder_layers for _, c in paper} == {*range(10, 101, 10)}
    assert {(c.train.steps, c.train.accumulate, c.model.dropout) for _, c in paper} == {(8000, 1, 0.4)}


def test_deepnet_7_varies_one_setting_at_a_time() -> None:
    base = {"lr": 1e-3, "sentences": 16, "width": (64, 128, 2)}
    for scale in ("tiny", "paper"):
        found: Counter[int] = Counter()
        for name, config in rows("deepnet:7", scale=scale, data=TEXT):
            model = config.model
            own = {"lr": config.train.lr, "sentences": config.data.sentences}
            own["width"] = (model.d_model, model.d_ffn, model.heads)
            assert (name, model.encoder_layers, model.decoder_layers) == ("deepnorm", 18, 18)
            if scale == "tiny":
                assert (config.train.warmup, config.train.steps) == (75, 300)
                found[sum(own[key] != base[key] for key in base)] += 1
            else:
                full = (own["lr"] != 1e-3) + (own["width"] != (512, 2048, 8)) + (config.train.accumulate != 128)
                found[full] += 1
        assert found == {0: 3, 1: 18}


def test_deepnet_8_doubles_the_depth() -> None:
    depths = Counter(c.model.encoder_layers for name, c in rows("deepnet:8") if name == "deepnorm")
    assert depths == dict.fromkeys((3, 6, 12, 24, 48), 3)
    assert {(c.train.lr, c.train.warmup, c.train.steps) for _, c in rows("deepnet:8")} == {(7e-4, 100, 400)}
    assert {c.model.depth for _, c in rows("deepnet:8", scale="paper", data=TEXT)} == {12, 20, 100, 200, 1000}


def test_admin_5_is_drawn_at_full_size_from_runs_of_branchnorm_8() -> None:
    assert folder("admin:5", "paper") == folder("branchnorm:8", "paper")
    own, all_ = ({each.name for each in experiments(name, "paper", data=TEXT)} for name in ("admin:5", "branchnorm:8"))
    assert own < all_
    for _, config in rows("admin:5", scale="paper", data=TEXT):
        assert (config.model.encoder_layers, config.model.d_model) == (18, 512)
        assert {"grad_norm", "update_ratio"} <= {*chosen(config.probes.names)}


@pytest.mark.parametrize(("figure", "layers"), [("admin:6", 6), ("admin:7", 18)])
def test_admins_maps_follow_the_branches_of_models_of_their_depth(figure: str, layers: int) -> None:
    assert folder(figure) == "tiny/admin-6"
    for _, config in rows(figure):
        assert (config.train.lr, config.train.warmup, config.train.steps) == (7e-4, 150, 600)
        assert config.probes.names == ("branch_variance",)
    for _, config in rows(figure, scale="paper", data=TEXT):
        model, train, data = config.model, config.train, config.data
        assert (model.encoder_layers, model.d_model, model.d_ffn, model.tie) == (layers, 512, 2048, "all")
        assert (train.optimizer, train.lr, train.warmup, train.weight_decay) == ("radam", 1e-3, 8000, 0)
        assert data.sentences * data.max_length * train.accumulate == 4 * 8192
        assert config.probes.names == ("branch_variance",)


def test_admin_grid_crosses_learning_rate_with_beta2() -> None:
    for scale, unit in (("tiny", 1e-3), ("paper", 1e-4)):
        found = rows("admin:grid", scale=scale, data=TEXT)
        cells = Counter((name, round(c.train.lr / unit, 9), c.train.beta2) for name, c in found)
        assert {name for name, *_ in cells} == {*(ADMIN[:2] if scale == "tiny" else ADMIN)}
        assert {cell[1:] for cell in cells} == {(n, beta) for n in range(1, 6) for beta in (0.99, 0.995, 0.999)}
        assert (len(cells), {*cells.values()}) == (30 if scale == "tiny" else 45, {3})
        assert {(c.train.schedule, c.train.warmup, c.train.beta1) for _, c in found} == {("linear", 1, 0.9)}
    tiny, paper = (rows("admin:grid", scale=scale, data=TEXT)[0][1] for scale in ("tiny", "paper"))
    assert (tiny.train.steps, tiny.train.optimizer) == (160, "adamw")
    assert (paper.train.steps, paper.train.optimizer) == (100_000, "radam")
    assert (paper.model.d_ffn, paper.model.heads, paper.model.dropout, paper.data.max_length) == (1024, 4, 0.3, 256)


def test_one_step_runs_are_one_step_runs() -> None:
    for figure in ("claims:fast", "deepnet:5", "admin:4"):
        runs = experiments(figure)
        assert {each.kind for each in runs} == {"onestep"}
        assert {each.config.data.sentences for each in runs} == {16}
        by_label: dict[str, set[int]] = {}
        for each in runs:
            by_label.setdefault(label(each.config.model), set()).add(each.config.model.encoder_layers)
        deep = {100} if figure == "deepnet:5" else set()
        assert by_label.pop("branchnorm alpha=0") == {18}
        assert by_label.pop("postln/preln", None) == ({18} if figure == "claims:fast" else None)
        assert by_label.keys() == {*ONE_STEP}
        for name, layers in by_label.items():
            extra = deep if name in ("postln", "postln gain=1", "deepnorm", "branchnorm") else set()
            assert layers == {3, 6, 12, 18, 25, 50} | extra
    deepest = [each.config.train.seed for each in experiments("deepnet:5") if each.config.model.depth == 200]
    assert Counter(deepest) == {3: 4, 4: 4, 5: 4}
    assert {c.model.T for n, c in rows("claims:fast") if n == "branchnorm"} == {4000}


def test_scale_paper_is_the_papers_recipe_and_needs_data() -> None:
    with pytest.raises(UsageError, match=r"branchnorm:8 at scale paper needs text of yours: .*--data text:SRC,TGT"):
        experiments("8", "paper")
    for name, config in rows("8", scale="paper", data=TEXT):
        model, train, data = config.model, config.train, config.data
        assert (model.d_model, model.d_ffn, model.heads) == (512, 2048, 8)
        assert (1 if name == "branchnorm T=1" else 4000) == model.T
        assert (train.lr, train.warmup, train.steps) == (5e-4, 4000, 100_000)
        assert (train.beta1, train.beta2, train.eps, train.weight_decay, train.clip_norm) == (0.9, 0.98, 1e-8, 1e-4, 0)
        assert data.sentences * data.max_length * train.accumulate == 128 * 4096
        assert data.source == TEXT["source"]
    depths = {c.model.encoder_layers for _, c in rows("5", scale="paper", data=TEXT)}
    assert depths == {6, 18, 50, 100, 250, 500}
    assert {c.model.dropout for _, c in rows("deepnet:3", scale="paper", data=TEXT)} == {0.4}


def test_the_users_data_and_seeds_reach_every_run_but_not_the_figures_axis() -> None:
    data = {**TEXT, "valid": "v.de,v.en", "vocab_size": 500, "fraction": 0.5}
    runs = experiments("branchnorm:5", data=data, seeds=[11])
    assert {(e.config.data.source, e.config.data.valid, e.config.data.vocab_size) for e in runs} == {
        (TEXT["source"], "v.de,v.en", 500)
    }
    assert {e.config.train.seed for e in runs} == {11}
    assert {e.config.data.fraction for e in runs} == {0.01, 0.1, 1.0}
    assert {e.config.data.fraction for e in experiments("8", data=data)} == {0.5}


def test_commands_minutes_and_errors() -> None:
    assert command("8") == command("branchnorm:8") == "stabilitylab sweep branchnorm:8 --scale tiny"
    assert command("admin:4") == command("claims:fast") == "stabilitylab claims --fast"  # the runs of both
    assert command("deepnet:4", "paper") == "stabilitylab sweep deepnet:4 --scale paper --data text:SRC,TGT"
    for figure in SWEEPS:
        stated = minutes(figure)
        assert stated is None or stated > 0, f"{figure}: measured core-minutes are positive"
        assert minutes(figure, "paper") is None
    with pytest.raises(UsageError, match=r"unknown figure with a sweep 'branchnorm:2'; choose one of"):
        experiments("2")
    with pytest.raises(UsageError, match="unknown scale 'huge'; choose one of tiny, h200, paper"):
        experiments("8", "huge")
    with pytest.raises(UsageError, match=r"unknown setting 'data\.colour'"):
        experiments("8", data={"colour": "red"})


def test_names_say_what_varies() -> None:
    config = resolve({"model": {"arch": "branchnorm", "T": 1}, "train": {"seed": 3}}, depth=12)
    assert name_of(config) == "branchnorm-T1-12-s3"
    assert name_of(config, "warmup0") == "branchnorm-T1-12-warmup0-s3"
