"""``perturbation`` against copies of the model with other weights, place by place."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from onestep_cases import column, real_tokens, subject_of, weights_of
from rest_slow import SOME_ARCHS, rest_slow
from torch import Tensor, nn

from stabilitylab.models import ARCHS, Transformer
from stabilitylab.models.initialisation import named_normal
from stabilitylab.onestep.initial_model import Filled, Subject, hooked
from stabilitylab.onestep.perturbation import Outputs, perturbation

MATRIX = r"\w+\.\d+\.\w+\.(q|k|v|out|fc1|fc2)"
# identities at the start: ReZero whatever its weights; of R-Fixup's encoder no matrix has a gradient yet
STILL = {("rezero", "random"), ("rezero", "gradient"), ("rfixup", "gradient")}
MEANS = ("hyper-connections", "hyper-connections-static", "mhc")  # n streams alike
CASES = [*((arch, "encoder-decoder") for arch in ARCHS), ("admin", "encoder"), ("preln", "decoder")]
STREAMS = ("hyper-connections", "siamese-norm", "attnres", "keel")
MORE = [*((arch, "encoder-decoder") for arch in (*SOME_ARCHS, *STREAMS)), *CASES[-2:]]
SOME = [("preln", "decoder")]


def recorded(subject: Subject) -> Filled:
    before = Outputs(subject)
    with hooked(before.hooks()):
        subject.output()
    return perturbation(subject, before)


def places(model: Transformer) -> Iterator[tuple[str, str, nn.Module]]:
    """(site, stack, module)"""
    for name, stack in model.stacks.items():
        for number, layer in enumerate(stack.layers):
            for sublayer in ("self_attn", "cross_attn", "ffn"):
                if (module := getattr(layer, sublayer)) is not None:
                    yield f"{name}.layers.{number}.{sublayer}", name, module
        yield name, name, stack


def normalised(subject: Subject, model: Transformer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = []
    for site, stack, module in places(model):

        def keep(_module: nn.Module, _args: object, output: Tensor, site: str = site, stack: str = stack) -> None:
            x = output[0] if isinstance(output, tuple) else output  # ResiDual carries a second stream
            if model.config.arch in MEANS and isinstance(output, tuple):
                x = torch.stack(output).mean(0)
            tokens = x[real_tokens(subject, stack)]
            centred = tokens - tokens.mean(dim=1, keepdim=True)
            found[site] = tokens / centred.square().mean(dim=1, keepdim=True).sqrt()

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model.hidden(**subject.batch.inputs)
    for handle in handles:
        handle.remove()
    return found


def signs(subject: Subject, kind: str) -> dict[str, Tensor]:
    """Parameter name -> sign of noise or gradient, 0 outside the matrices."""
    inside = weights_of(subject, MATRIX)
    if kind == "gradient":
        return {n: inside[n] * p.grad.sign() for n, p in subject.model.named_parameters() if p.grad is not None}
    for role, (name, rows) in subject.model.parameter_roles().items():
        view = inside[name] if rows is None else inside[name][rows]
        view.mul_(named_normal(subject.config.train.seed, f"{role}.perturbation", view.shape).sign())
    return inside


@pytest.mark.parametrize(("arch", "stack"), rest_slow(CASES, SOME, MORE))
def test_every_place_against_a_copy_with_the_other_weights(arch: str, stack: str) -> None:
    subject = subject_of(arch, stack)
    table = recorded(subject)
    before = normalised(subject, subject.model)
    for kind, size in (("random", 1e-4), ("gradient", 1e-6)):
        twin = copy.deepcopy(subject.model)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter += size * signs(subject, kind)[name]
        after = normalised(subject, twin)
        expected = {site: (after[site] - before[site]).square().mean().item() for site in before}
        assert column(table, kind) == pytest.approx(expected, rel=1e-7)
        assert (min(expected.values()) == 0) == ((arch, kind) in STILL)
    rows = [(row.stack, row.layer, row.sublayer) for row in table[0].rows]
    assert [row for row in rows if row[1] == 0] == [(name, 0, "output") for name in subject.model.stacks]


@pytest.mark.slow
def test_only_matrices_of_branches_change_and_come_back() -> None:
    subject = subject_of("admin")
    before = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    moved = weights_of(subject, MATRIX)
    assert not any(moved[name].any() for name in before if "norm" in name or "omega" in name or "embedding" in name)
    assert not any(moved[name].any() for name in before if name.endswith("bias"))
    recorded(subject)
    assert all(torch.equal(parameter, before[name]) for name, parameter in subject.model.named_parameters())


@pytest.mark.slow
def test_the_signs_belong_to_the_seed_and_not_to_the_architecture() -> None:
    post, deep, other = subject_of("postln"), subject_of("deepnorm"), subject_of("postln", seed=4)
    one, two, three = (signs(subject, "random") for subject in (post, deep, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], three[name]) for name in one)
    assert column(recorded(post), "random")["decoder"] != column(recorded(other), "random")["decoder"]


@pytest.mark.slow
def test_the_output_of_pre_ln_is_behind_its_last_norm() -> None:
    sites = column(recorded(subject_of("preln", "decoder")), "random")
    assert sites["decoder"] == pytest.approx(sites["decoder.layers.1.ffn"], rel=0.2)  # nearly, but for its mean
    assert sites["decoder"] != sites["decoder.layers.1.ffn"]
    post = column(recorded(subject_of("postln", "decoder")), "random")
    assert post["decoder"] == post["decoder.layers.1.ffn"]


@pytest.mark.slow
def test_without_branches_nothing_moves() -> None:
    assert not recorded(subject_of("branchnorm", alpha=0.0))[1].values.any()
