"""``lr-find``: the best and the largest safe learning rate of a model, by trials."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import UsageError
from ..lr_find.search import HORIZON
from ..printable import screen
from ._factory import GIVES, OF_CHECK, OF_LR_FIND, made_by, named
from ._options import JSON, QUIET, RUNS, VERBOSE, given_flags, print_json
from .base import command

if TYPE_CHECKING:
    from ..config import Config
    from ..lr_find.result import RateAnswer
    from ..lr_find.scale import ScaledRates
    from ..lr_find.subject import RateSubject
    from ..terminal.rates import RateDisplay

PANELS = ("Reference model", "Plan", "Search")
_model, _plan, _budget = (partial(typer.Option, rich_help_panel=panel) for panel in PANELS)


@command("lr-find", rank=25)
def lr_find(
    factory: Annotated[
        str | None,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY",
            help=f"For a model of your own: a function that returns {GIVES.format(takes='lr_find')}.",
            show_default=False,
        ),
    ] = None,
    horizon: Annotated[int | None, _plan(min=20, help="Updates of the planned run.", show_default=f"{HORIZON}")] = None,
    warmup: Annotated[
        int | None, _plan(min=0, help="Updates of the planned warm-up.", show_default="the factory's, or by preset")
    ] = None,
    delta: Annotated[
        float | None,
        _plan(
            help="The loss of a safe rate may exceed the lowest loss by this much.",
            show_default=".05, or a tenth of the fall",
        ),
    ] = None,
    seeds: Annotated[
        str | None, _plan(help="The first seed searches, the others repeat its answers.", show_default="0,1,2")
    ] = None,
    widths: Annotated[
        str | None, _plan(help="A search for each width, such as 64,128,256; your function gets it as scale=.")
    ] = None,
    arch: Annotated[str | None, _model(help="Architecture, see 'list archs'.", show_default="branchnorm")] = None,
    depth: Annotated[int | None, _model(help="Layers in all: 36 is 18 a side.", show_default="36")] = None,
    d_model: Annotated[int | None, _model("--d-model", help="Width; blocks and heads keep their proportion.")] = None,
    data: Annotated[str | None, _model(help="As for 'probe'.", show_default="synthetic")] = None,
    valid: Annotated[str | None, _model(help="As for 'probe'.")] = None,
    stack: Annotated[
        Literal["encoder-decoder", "encoder", "decoder"] | None, _model(metavar="STACK", help="As for 'probe'.")
    ] = None,
    model: Annotated[Literal["transformer", "gpt2", "llama"] | None, _model(help="As for 'probe'.")] = None,
    preset: Annotated[str | None, _model(help="tiny, small or base.", show_default="tiny")] = None,
    lr: Annotated[float | None, _model(help="The learning rate to try first.", show_default="by preset")] = None,
    config: Annotated[Path | None, _model(help="TOML file, as for 'probe'.")] = None,
    set_: Annotated[
        list[str] | None, _model("--set", metavar="SECTION.KEY=VALUE", help="Any setting, as for 'probe'.")
    ] = None,
    updates: Annotated[int | None, _budget(min=1, help="The most updates of all trials together.")] = None,
    minutes: Annotated[float | None, _budget(help="The most minutes.")] = None,
    jobs: Annotated[int, _budget(min=1, help="Trials at a time, each in a process of its own.")] = 1,
    out: Annotated[
        Path | None, _budget(help="Folder of the trials.", show_default="runs/lr-find-NAME, the first that is free")
    ] = None,
    resume: Annotated[
        bool,
        _budget(
            "--resume",
            help="Go on with the search in --out by its own plan, or with the latest of the model that you name. A "
            "function, and --widths, have to be named again.",
        ),
    ] = False,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Find the best learning rate (median: .008 nats above the true best), the largest safe rate and least warm-up.

    Each number has an interval. Trials run the schedule of the planned run and are stopped early; a trial that neither
    fails nor loses goes on to the horizon. A search costs about ten times the updates of the planned run; --updates and
    --minutes limit it. Ctrl-C keeps the results so far, and --resume continues. In twelve small models the loss at the
    best rate was .008 nats above the loss at the true best rate in the median, and .11 to .33 in three; no safe rate
    was unsafe. docs/lr-find.md has the rules.

    Exit codes: 0 a best rate was found, if only for part of the horizon; 1 there is none (the model fails at every
    rate, the loss is constant, or the budget ended too early); 2 usage; 4 the factory's module or the data are missing,
    or the factory fails; 5 environment; 130 / 143 stopped by Ctrl-C / SIGTERM, after the answer so far.
    """
    from ..lr_find.find import check_numbers
    from ..lr_find.folder import plan_at
    from ..terminal.rates import RateDisplay

    own_seeds = None if seeds is None else tuple(_numbers("--seeds", seeds))
    check_numbers(horizon, own_seeds or (), updates, minutes)
    reference = {
        "--arch": arch, "--depth": depth, "--d-model": d_model, "--data": data, "--valid": valid, "--stack": stack,
        "--model": model, "--preset": preset, "--lr": lr, "--config": config, "--set": set_,
    }  # fmt: skip
    given = [name for name, value in reference.items() if value]
    begun = None
    if factory is None and not given:
        if not resume:
            raise UsageError("name a model: your function as PACKAGE.MODULE:FACTORY, or a reference model with --arch.")
        begun = _begun(out, widths)
    if factory is not None and given:
        raise UsageError(f"{given[0]} is about reference models: leave it out, or leave out {factory}.")
    settings = _settings(preset, stack, model, data, valid, lr, config, set_)

    def configs(plan: Mapping[str, Any]) -> dict[int, Config]:
        if begun is not None:
            return {0: _of_plan(begun, plan)}
        layers = 36 if depth is None else depth
        return {
            width: _config(arch or "branchnorm", layers, width or d_model, settings, plan)
            for width in _widths(widths) or [0]
        }

    asked = {"horizon": horizon, "seeds": own_seeds, "warmup": warmup, "delta": delta}
    plan = _planned(asked, {})
    if begun is not None and out is not None:
        folder = out
    elif factory is None:
        first = next(iter(configs(plan).values()))
        folder = _folder(out, f"{first.model.arch}-{first.model.depth}", resume)
    else:
        folder = _folder(out, factory.replace(":", "-").replace(".", "-"), resume)
    if resume:
        plan = _planned(asked, plan_at(folder))
    if factory is None:
        makers = {width: partial(subject_of_config, one) for width, one in configs(plan).items()}
    else:
        makers = _of_factory(factory, plan, _widths(widths))
    with RateDisplay(screen(stderr=True), quiet) as display:
        found = _search(makers, folder, display, plan, (updates, minutes), jobs, resume)
    return _show(found, folder, as_json, quiet)


