"""Small subjects for the tests of recommendations, and measurements with made-up numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from stabilitylab.config import Config, merge, resolve
from stabilitylab.data import load_data
from stabilitylab.models import Transformer, build_model
from stabilitylab.recommend import Measurement

SMALL: dict[str, Any] = {
    "model": {"d_model": 16, "d_ffn": 24, "heads": 2, "T": 10, "encoder_layers": 2, "decoder_layers": 3},
    "data": {"sentences": 4, "max_length": 9, "held_out": 4, "seed": 3, "vocab_size": 200},
    "train": {"seed": 3, "device": "cpu", "lr": 1e-3, "warmup": 40},
}
CPU = torch.device("cpu")
GOOD = {
    **{"gradient": 1.0, "update": 0.1, "growth": 0.2, "sensitivity": 1e-3, "headroom": 100.0, "progress": 0.04},
    **{"update_vo_ffn": 0.1, "update_ln": 0.01, "update_embedding": 0.01, "growth_start": 0.1},
    **{"seconds": 0.1, "parameters": 1000.0},
}


def config_of(arch: str, **sections: Any) -> Config:
    return resolve(merge(SMALL, {"model": {"arch": arch}}, sections))


@functools.cache
def dataset() -> Any:
    return load_data(config_of("postln").data, stack="encoder-decoder")


def model_of(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
    """As row 0 of a run has it."""
    sizes = {"source_vocab": dataset().source_vocab, "target_vocab": dataset().target_vocab}
    model = build_model(config.model, **sizes, seed=config.train.seed).to(dtype)
    model.calibrate(**dataset().micro_batch(0).inputs)
    model.set_row(0)
    return model


def made(arch: str, seed: int = 0, broken: str = "", broke: bool = True, **numbers: float) -> Measurement:
    """Those of ``GOOD``, but for ``numbers``."""
    own = {broken: "made up"} if broken else {}
    return Measurement(arch, seed, {**GOOD, **numbers}, {"headroom_broke": broke}, own, {})
