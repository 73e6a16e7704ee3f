"""The reference Transformer: layers, stacks, and the models made of one or two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import ModelConfig
from ..errors import UsageError
from ..settings import CONTEXT
from .base import Place, Residual, Trunk, options_of, stack_archs
from .progress import Progress
from .schedules import HostScalar, Schedule
from .sublayers import (
    CrossAttention,
    Embedding,
    FeedForward,
    FirstValues,
    Linear,
    Rotation,
    SelfAttention,
    SubLayer,
    rotation,
)

MASKED = -1e30  # finite, so that a row without any real token stays finite; exp() makes it an exact 0


def positions(length: int, like: Tensor, first: int = 0) -> Tensor:
    """Return sinusoids of ``length`` positions from ``first`` on, mean square exactly 1/2: (length, D).  Vaswani et al.
    2017, Sec. 3.5."""
    width = like.shape[-1]
    place = torch.arange(first, first + length, dtype=torch.float64, device=like.device)
    wave = torch.arange(0, width, 2, dtype=torch.float64, device=like.device)
    angle = place[:, None] * torch.exp(wave * (-math.log(10_000.0) / width))
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(like.dtype)  # (T, D)


def additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the key mask as a term to add to attention's scores, in their type: made once a forward pass, not once a
    layer."""
    if mask is None:
        return None
    device = mask.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, max(MASKED, torch.finfo(dtype).min))[:, None, None, :]  # (B, 1, 1, L)


class WithValues(NamedTuple):
    """The output of a stack's first layer under the value residual."""

    stream: Any
    values: Tensor


def _shown(trunk: Trunk, value: Any) -> Tensor | tuple[Tensor, ...]:
    """Return the tensors of a layer's input or output that probes read."""
    return trunk.shown(value.stream if isinstance(value, WithValues) else value)


class Layer(nn.Module):
    """Self-attention, cross-attention (in a decoder above an encoder), and the feed-forward network."""

    cross_attn: Residual | None
    shares_values = False  # value residual: layer 1 returns its values beside the stream, the others take them

    def __init__(self, self_attn: Residual, cross_attn: Residual | None, ffn: Residual) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.cross_attn = cross_attn
        self.ffn = ffn

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        turned: Rotation | None = None,
        values: Tensor | None = None,
    ) -> Any:
        first = FirstValues(values) if self.shares_values else None
        if first is not None:
            x = self.self_attn(x, mask, turned, first)
        else:
            x = self.self_attn(x, mask) if turned is None else self.self_attn(x, mask, turned)
        if self.cross_attn is not None:
            x = self.cross_attn(x, memory, memory_mask)
        x = self.ffn(x)
        if first is None or values is not None:
            return x
        assert first.values is not None
        return WithValues(x, first.values)


