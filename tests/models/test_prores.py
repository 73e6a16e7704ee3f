"""ProRes: alpha(l, t), where it stands in each formula, and what it equals."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from test_arch_formulas import Written, assert_equals_plain
from test_model_forward import Array
from test_model_invariants import gradients

from stabilitylab.arch_notes import built_in
from stabilitylab.config import ModelConfig, resolve
from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, Transformer, build_model
from stabilitylab.models.progress import Progress

DEFINED_FOR = ["postln", "preln", "deepnorm", "sandwich", "layernorm-scaling"]  # Table 1 of the paper, and its code
SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}


def progress(**settings: Any) -> Progress:
    own = {"prores": "linear", "stack": "decoder", "encoder_layers": 0, "decoder_layers": 24}
    return Progress(ModelConfig.model_validate(own | settings))


def test_it_is_an_option_of_the_papers_architectures() -> None:
    assert {note.name for note in built_in() if note.prores} == {*DEFINED_FOR}


@pytest.mark.parametrize(("layer", "t", "alpha"), [(1, 500, 0.5), (2, 500, 0.25), (12, 12_000, 1.0), (24, 12_000, 0.5)])
def test_alpha_of_a_layer(layer, t, alpha) -> None:
    assert progress().of(t)[layer - 1] == alpha


def test_alpha_begins_at_0_and_ends_at_1_one_layer_after_the_other() -> None:
    schedule = progress(decoder_layers=3, prores_T=4)
    rows = []
    for row in range(13):
        schedule.set(schedule.at(row))
        rows.append(schedule.alphas.tolist())
        assert schedule.least == schedule.smallest(row) == pytest.approx(rows[-1][-1])
    assert rows[0] == [0.0, 0.0, 0.0]
    assert rows[1] == pytest.approx([1 / 4, 1 / 8, 1 / 12])
    assert rows[4] == pytest.approx([1, 1 / 2, 1 / 3])
    assert (rows[8][:2], rows[12]) == ([1.0, 1.0], [1.0, 1.0, 1.0])
    late = progress(decoder_layers=3, prores_T=4, prores_t0=12)
    assert late.alphas.tolist() == [1.0, 1.0, 1.0]
    schedule.set(0.0)
    schedule.finalize()
    assert schedule.alphas.tolist() == [1.0, 1.0, 1.0]
    assert schedule.at(0) == 12


def test_the_layers_of_an_encoder_decoder_restart_or_count_on() -> None:
    sizes = {"stack": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 3, "prores_T": 1}
    assert progress(**sizes).of(1) == [1, 1 / 2, 1 / 3]
    through = progress(**sizes, prores_order="through")
    assert through.of(1) == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert [through.place(stack, 2) for stack in ("encoder", "decoder")] == [1, 3]
    assert progress(**sizes).place("decoder", 2) == 1


class Opening(Written):
    """Each branch times the alpha of its layer, in the formulas of the paper's Table 1."""

    def join(self, arch: str, role: str, x: Array, f) -> Array:
        stack, layer, _ = role.split(".")
        opened = {"encoder": 0, "decoder": self.config.encoder_layers * (self.config.prores_order == "through")}
        end = self.config.prores_T * (1 if self.config.prores == "equal" else opened[stack] + int(layer))
        alpha = min(1.0, 5 / end)
        if arch == "sandwich":
            return x + alpha * self.norm(f"{role}.outer_norm", f(self.norm(f"{role}.norm", x)))
        return super().join(arch, role, x, lambda z: alpha * f(z))


@pytest.mark.parametrize(
    ("stack", "settings"),
    [
        *product(["encoder-decoder", "decoder"], [{"prores": "linear"}, {"prores": "equal"}]),
        ("encoder-decoder", {"prores_order": "through"}),
    ],
)
@pytest.mark.parametrize("arch", DEFINED_FOR)
def test_forward_equals_the_formula(arch, stack, settings, small, randomise, pairs) -> None:
    settings = {"prores": "linear", "prores_T": 8, **settings}
    model = randomise(small(arch, stack=stack, depth=6, **settings).double())
    model.set_row(5)
    assert_equals_plain(model, pairs, Opening(model))
    with pytest.raises(AssertionError):
        assert_equals_plain(model, pairs, Written(model))


