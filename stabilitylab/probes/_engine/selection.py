"""From names to boards: which probes run on this model, at which sites, and which were dropped and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ...errors import UsageError, meant
from ...inputs import expression
from ...schema import Row
from ..base import PROBES, CurvatureProbe, ParameterProbe, Probe
from ..parameters.pieces import Parameters
from ..places.finding import find
from ..places.sites import KINDS, LISTED, Site, Sites, stream
from .board import Board

Names = str | Sequence[str]
LOSS = (
    "needs the loss of a fixed batch: give curvature_loss=, a function that returns it, or let reference= return it, "
    "as a number or as .loss"
)
NEEDS = {
    "optimizer": "needs optimizer=, the optimizer",
    "reference": "needs reference=, a function that runs the model on a fixed batch",
    "loss": LOSS,
}
NEEDED_ON = {"update": ("optimizer",), "reference": ("reference",), "curvature": ("optimizer", "loss")}
NOUNS = {  # the places of a kind, in messages
    **dict.fromkeys(("stream", "hidden", "hidden_by_layer", "modules_of_layers"), "layers"),
    "outputs": "stacks of layers",
    "activations": "feed-forward activations",
    "attentions": "attention modules",
    "logits": "projection onto a vocabulary",
    "routers": "routers of experts",
    "mixings": "streams that its layers mix (hyper-connections)",
}
# The cheapest set that tells where a model breaks, for every row: norms alone, and of layers, not of their sub-layers.
STANDARD: tuple[str, ...] = ("grad_norm", "activation_grad_norm", "ln_input", "residual_norm")


def chosen(names: Names) -> dict[str, bool]:
    """Return probe names in order, each with True if the caller named it. "default", "all", "standard", "none" and
    "-name" are groups; "all" leaves out probes that say ``by_name``."""
    listed = _listed(names)
    if all(name.startswith("-") for name in listed):
        listed = ["default", *listed]
    picked: dict[str, bool] = {}
    for name in listed:
        if name in ("default", "all"):
            asked = {known for known, p in PROBES.items() if p.default or (name == "all" and not p.by_name)}
            picked |= {known: picked.get(known, False) for known in PROBES if known in asked}
        elif name == "standard":
            picked |= {known: picked.get(known, False) for known in STANDARD}
        elif name.startswith("-"):
            picked.pop(known := PROBES.resolve(name[1:]), None)
            for companion in PROBES[known].brings:
                picked.pop(companion, None)
        elif name != "none":
            picked[known := PROBES.resolve(name)] = True
            for companion in PROBES[known].brings:
                picked.setdefault(companion, False)
    return picked


def _listed(names: Names) -> list[str]:
    """Return the names that the caller gave, one by one."""
    listed = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in listed if name.strip()]


def only_standard(names: Names) -> set[str]:
    """Return the probes that nothing but the group "standard" asks for: they keep its columns and places."""
    listed = _listed(names)
    rest = [name for name in listed if name != "standard" and not name.startswith("-")]
    return set(STANDARD) - set(chosen([*rest, "none"])) if "standard" in listed else set()


def find_sites(model: nn.Module, output_site: str | None = None, own: Mapping[str, str] | None = None) -> Sites:
    """Return every site of ``model``, and which probes look there; the arguments are those of
    :func:`stabilitylab.probes.places.finding.find`."""
    found = find(model, output_site, own)
    readers = {kind: [name for name, probe in PROBES.items() if _looks(probe, kind)] for kind in LISTED}
    return replace(found, readers=readers)


def _looks(probe: type[Probe], kind: str) -> bool:
    """Return True if a probe looks at places of this kind, alone or as a part of the residual stream or of all hidden
    values."""
    several = {
        "stream": ("layers", "branches"),
        "modules_of_layers": ("layers",),
        "hidden": ("layers", "activations"),
        "hidden_by_layer": ("layers", "activations"),
    }
    at = getattr(probe.at, "__name__", "")
    return at == kind or kind in several.get(at, ())


def split_sites(sites: str | Mapping[str, str] | None) -> tuple[dict[str, str], str | dict[str, str] | None]:
    """Return what a caller says of ``sites``: own places by kind, and what narrows them, for all probes or by probe."""
    if sites is None or isinstance(sites, str):
        return {}, sites
    own = {key: pattern for key, pattern in sites.items() if key in KINDS}
    known = [*KINDS, *PROBES]
    if unknown := [key for key in sites if key not in known]:
        hint = meant(unknown[0], known)
        raise UsageError(f"sites: {unknown[0]!r} is neither a kind ({', '.join(KINDS)}) nor a probe.{hint}")
    return own, {key: pattern for key, pattern in sites.items() if key not in KINDS}


def boards_for(
    names: Names,
    sites: Sites,
    parameters: Parameters,
    only: str | Mapping[str, str] | None,
    *,
    lacks: Iterable[str],
    elsewhere: bool = False,
) -> tuple[list[Board], list[tuple[str, str]]]:
    """Return a board for each probe that finds its sites, and (probe, reason) for default ones that do not.

    ``only``: a regular expression that site names must match, for all probes or by probe. ``lacks``: of "optimizer",
    "reference" and "loss", those that the watcher was not given. ``elsewhere``: what is missing here may be on another
    rank.
    """
    boards: list[Board] = []
    dropped: list[tuple[str, str]] = []
    trimmed = only_standard(names)
    for name, named in chosen(names).items():
        probe = PROBES[name]()
        if name in trimmed:
            probe.kept = ("value",)
        pattern = only.get(name) if isinstance(only, Mapping) else only
        chosen_sites = None if pattern is None else expression(pattern, "only:", "one that names of sites match")
        found = [site for site in type(probe).at(sites) if chosen_sites is None or chosen_sites.search(site.name)]
        if name in trimmed and type(probe).at is stream:
            found = _of_layers(found)
        # a reference may return a loss, which shows when it runs: enough for one that the caller named
        told = {"loss"} if named and "reference" not in lacks else set()
        reason = _missing(probe, found, parameters, sites, pattern, set(lacks) - told)
        if not reason:
            boards.append(_board(probe, found, parameters))
        elif named and not elsewhere:
            raise UsageError(f"probe {name!r} {reason}.")
        else:
            dropped.append((name, reason))
    return boards, dropped


def extended(boards: Sequence[Board], found: Sequence[Board]) -> list[Board]:
    """Add the places of ``found`` to the boards of the same tables, behind their own; return the boards that are
    new. A probe may make its sites anew at each call: a site of the same module, name and take is known."""
    own = {board.table.name: board for board in boards}
    for board in found:
        if board.sites and board.table.name in own:
            board_of_table = own[board.table.name]
            known = {_identity(site) for site in board_of_table.sites}
            board_of_table.extend([site for site in board.sites if _identity(site) not in known])
    return [board for board in found if board.table.name not in own]


def _identity(site: Site) -> tuple[str, nn.Module, str]:
    return site.name, site.module, site.take


def left_out(sites: Sites, chosen: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return, for the tables of these probes, the modules of their kind that have no row: table -> module -> reason."""
    kinds = {name: getattr(PROBES[name].at, "__name__", "") for name in chosen}
    return {name: dict(sites.left_out[kind]) for name, kind in kinds.items() if sites.left_out.get(kind)}