class Stack(nn.Module):
    """Embedding, positions, layers, and the final norm if the architecture has one.

    ``checkpointing``: in training, keep only the input of each layer and compute its inside again in the backward pass.
    """

    input_scale: Tensor | None
    positions: Embedding | None  # a learned table
    checkpointing = False

    def __init__(
        self, name: str, arch: type[Residual], config: ModelConfig, vocab: int, schedule: Schedule | Progress | None
    ):
        super().__init__()
        self.arch = arch
        self.scale = 1.0 if config.embedding_scale == 1 else math.sqrt(config.d_model)
        self.dropout = config.dropout
        self.draws = bool(config.dropout or config.attention_dropout or config.activation_dropout)
        self.embedding = Embedding(vocab, config.d_model)
        self.positions = Embedding(config.context or CONTEXT, config.d_model) if config.positions == "learned" else None
        self.sinusoidal = config.positions == "sinusoidal"
        self.turned = config.d_model // config.heads if config.positions == "rope" else 0  # features of a head
        causal = name == "decoder"
        above_encoder = causal and config.stack == "encoder-decoder"
        layers = config.encoder_layers, config.decoder_layers
        options = self.options = options_of(arch, config)
        base = {"base": config.base, "inner_width": config.d_ffn, "bias": config.bias, "norm_alpha": config.norm_alpha}
        place = Place(name, 0, "", config.d_model, *layers, config.norm, config.qkv_gain, **base)

        def layer(number: int) -> Layer:
            def join(f: SubLayer, sublayer: str, below: Residual | None) -> Residual:
                given = {"alpha": config.alpha, "schedule": schedule, "below": below, "options": options}
                return arch(f, place.at(number, sublayer), **given)

            self_attn = join(SelfAttention(config, causal=causal, first=number == 1), "self_attn", None)
            cross_attn = join(CrossAttention(config), "cross_attn", self_attn) if above_encoder else None
            made = Layer(self_attn, cross_attn, join(FeedForward(config), "ffn", cross_attn or self_attn))
            made.shares_values = config.value_residual != "off"
            return made

        self.layers = nn.ModuleList(layer(number) for number in range(1, place.layers + 1))
        self.trunk = arch.new_trunk(place, options)
        if type(self.trunk).shown is not Trunk.shown:  # by this name probes find it
            for module in (*self.layers, *self.residuals()):
                cast(Any, module).shown_stream = partial(_shown, self.trunk)
        self.norm = place.new_norm() if arch.final_norm else None
        self.place = place
        self.register_buffer("input_scale", None)  # a folded Admin's first omega

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        stream = self.trunk.enter(self.embed(tokens))
        again = self.checkpointing and self.training and torch.is_grad_enabled()
        turned = self.rotations(tokens.shape[1])
        given: tuple[Any, ...] = (mask, memory, memory_mask, *turned)
        for layer in self.layers:
            x = self.trunk.before(stream)
            if again:  # without dropout no random state is read, so that a CUDA graph can be captured
                y = checkpoint(layer, x, *given, use_reentrant=False, preserve_rng_state=self.draws)
            else:
                y = layer(x, *given)
            if isinstance(y, WithValues):
                y, values = y
                given = (mask, memory, memory_mask, *(turned or (None,)), values)
            stream = self.trunk.after(stream, y)
        return self.leave(stream)

    def leave(self, stream: Any) -> Tensor:
        """Return the output of the stack, from the stream behind its last layer."""
        x = self.trunk.leave(stream)
        return x if self.norm is None else self.norm(x)

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Return the input of the first layer, for ``tokens`` at the positions from ``first`` on."""
        x = self.embedding(tokens) * self.scale  # (B, T, D)
        length = tokens.shape[1]
        if self.sinusoidal:
            x = x + positions(length, x, first)
        elif self.positions is not None:
            rows = self.positions.num_embeddings
            if first + length > rows:
                raise UsageError(
                    f"this model has {rows} learned positions and was given {first + length} tokens: "
                    "cut the input, or build it with a larger model.context."
                )
            x = x + self.positions(torch.arange(first, first + length, device=tokens.device))
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        return x if self.input_scale is None else self.input_scale * x

    def rotations(self, length: int) -> tuple[Rotation, ...]:
        """Return the rotation of ``length`` positions for self-attention, made once a forward pass; nothing without
        RoPE."""
        return (rotation(length, self.turned, self.embedding.weight),) if self.turned else ()

    def residuals(self) -> list[Residual]:
        """Return all sub-layers, from the bottom up."""
        return [cast(Residual, sublayer) for layer in self.layers for sublayer in layer.children()]


class Transformer(nn.Module):
    """The common part of the encoder-decoder and the single stacks. ``build_model`` builds it and draws the weights."""

    encoder: Stack | None
    decoder: Stack | None
    calibrated: HostScalar | None

    def __init__(self, config: ModelConfig, *, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        archs = stack_archs(config)
        ramps = [cast(Any, options_of(entry, config)) for entry in archs.values() if entry.scheduled]
        schedule = Schedule(ramps[0], config.alpha) if ramps else None if config.prores == "off" else Progress(config)
        vocab = dict.fromkeys(archs, target_vocab)
        if config.stack == "encoder-decoder":
            vocab["encoder"] = source_vocab
        self.config = config
        for name in ("encoder", "decoder"):
            stack = Stack(name, archs[name], config, vocab[name], schedule) if name in archs else None
            setattr(self, name, stack)
        self.output = Linear(config.d_model, target_vocab, bias=False)
        last = self.last_stack
        if config.tie != "none":
            self.output.weight = last.embedding.weight
        if config.tie == "all" and self.encoder is not None:
            if source_vocab != target_vocab:
                raise UsageError(
                    f"model.tie = 'all' needs one vocabulary for both sides, not {source_vocab} and {target_vocab} "
                    "tokens: use 'output'."
                )
            self.encoder.embedding = last.embedding
        self.output_factor = last.arch.output_factor(last.place, last.options)
        self.schedule = schedule
        uncalibrated = any(entry.needs_calibration for entry in archs.values())
        self.calibrated = HostScalar("flag", False, torch.bool) if uncalibrated else None

    @property
    def stacks(self) -> dict[str, Stack]:
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def last_stack(self) -> Stack:
        return next(reversed(self.stacks.values()))

    def run(self, **inputs: Tensor | None) -> Tensor:
        raise NotImplementedError

    def hidden(self, **inputs: Tensor | None) -> Tensor:
        """Return the output of the last stack after its last norm."""
        self.require_calibration()
        return self.run(**inputs)  # (B, T, D)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output(hidden if self.output_factor == 1 else self.output_factor * hidden)  # (B, T, V)

    def forward(self, **inputs: Tensor | None) -> Tensor:
        return self.logits(self.hidden(**inputs))

    def set_row(self, row: int) -> None:
        """Set everything that depends on time to its value in row ``row`` of a run: after ``row`` optimizer updates."""
        if self.schedule is not None:
            self.schedule.set(self.schedule.at(row))

    @torch.no_grad()
    def calibrate(self, **inputs: Tensor | None) -> None:
        """Run Admin's profiling pass over one batch, with dropout; do nothing without such a pass, or if it was done
        before."""
        if self.calibrated is None or self.calibrated.get():
            return
        device = next(self.parameters()).device
        with ExitStack() as scope:
            # forked: a calibrated model must not see other dropout masks than one restored from a checkpoint
            scope.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            scope.callback(self.train, self.training)
            for stack in self.stacks.values():
                scope.enter_context(stack.arch.calibrating(stack.residuals()))
            self.train()
            self.run(**inputs)
        self.calibrated.set(True)

    def finalize(self) -> None:
        """Convert the trained model into its form for use: alpha at its end, and the change of each architecture. There
        is no way back."""
        self.require_calibration()
        if self.schedule is not None:
            self.schedule.finalize()
        for stack in self.stacks.values():
            stack.arch.finalize(stack)
        self.calibrated = None

    def require_calibration(self) -> None:
        if self.calibrated is not None and not self.calibrated.get():
            raise UsageError(
                "this Admin model has no omega yet: call model.calibrate(**inputs) with one training batch first, "
                "or load a checkpoint."
            )

    def parameter_roles(self) -> dict[str, tuple[str, slice | None]]:
        """Return role -> (name in ``named_parameters()``, rows of it or None for all); each element has exactly one
        role."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.named_parameters()}
        roles: dict[str, tuple[str, slice | None]] = {}
        taken: set[str] = set()
        for residual in self.residuals():
            for matrix, (linear, rows) in residual.f.matrices.items():
                module = getattr(residual.f, linear)
                roles[f"{residual.place}.{matrix}"] = names[module.weight], rows
                if module.bias is not None:
                    roles[f"{residual.place}.{matrix}.bias"] = names[module.bias], rows
                taken |= {names[parameter] for parameter in module.parameters()}
            for name, parameter in residual.named_parameters():
                if names[parameter] not in taken:  # else a matrix has it, or a sub-layer that shares it
                    roles[f"{residual.place}.{name.removeprefix('f.')}"] = names[parameter], None
                    taken.add(names[parameter])
        for stack_name, stack in self.stacks.items():
            for name, parameter in stack.trunk.named_parameters():
                roles[f"{stack_name}.{name}"] = names[parameter], None
            if stack.norm is not None:
                for name, parameter in stack.norm.named_parameters():
                    roles[f"{stack_name}.norm.{name}"] = names[parameter], None
            if stack.positions is not None:
                roles[f"{stack_name}.positions"] = names[stack.positions.weight], None
            if stack is self.last_stack or stack.embedding is not self.last_stack.embedding:
                roles[f"{stack_name}.embedding"] = names[stack.embedding.weight], None
        if self.output.weight is not self.last_stack.embedding.weight:
            roles["output"] = names[self.output.weight], None
        return roles

    def residuals(self) -> Iterator[Residual]:
        for stack in self.stacks.values():
            yield from stack.residuals()


class EncoderDecoder(Transformer):
    """Translation: the decoder is causal and attends to the encoder's output."""

    def run(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        """Return the decoder's output (B, T, D). ``target`` is padded on the right, so causality hides its padding from
        every real token without a mask."""
        assert self.encoder is not None
        assert self.decoder is not None
        keys = additive(source_mask, self.encoder.embedding.weight)
        memory = self.encoder(source, keys)  # (B, S, D)
        return self.decoder(target, None, memory, keys)  # (B, T, D)


class EncoderOnly(Transformer):
    """An encoder: every token attends to every real token; the masked-token loss."""

    def run(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        assert self.encoder is not None
        return self.encoder(tokens, additive(mask, self.encoder.embedding.weight))  # (B, T, D)


class DecoderOnly(Transformer):
    """A decoder: every token attends to itself and the tokens before it; the next-token loss."""

    def run(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the decoder's output (B, T, D). ``tokens`` is padded on the right, so causality hides the padding from
        every real token without a mask."""
        assert self.decoder is not None
        return self.decoder(tokens)  # (B, T, D)


KINDS: dict[str, type[Transformer]] = {
    "encoder-decoder": EncoderDecoder,
    "encoder": EncoderOnly,
    "decoder": DecoderOnly,
}
