"""The models of the corpus: which architectures and sizes, and what training one of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stabilitylab.config import Config, parse_set, resolve
from stabilitylab.data import Batch, Dataset, load_data
from stabilitylab.data.corpus import BOS, EOS
from stabilitylab.models import build_model

WIDTH, HEADS, SENTENCES = 48, 4, 16
Kind = Literal["decoder", "encoder-decoder"]


@dataclass(frozen=True)
class Subject:
    """An architecture at a size: ``layers`` of all stacks together, 48 wide."""

    arch: str
    kind: Kind
    layers: int

    @property
    def name(self) -> str:
        return f"{self.arch}-{'d' if self.kind == 'decoder' else 'ed'}{self.layers}"


REFERENCE = ("postln", "preln", "deepnorm", "branchnorm")
LIBRARY = ("gpt2", "llama")  # architectures of another library
SIZES: tuple[tuple[Kind, int], ...] = (("decoder", 4), ("encoder-decoder", 6), ("decoder", 12))
SUBJECTS = {
    subject.name: subject
    for subject in (
        *(Subject(arch, kind, layers) for kind, layers in SIZES for arch in REFERENCE),
        *(Subject(arch, "decoder", layers) for layers in (4, 8) for arch in LIBRARY),
    )
}


# Those of the second corpus: ten architectures, of four layers.
SECOND = {
    subject.name: subject
    for subject in (
        *(Subject(arch, "decoder", 4) for arch in (*REFERENCE, "admin", "subln", "sandwich", "hybridnorm")),
        *(Subject(arch, "decoder", 4) for arch in LIBRARY),
        *(Subject(arch, "encoder-decoder", 4) for arch in ("postln", "preln")),
    )
}


@dataclass
class Student:
    """A model with what calls it: ``logits(model, batch)``, its attention's q and k, what changes with the row."""

    model: nn.Module
    logits: Callable[[nn.Module, Batch], Tensor]
    query_key: list[Tensor]  # views of the parameters that make queries and keys
    layers: list[nn.Module]
    embedding: nn.Parameter
    set_row: Callable[[int], None] = lambda row: None
    schedule: Any = None


def known(name: str) -> Subject:
    """The subject of this name, of either corpus."""
    return SUBJECTS[name] if name in SUBJECTS else SECOND[name]


@cache
def settings(name: str, text: Path | None) -> Config:
    """The configuration of a reference model; of another, that of its data. ``text``: Multi30k's folder, None: the
    synthetic task."""
    subject = known(name)
    own = [f"model.stack={subject.kind}", f"model.d_model={WIDTH}", f"model.d_ffn={2 * WIDTH}", f"model.heads={HEADS}"]
    own += [f"model.arch={'preln' if subject.arch in LIBRARY else subject.arch}", f"data.sentences={SENTENCES}"]
    if text is not None:
        files = {part: f"{text / part}.de.gz,{text / part}.en.gz" for part in ("train", "val")}
        own += [f"data.source=text:{files['train']}", f"data.valid={files['val']}"]
    if subject.arch == "branchnorm":
        own.append("model.T=24")  # as in the pilot
    return resolve(parse_set(own), depth=subject.layers)


def dataset(name: str, seed: int, text: Path | None) -> Dataset:
    """Its batches, in the order of ``seed``."""
    config = settings(name, text)
    return load_data(config.data.model_copy(update={"seed": seed}), stack=config.model.stack)


def student(name: str, seed: int, data: Dataset, text: Path | None) -> Student:
    """A model of this name, initialised from ``seed``."""
    subject = known(name)
    if subject.arch in LIBRARY:
        return _hugging_face(subject, seed, data)
    return _reference(settings(name, text), seed, data)


def _reference(config: Config, seed: int, data: Dataset) -> Student:
    model = build_model(config.model, source_vocab=data.source_vocab, target_vocab=data.target_vocab, seed=seed)
    model.calibrate(**data.micro_batch(0).inputs)
    named = dict(model.named_parameters())
    places = [own for role, own in model.parameter_roles().items() if role.rsplit(".", 1)[-1] in ("q", "k")]
    query_key = [named[name].data if rows is None else named[name].data[rows] for name, rows in places]
    layers = [layer for stack in model.stacks.values() for layer in stack.layers]
    last = list(model.stacks.values())[-1]
    return Student(
        model,
        lambda model, batch: model(**batch.inputs),
        query_key,
        layers,
        last.embedding.weight,
        model.set_row,
        model.schedule,
    )


def _hugging_face(subject: Subject, seed: int, data: Dataset) -> Student:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": data.target_vocab,
        "use_cache": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    model: Any
    if subject.arch == "gpt2":
        none = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=WIDTH, n_layer=subject.layers, n_head=HEADS, n_positions=128, **none, **shape)
        )
        layers = list(model.transformer.h)
        query_key = [layer.attn.c_attn.weight.data[:, : 2 * WIDTH] for layer in layers]  # its Conv1D is (in, out)
        embedding = model.transformer.wte.weight
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=WIDTH,
                intermediate_size=128,
                num_hidden_layers=subject.layers,
                num_attention_heads=HEADS,
                **shape,
            )
        )
        layers = list(model.model.layers)
        query_key = [own.weight.data for layer in layers for own in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
        embedding = model.model.embed_tokens.weight

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        mask = batch.inputs["mask"].long()
        return model(input_ids=batch.inputs["tokens"], attention_mask=mask).logits

    return Student(model.train(), logits, query_key, layers, embedding)