def _missing(
    probe: Probe, found: Sequence[Site], parameters: Parameters, sites: Sites, pattern: str | None, lacks: Iterable[str]
) -> str:
    for need in NEEDED_ON.get(probe.on, ()):
        if need in lacks:
            return NEEDS[need]
    if probe.in_one_process and not parameters.alone:
        return "is taken in a single process: it does not know yet how several ranks share a batch or a layer"
    if probe.in_one_stage and parameters.staged:
        return "does not know how the stages of a pipeline share a batch"
    if (probe.in_one_stage or isinstance(probe, CurvatureProbe)) and parameters.split:
        return "does not know parameters that share= says are split"
    if isinstance(probe, (ParameterProbe, CurvatureProbe)):
        return probe.lacks(parameters)
    if found:
        return ""
    kind = type(probe).at.__name__
    noun = NOUNS.get(kind, kind)
    among = f" whose name matches {pattern!r}" if pattern else ""
    near = ", ".join(sites.nearest(kind)) or "no modules at all"
    return f"finds no {noun} in this model{among}; nearest are {near}"


def _of_layers(found: Sequence[Site]) -> list[Site]:
    """Return the input of each stack and the output of each layer: the last of the places in a layer."""
    return list({(site.stack, site.layer): site for site in found}.values())


def _board(probe: Probe, found: Sequence[Site], parameters: Parameters) -> Board:
    if isinstance(probe, ParameterProbe):
        return Board(probe, probe.rows(parameters), probe.fitting(parameters))
    if isinstance(probe, CurvatureProbe):
        return Board(probe, [Row("model")], tuple(probe.columns))
    tapped = {tap for site in found for tap in site.taps}
    reads = {column: rule.of or column for column, rule in probe.columns.items()}
    columns = [column for column, raw in reads.items() if raw not in probe.taps or raw in tapped]
    columns = [column for column in columns if probe.keeps(column)]
    return Board(probe, [site.row for site in found], columns, found)
