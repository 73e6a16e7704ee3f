"""The interface of an architecture (how each sub-layer joins the residual stream), and the registry of all
architectures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ..arch_notes import ROOM, ArchNote, Gains, Option, Stream, add, notes
from ..arch_notes import restored as restored_notes
from ..config import RAMP, ModelConfig, Section
from ..designs import is_design
from ..errors import UsageError, bounded, own_words
from ..inputs import shown
from ..registry import Registry, spelling
from ..settings import Base
from .norms import ELEMENTWISE, new_norm
from .progress import Progress
from .schedules import Schedule
from .sublayers import SubLayer

SMALL = 0.02  # standard deviation of GPT-2's initial weights


@dataclass(frozen=True)
class Place:
    """The place of a sub-layer, or of a whole stack: an architecture knows nothing else of its model."""

    stack: str  # encoder | decoder
    layer: int  # from 1; 0: the stack itself
    sublayer: str  # self_attn | cross_attn | ffn; "": the stack itself
    width: int
    encoder_layers: int
    decoder_layers: int
    norm: str = "layernorm"  # layernorm | rmsnorm
    qkv_gain: float = math.sqrt(0.5)  # initial gain of q, k and v in the base of all architectures
    base: Base = "xavier"  # that base: xavier, gpt2 or normal
    inner_width: int = 0  # of the feed-forward blocks
    bias: bool = True  # of LayerNorms
    norm_alpha: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of DyT and Derf, at attention, ffn and outside layers

    @property
    def layers(self) -> int:
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    @property
    def sublayers(self) -> int:
        """Return the number of sub-layers of the whole model: 2N + 3M, or 2 a layer of a single stack."""
        return 2 * self.encoder_layers + (3 if self.encoder_layers else 2) * self.decoder_layers

    def at(self, layer: int, sublayer: str) -> Place:
        return replace(self, layer=layer, sublayer=sublayer)

    @property
    def stack_sublayers(self) -> int:
        """Return the number of sub-layers of this stack: 3 a layer in a decoder above an encoder, else 2."""
        return (3 if self.stack == "decoder" and self.encoder_layers else 2) * self.layers

    @property
    def index(self) -> int:
        """Return the number of this sub-layer in its stack, from 0."""
        per_layer = self.stack_sublayers // self.layers
        order = ("self_attn", "cross_attn", "ffn") if per_layer == 3 else ("self_attn", "ffn")
        return per_layer * (self.layer - 1) + order.index(self.sublayer)

    def new_norm(self, width: int = 0, bias: bool = True) -> nn.Module:
        number = {"": 2, "ffn": 1}.get(self.sublayer, 0)
        return new_norm(self.norm, width or self.width, bias and self.bias, self.norm_alpha[number])

    def __str__(self) -> str:
        return f"{self.stack}.{self.layer}.{self.sublayer}"


@dataclass(frozen=True)
class Factors:
    """The factors of a parameter on the optimizer's rate, eps and weight decay."""

    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0


def xavier_gain(place: Place, matrix: str) -> float:
    """Return the gain in the base of all architectures, as a multiple of Xavier's standard deviation.

    ``xavier``: 1; for q, k, v 1/sqrt(2) or 1, as ``model.init`` says. ``normal``: that of N(0, .02^2), .02 sqrt((d_in +
    d_out) / 2). ``gpt2``: the same, 1/sqrt(L) smaller for out and fc2, L = 2M sub-layers of a stack of M layers
    (karpathy/nanoGPT 3adf61e1; Inferred: L = 3M in a decoder above an encoder).
    """
    square = ("q", "k", "v", "out") if place.sublayer == "ffn" else ("q", "k", "v", "out", "gate")
    if place.base == "xavier":  # the gate of gated attention is drawn as q
        return place.qkv_gain if matrix in square and matrix != "out" else 1.0
    widths = place.width, place.width if matrix in square else place.inner_width
    residual = place.base == "gpt2" and matrix in ("out", "fc2")
    return SMALL * math.sqrt(sum(widths) / 2) / (math.sqrt(place.stack_sublayers) if residual else 1.0)