def bits(model: Transformer, other: Transformer, pairs, loss_of) -> bool:
    expected, found = (gradients(one, loss_of(one, pairs)) for one in (model, other))
    return torch.equal(model(**pairs), other(**pairs)) and all(torch.equal(expected[n], found[n]) for n in expected)


def test_equal_t_on_postln_is_branchnorm_with_xavier_weights_bit_for_bit(pairs, loss_of) -> None:
    postln = build_model(arch="postln", prores="equal", prores_T=7, depth=6, **SIZES)
    branchnorm = build_model(arch="branchnorm", T=7, t0=0, init="xavier", depth=6, **SIZES)
    for row in (0, 1, 3, 6, 7, 9):
        postln.set_row(row)
        branchnorm.set_row(row)
        assert bits(postln, branchnorm, pairs, loss_of)
    branchnorm.set_row(3)
    assert not bits(postln, branchnorm, pairs, loss_of)


@pytest.mark.parametrize("arch", DEFINED_FOR)
def test_after_the_last_layer_has_opened_it_is_the_plain_architecture_bit_for_bit(arch, pairs, loss_of) -> None:
    opening = build_model(arch=arch, prores="linear", prores_T=5, depth=6, **SIZES)
    plain = build_model(arch=arch, depth=6, **SIZES)
    opening.set_row(14)
    assert not bits(opening, plain, pairs, loss_of)
    opening.set_row(15)
    assert bits(opening, plain, pairs, loss_of)
    opening.set_row(0)
    opening.finalize()
    assert bits(opening, plain, pairs, loss_of)


def test_the_first_forward_has_alpha_0_and_the_encoder_no_gradient(pairs, loss_of) -> None:
    """Finding 4 of architectures.md: cross-attention is multiplied by 0, and nothing is skipped."""
    model = build_model(arch="preln", prores="linear", depth=4, tie="none", **SIZES)
    model.set_row(0)
    found = gradients(model, loss_of(model, pairs))
    assert all(gradient is not None for gradient in found.values())
    assert not any(g.any() for name, g in found.items() if name.startswith("encoder") or ".f." in name)
    assert found["decoder.embedding.weight"].any()


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - set(DEFINED_FOR)))
def test_others_refuse_and_say_for_which_it_is_defined(arch) -> None:
    with pytest.raises(UsageError, match="ProRes is defined for postln, preln, deepnorm, sandwich"):
        build_model(arch=arch, prores="linear", depth=2, **SIZES)


def test_schedules_that_are_names_alone_are_refused_with_what_is_missing() -> None:
    with pytest.raises(UsageError, match="ProRes's code that is not implemented here: use linear or equal"):
        resolve({"model": {"arch": "postln", "prores": "stagewise"}}, depth=2)


def test_checkpoints_carry_the_clock_and_every_alpha() -> None:
    model, other = (build_model(arch="preln", prores="linear", prores_T=2, depth=6, **SIZES) for _ in range(2))
    model.set_row(3)
    other.load_state_dict(model.state_dict())
    assert (other.schedule.get(), other.schedule.alphas.tolist()) == (3.0, model.schedule.alphas.tolist())


def test_a_tiny_run_opens_its_layers_within_a_fifth_of_its_updates() -> None:
    def of(**sections: Any) -> int:
        return resolve({"model": {"arch": "preln", "prores": "linear", **sections}}, depth=8).model.prores_T

    assert (of(), of(prores_T=1000)) == (12, 1000)  # 240 updates, 4 layers a side
    assert resolve({"preset": "small", "model": {"arch": "preln", "prores": "linear"}}, depth=8).model.prores_T == 1000


@pytest.mark.parametrize("settings", [{}, {"prores": "equal"}, {"prores_order": "through"}, {"stack": "decoder"}])
def test_the_last_layer_of_a_tiny_run_opens_after_a_fifth_of_its_updates(settings) -> None:
    config = resolve({"model": {"arch": "preln", "prores": "linear", **settings}}, depth=8)
    opening = Progress(config.model)
    assert next(row for row in range(config.train.steps) if opening.smallest(row) == 1) == config.train.steps // 5
