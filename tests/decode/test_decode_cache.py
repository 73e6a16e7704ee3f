"""Decoding one token at a time gives what the whole model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rest_slow import SOME_ARCHS, rest_slow

from stabilitylab.decode.cache import CachedDecoder
from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, build_model

CASES: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in sorted(ARCHS)),
    *(("branchnorm", {"alpha": alpha}) for alpha in (0.0, 0.3, 1.0)),
    ("deepnorm", {"alpha": 2.5}),
    ("preln", {"decoder_arch": "postln"}),
    ("postln", {"decoder_arch": "preln"}),
    ("admin", {"decoder_arch": "branchnorm"}),
    ("resi-dual", {"decoder_arch": "dlcl"}),
    ("postln", {"qk_norm": True}),
    ("preln", {"qk_norm": True, "norm": "rmsnorm"}),
    ("preln", {"positions": "rope", "activation": "swiglu", "qk_norm": True}),
    ("postln", {"positions": "learned", "attention_gate": "head"}),
    ("preln", {"attention_gate": "element", "bias": False}),
    ("preln", {"prores": "linear", "prores_T": 5}),
    ("preln", {"value_residual": "learned"}),
    ("hybridnorm", {"value_residual": "fixed", "value_weights": (2.0, 1.0), "positions": "rope"}),
]


@pytest.mark.parametrize(
    ("arch", "settings"),
    rest_slow(CASES, [case for case in CASES if case[0] in SOME_ARCHS | {"mhc"}]),
    ids=[f"{arch}-{settings}" for arch, settings in CASES],
)
@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_model(arch, settings, translator, sources) -> None:
    model = translator(arch, **settings)
    model.set_row(7)
    compare(model, sources)


@torch.no_grad()
def test_also_of_a_finalized_admin_whose_stream_is_scaled(translator, sources) -> None:
    model = translator("admin")
    model.finalize()
    assert model.decoder.input_scale is not None
    compare(model, sources)


@torch.no_grad()
def test_also_of_a_calibrated_admin(sources) -> None:
    model = build_model(arch="admin", depth=6, d_model=16, heads=2, source_vocab=19, target_vocab=23).double().eval()
    source, mask = sources
    model.calibrate(source=source, target=source, source_mask=mask)
    compare(model, sources)


def compare(model, sources) -> None:
    """Two hypotheses a sentence, a different one of which goes on after each id, and twice a sentence is dropped."""
    source, mask = sources
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 23, (len(source), 2, 1), generator=generator)
    decoder = CachedDecoder(model, source, mask)
    for step in range(8):
        got = decoder.step(target[:, :, -1].flatten()).unflatten(0, target.shape[:2])
        for k in range(2):
            expected = model(source=source, target=target[:, k], source_mask=mask)[:, -1]
            torch.testing.assert_close(got[:, k], expected, rtol=0, atol=1e-10)
        origin = torch.randint(0, 2, (len(source), 2), generator=generator)
        kept = torch.arange(len(source))
        if step in (2, 5):
            kept = kept[kept != 1]
        source, mask = source[kept], mask[kept]
        decoder.keep((kept[:, None] * 2 + origin[kept]).flatten(), kept if step in (2, 5) else None)
        target = target.gather(1, origin[:, :, None].expand(-1, -1, target.shape[2]))[kept]
        target = torch.cat([target, torch.randint(0, 23, (len(kept), 2, 1), generator=generator)], dim=2)


def test_the_model_itself_stays_as_it_was(translator, sources) -> None:
    model = translator("branchnorm")
    before = dict(model.named_modules())
    decoder = CachedDecoder(model, *sources)
    decoder.step(torch.ones(6, dtype=torch.int64))
    after = dict(model.named_modules())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_single_stack_translates_nothing(stack) -> None:
    model = build_model(arch="postln", stack=stack, depth=2, source_vocab=9, target_vocab=9)
    with pytest.raises(UsageError, match=rf"only an encoder-decoder translates.*\({stack}\)"):
        CachedDecoder(model, torch.ones(1, 3, dtype=torch.int64))


def test_an_uncalibrated_admin_is_refused() -> None:
    model = build_model(arch="admin", depth=2, source_vocab=9, target_vocab=9)
    with pytest.raises(UsageError, match="no omega yet"):
        CachedDecoder(model, torch.ones(1, 3, dtype=torch.int64))