def _planned(asked: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan: the given values, else those that a continued search was begun with, else the defaults."""
    from ..lr_find.halving import SEEDS

    usual = {"horizon": HORIZON, "seeds": SEEDS, "warmup": None, "delta": None}
    return {name: value if value is not None else before.get(name, usual[name]) for name, value in asked.items()}


def subject_of_factory(factory: str, plan: Mapping[str, Any], width: int) -> RateSubject:
    """Return the subject of a user's function; it is called anew for every trial, with the random states of its seed.

    ``plan``: horizon, seeds, and the warm-up of the command line (None: that of the function). ``width``: its
    ``scale``; 0 for a function without one.
    """
    from ..lr_find.subject import model_subject
    from ..train.environment import prepare_process

    prepare_process(1)

    def call() -> Mapping[str, Any]:
        scale = {"scale": width} if width else {}
        return made_by(factory, "lr-find", "lr_find", OF_LR_FIND, OF_CHECK, scale)

    given = dict(call())
    warmup = plan["warmup"] if plan["warmup"] is not None else given.get("warmup")
    batches = given.get("batches")  # a loader of a stream has no length, and so no truth value
    return model_subject(
        given["model"],
        [given["batch"]] if batches is None else batches,
        given["loss_fn"],
        given.get("optimizer"),
        horizon=plan["horizon"],
        seeds=plan["seeds"],
        held_out=given.get("held_out"),
        schedule=given.get("schedule", "constant"),
        warmup=warmup,
        clipping=given.get("clipping", 0.0),
        precision=given.get("precision", "fp32"),
        name=f"{factory}, scale {width}" if width else factory,
        make=lambda seed: _of_call(call()),
    )


def _of_call(given: Mapping[str, Any]) -> tuple[Any, Any]:
    from ..lr_find.subject import made_by as copied

    model, optimizer = given["model"], given.get("optimizer")
    from torch import nn

    return (model, optimizer) if isinstance(model, nn.Module) else copied(model, optimizer)


def subject_of_config(config: Config) -> RateSubject:
    """Return the subject of a reference model."""
    from ..data import load_data
    from ..lr_find.reference import reference_subject
    from ..train.environment import prepare_process, resolve_device
    from ..train.footprint import check_memory, estimate

    prepare_process(config.train.threads)
    device = resolve_device(config.train)
    dataset = load_data(config.data, stack=config.model.stack)
    check_memory(estimate(config, dataset, device, False), device)
    return reference_subject(config, dataset, device)


def _of_factory(factory: str, plan: Mapping[str, Any], widths: Sequence[int]) -> dict[int, Callable[[], RateSubject]]:
    function = named(factory, "lr-find")
    if widths and "scale" not in inspect.signature(function).parameters:
        raise UsageError(f"--widths calls {factory} with scale=, which it does not take: give it that argument.")
    return {width: partial(subject_of_factory, factory, plan, width) for width in widths or [0]}


def _search(
    makers: Mapping[int, Callable[[], RateSubject]],
    folder: Path,
    display: RateDisplay,
    plan: Mapping[str, Any],
    limits: tuple[int | None, float | None],
    jobs: int,
    resume: bool,
) -> RateAnswer | ScaledRates:
    from ..lr_find.find import plan_of, search_rates
    from ..lr_find.scale import scaled
    from ..lr_find.trials import Budget
    from ..lr_find.workers import RateWorkers

    def one(subject: RateSubject, make: Callable[[], RateSubject], out: Path, budget: Budget) -> RateAnswer:
        wanted = plan_of(subject, plan["horizon"], plan["seeds"], plan["delta"])
        with RateWorkers(jobs, make, wanted, out) if jobs > 1 else nullcontext() as workers:
            return search_rates(
                subject, wanted, out, budget, resume=resume, audience=display, workers=workers, jobs=jobs
            )

    budget = Budget(*limits)
    if 0 in makers:
        return one(makers[0](), makers[0], folder, budget)
    return scaled(
        list(makers), lambda width: makers[width](),
        lambda width, subject, out, own: one(subject, makers[width], out, own), folder, budget,
    )  # fmt: skip


def _settings(
    preset: str | None, stack: str | None, model: str | None, data: str | None, valid: str | None, lr: float | None,
    config: Path | None, set_: Sequence[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """Merge file < flags < ``--set``; a flag that was not given is None."""
    from ..config import merge, parse_set, read_config_file

    sections = {"model": {"stack": stack, "design": model}, "data": {"source": data, "valid": valid}}
    flags = given_flags({"preset": preset, **sections, "train": {"lr": lr}})
    return merge(read_config_file(config) if config else {}, flags, parse_set(set_ or ()))


def _config(arch: str, depth: int, width: int | None, settings: Mapping[str, Any], plan: Mapping[str, Any]) -> Config:
    """Return the configuration of a planned run."""
    from ..config import merge, resolve
    from ..lr_find.reference import sizes
    from ..models import ARCHS
    from ..models.idle import refuse_idle

    train = {"steps": plan["horizon"]} | ({} if plan["warmup"] is None else {"warmup": plan["warmup"]})
    wanted = merge(settings, {"model": {"arch": ARCHS.resolve(arch)}, "train": train})
    found = resolve(wanted, depth=depth)
    refuse_idle(found.model)
    if width:
        found = resolve(merge(wanted, {"model": sizes(width, found.model)}), depth=depth)
    seed = plan["seeds"][0]
    return found.changed(train={"seed": seed}, data={"seed": seed})


def _begun(out: Path | None, widths: str | None) -> Config:
    """Return the configuration of the reference model whose search in ``out`` goes on."""
    from ..config import complete, validated
    from ..lr_find.folder import is_search, plan_at

    again = "name the model again, as PACKAGE.MODULE:FACTORY or with the options of a reference model"
    if out is None:
        raise UsageError(f"--resume needs the folder of the search (--out) or its model: {again}.")
    plan = plan_at(out)
    if not plan:
        raise UsageError(f"there is no search in {out}: {again}.")
    if widths is not None or not is_search(out):
        raise UsageError(f"the search in {out} has several widths: {again}, and --widths.")
    if "config" not in plan:
        raise UsageError(f"the plan in {out} keeps only the name of its model ({plan['model']}): {again}.")
    return validated(complete(plan["config"]))


def _of_plan(config: Config, plan: Mapping[str, Any]) -> Config:
    """Return the configuration of a search that goes on, with the horizon, warm-up and first seed of its plan."""
    seed = plan["seeds"][0]
    train = {"steps": plan["horizon"], "warmup": plan["warmup"], "seed": seed}
    return config.changed(train=train, data={"seed": seed})


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text} must be whole numbers with commas between them.") from error


def _widths(text: str | None) -> list[int]:
    from ..lr_find.scale import check_widths

    return [] if text is None else check_widths(_numbers("--widths", text))


def _folder(out: Path | None, name: str, resume: bool) -> Path:
    """Return the folder of a search: the given one, else the first free name, or for ``resume`` the last that is not
    free."""
    from ..lr_find.folder import is_search

    if out is not None:
        return out
    base = RUNS / f"lr-find-{name}"
    names = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 10_000))]
    free = next(number for number, one in enumerate(names) if not one.exists())
    if not resume:
        return names[free]
    if not free or not (is_search(names[free - 1]) or any(map(is_search, names[free - 1].glob("width-*")))):
        raise UsageError(f"there is no search at {base}: leave out --resume, or name its folder with --out.")
    return names[free - 1]


def _show(found: RateAnswer | ScaledRates, folder: Path, as_json: bool, quiet: bool) -> int:
    """Print the answer; return the exit code."""
    if as_json:
        print_json(found.as_dict())
    else:
        console = screen(piped=100)
        for sentence in found.sentences():
            console.print(sentence)
        if not quiet:
            told = f"trials: {folder} (the picture: stabilitylab report {folder})"
            console.print(told, soft_wrap=True)
    if found.signal is not None:
        return 128 + found.signal
    return 0 if found.outcome == "found" else 1