def table_gain(place: Place) -> float:
    """Return the gain of embeddings, positions and an untied output in that base, as a multiple of N(0, 1/d)."""
    return 1.0 if place.base == "xavier" else SMALL * math.sqrt(place.width)


class Trunk(nn.Module):
    """The residual stream of one stack outside its layers, neutral here; the final norm, if any, comes after it.

    A stream is a tensor (B, T, D), or a tuple of tensors if layers need more than one; ``shown`` says which of them
    probes read.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()

    def enter(self, x: Tensor) -> Any:
        """Return the embedding as a stream."""
        return x

    def before(self, stream: Any) -> Any:
        """Return the input of the next layer."""
        return stream

    def after(self, stream: Any, y: Any) -> Any:
        """Return the stream behind a layer with output ``y``."""
        return y

    def leave(self, stream: Any) -> Tensor:
        return stream

    def shown(self, stream: Any) -> Tensor | tuple[Tensor, ...]:
        """Return the tensor of a stream that probes read (by default the first), or several (B, T, D), whose mean they
        read. The gradient of several is the sum over these tensors: that of an equal change of all of them."""
        return stream[0] if isinstance(stream, tuple) else stream


class ArchOptions(Section):
    """An architecture's own settings, ``--set arch.KEY=VALUE``: subclass this as ``class Options`` inside the arch."""


class Residual(nn.Module):
    """One sub-layer: F and its norm, joined to the stream by ``forward``. All other attributes and methods are neutral
    defaults that an architecture may replace.

    The docstring of an arch begins with its formula, two spaces, and its source. Every arch writes shortcut(s * x) +
    branch(F): one form, so that equal constants give equal bits. The identities are taps: ``shortcut`` carries s * x,
    ``branch`` carries F, and ``scaled_branch`` carries the term that is added, if that is not F. A tap may carry a
    tuple, of which probes read the mean.
    """

    normalised = True  # each sub-layer has a norm of its own
    is_sum = False  # the stream is a sum of branches, whose norms stand in front of them or behind
    final_norm = False  # each stack ends with a norm of its own
    takes_alpha = False  # model.alpha replaces a constant of this arch
    scheduled = False  # a Schedule drives this arch
    exact_gradient = True  # backward gives the gradient of the loss: no part of the forward is detached
    needs_calibration = False  # this arch needs a calibration pass before step 0
    defined_for: tuple[str, ...] = ("encoder-decoder", "encoder", "decoder")  # values of model.stack
    trunk: type[Trunk] = Trunk  # the stream outside the layers
    output_gain = 1.0  # initial gain of an untied output matrix
    learns = "nothing"  # beyond matrices, biases, and the norms that Post-LN has
    Options: type[ArchOptions] = ArchOptions  # the arch's own settings, with defaults
    recipe: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # settings that the arch's paper insists on
    norm: nn.Module
    layer_number: Tensor

    def __init__(
        self,
        f: SubLayer,
        place: Place,
        *,
        alpha: float | None = None,
        schedule: Schedule | Progress | None = None,
        below: Residual | None = None,  # the sub-layer before this one in the same layer
        options: ArchOptions | None = None,
    ) -> None:
        super().__init__()
        self.options: Any = options or type(self).Options()
        self.place = place
        self.f = f
        if self.normalised:
            self.norm = place.new_norm()
        self.shortcut = nn.Identity()
        self.branch = nn.Identity()
        # in a tuple: the model registers it once, not every sub-layer again
        self._progress: tuple[Progress] | None = None
        if isinstance(schedule, Progress):
            self._progress = (schedule,)
            self.scaled_branch = nn.Identity()
            number = torch.tensor(schedule.place(place.stack, place.layer))
            self.register_buffer("layer_number", number, persistent=False)

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:  # (B, T, D) -> (B, T, D)
        raise NotImplementedError

    def added(self, branch: Tensor) -> Tensor:
        """Return the term that joins the shortcut: the branch F, or alpha(l, t) F under ProRes (``model.prores``)."""
        branch = self.branch(branch)
        if self._progress is None:
            return branch
        alpha = torch.take(self._progress[0].alphas, self.layer_number)  # no index: compiled layers share their code
        return self.scaled_branch(alpha * branch)

    def gain(self, matrix: str) -> float:
        """Return the initial gain of q, k, v, out, fc1, fc2 or gate (of SwiGLU), as a multiple of Xavier's standard
        deviation."""
        return xavier_gain(self.place, matrix)

    @classmethod
    def objection(cls, config: ModelConfig) -> str:
        """Return why the arch is undefined for these settings, as the end of a sentence; "" if it is defined."""
        return ""

    @classmethod
    def idle(cls, config: ModelConfig) -> Mapping[str, str]:
        """Return setting ("arch.KEY" or "model.KEY") -> why its value changes nothing in a model of this arch. A new
        run with such a setting is refused."""
        return {}

    @classmethod
    def equal(cls, place: Place, options: Any) -> str:
        """Return the name of another arch that a stack of so many layers is; "" for none. A new run says so."""
        return ""

    def factors(self, role: str) -> Factors:
        """Return the optimizer's factors for a parameter of this sub-layer, by its role ("decoder.3.ffn.fc1.bias")."""
        return Factors()

    @classmethod
    def outer_factors(cls, place: Place, role: str, options: Any = None) -> Factors:
        """Return the optimizer's factors for a parameter outside the layers: an embedding, a final norm, the output."""
        return Factors()

    @classmethod
    def new_trunk(cls, place: Place, options: Any) -> Trunk:
        """Return the trunk of a stack: ``trunk(place)``, unless it needs the arch's own settings."""
        return cls.trunk(place)

    @classmethod
    def output_factor(cls, place: Place, options: Any = None) -> float:
        """Return the factor on the logits of a model whose last stack has this architecture."""
        return 1.0

    @staticmethod
    def embedding_gain(place: Place) -> float:
        """Return the initial gain of a stack's embedding, as a multiple of N(0, 1/d)."""
        return 1.0

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        """Return the constants that depend on the depth, by name, for one stack."""
        return {}

    @staticmethod
    def calibrating(residuals: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context in which one forward pass through these residuals of a stack sets their calibrated
        values."""
        return nullcontext()

    @staticmethod
    def finalize(stack: Any) -> None:
        """Convert a trained stack into its form for use; called once, when training has ended."""


class _Archs(Registry[type[Residual]]):
    @contextmanager
    def restored(self) -> Iterator[None]:
        with super().restored(), restored_notes():
            yield

    def resolve(self, name: str) -> str:
        if name not in self and (why := MISSING.get(spelling(name))):  # a plug-in may build one of them
            raise UsageError(f"{name!r} is not built: {why}; choose one of {', '.join(sorted(self))}.")
        if name not in self and is_design(own := name.strip().lower()):
            raise UsageError(
                f"{name!r} is a model and no architecture: give --model {own} (model.design = {own!r}), and an "
                "architecture such as --arch preln."
            )
        return super().resolve(name)


# Spelling of the name of a known architecture that is not built here -> the reason.
MISSING = {
    "mixnorm": "no paper defines it; BranchNorm's Table 2 names it in one row and says nothing else about it",
    "spannorm": "its initialisation depends on depth by a formula that was not read, nor was the paper (2601.22580)",
    "fusenorm": "it is SpanNorm under an earlier name, whose initialisation was not read (2601.22580)",
    "deepcrossattention": "its paper (2502.06785) was not read, and a port of it leaves the stream out of its residual",
    "dca": "DeepCrossAttention's paper (2502.06785) was not read",
    "completedp": "its paper (2512.22382) was not read; completep has the rules of CompleteP",
    "complete(d)p": "its paper (2512.22382) was not read; completep has the rules of CompleteP",
    "laurel": "its paper (2411.07501) does not state how its factors start",
    "laurellr": "its paper (2411.07501) does not state how its factors start",
    "simplenorm": "it is left for later (2602.01212)",
    "simplegpt": "it is SimpleNorm's model, which is left for later (2602.01212)",
    "ngpt": "it is left for later (2410.01131): it needs weights that are normalised after each update",
}
ARCHS = _Archs("architecture", ROOM)
R = TypeVar("R", bound=type[Residual])


def arch(
    name: str,
    *,
    title: str = "",
    colour: str = "",
    marker: str = "",
    rank: int = 1000,
    gains: Gains | None = None,
    family: str = "",
    stream: Stream = "norm",
    prores: bool = False,
) -> Callable[[R], R]:
    """Register a residual as an architecture: ``@arch("name")``.

    The other arguments are for tables and figures, each with a neutral default:
    :class:`stabilitylab.arch_notes.ArchNote`.
    """

    def decorate(entry: R) -> R:
        ARCHS.register(name)(entry)
        said = {"scheduled": entry.scheduled, "takes_alpha": entry.takes_alpha, "recipe": entry.recipe}
        said["options"] = {
            name: Option(field.annotation, field.default) for name, field in entry.Options.model_fields.items()
        }
        add(ArchNote(name, title, colour, marker, rank, gains, family, stream, prores, **said))
        return entry

    return decorate


def stack_archs(config: ModelConfig) -> dict[str, type[Residual]]:
    """Return stack -> its architecture.

    Raises UsageError for a ``model.alpha`` that no architecture has, for a stack that an architecture is not defined
    for, and for an option that no architecture has.
    """
    names = {
        "encoder-decoder": {"encoder": config.arch, "decoder": config.decoder_arch or config.arch},
        "encoder": {"encoder": config.arch},
        "decoder": {"decoder": config.arch},
    }[config.stack]
    archs = {stack: ARCHS[name] for stack, name in names.items()}
    if config.alpha is not None and not any(entry.takes_alpha for entry in archs.values()):
        have = ", ".join(name for name, entry in ARCHS.items() if entry.takes_alpha)
        raise UsageError(f"architecture {config.arch!r} has no alpha to replace: leave model.alpha out, or use {have}.")
    opening = [own.name for own in notes().values() if own.prores] if config.prores != "off" else []
    for stack, entry in archs.items():
        if config.stack not in entry.defined_for:
            raise UsageError(
                f"architecture {names[stack]!r} is not defined for model.stack = {config.stack!r}: its paper gives "
                f"constants for {' and '.join(entry.defined_for)} models only; choose one, or another architecture."
            )
        if config.prores != "off" and ARCHS.resolve(names[stack]) not in opening:
            raise UsageError(
                f"architecture {names[stack]!r} has no form with model.prores: ProRes is defined for "
                f"{', '.join(opening)} only."
            )
        if config.norm in ELEMENTWISE and entry.normalised and not entry.is_sum:
            raise UsageError(
                f"architecture {names[stack]!r} is not defined with model.norm = {config.norm!r}: DyT and Derf bound "
                "each feature and normalise nothing, and their papers put them in Pre-LN; use preln or a form of it."
            )
        if why := entry.objection(config):
            raise UsageError(f"architecture {names[stack]!r} is not defined here: {why}.")
    known = {key for entry in archs.values() for key in entry.Options.model_fields}
    if foreign := [key for key in config.options if key not in known]:
        have = ", ".join(sorted(known)) or "none"
        raise UsageError(f"architecture {config.arch!r} has no option {shown(foreign[0])}; it has {have}.")
    return archs


def without_own_gains(config: ModelConfig) -> str:
    """Return why an option about the arch's own initial gains changes nothing; "" if ``model.init`` applies them."""
    return "" if config.init.startswith("arch") else f"model.init = {config.init!r} leaves out the architecture's gains"


def inexact(config: ModelConfig) -> list[str]:
    """Return the model's architectures whose backward pass is not the gradient of the loss, as GPAS's."""
    names = dict.fromkeys(name for name in (config.arch, config.decoder_arch) if name)
    return [name for name in names if not ARCHS[name].exact_gradient]


def options_of(entry: type[Residual], config: ModelConfig) -> ArchOptions:
    """Return the arch's own settings in ``config``; raises UsageError for a wrong value."""
    own = {key: getattr(config, key) for key in RAMP} | config.options
    try:
        return entry.Options(**{key: value for key, value in own.items() if key in entry.Options.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        text = bounded(own_words(first["msg"]), 500)
        raise UsageError(f"option arch.{key} = {shown(first['input'])}: {text}.") from error
