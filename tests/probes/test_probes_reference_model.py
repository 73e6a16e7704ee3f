"""All probes on the reference Transformer, each architecture, against float64 numbers from its own formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.models import build_model
from stabilitylab.probes import Watcher

ARCHS = ("postln", "preln", "postln-init", "deepnorm", "branchnorm", "admin")
STACKS = {"encoder-decoder": (2, 3), "encoder": (2, 0), "decoder": (0, 2)}


def build(arch: str, stack: str = "encoder-decoder", **settings: Any) -> nn.Module:
    encoder, decoder = STACKS[stack]
    layers = {"encoder_layers": encoder, "decoder_layers": decoder}
    sizes = {"d_model": 16, "d_ffn": 24, "heads": 2, "T": 10}
    model = build_model(source_vocab=31, target_vocab=29, arch=arch, stack=stack, **(layers | sizes | settings))
    model = model.double()
    model.calibrate(**batch(0, stack))
    return model


def batch(seed: int, stack: str = "encoder-decoder") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def side(length: int) -> tuple[Tensor, Tensor]:
        ends = torch.randint(2, length + 1, (4, 1), generator=draw)
        return torch.randint(0, 29, (4, length), generator=draw), torch.arange(length)[None] < ends

    (source, source_mask), (target, target_mask) = side(7), side(5)
    if stack != "encoder-decoder":
        return {"tokens": target, "mask": target_mask}
    return {"source": source, "target": target, "source_mask": source_mask, "target_mask": target_mask}


def masks(inputs: dict[str, Tensor], stack: str = "encoder-decoder") -> dict[str, Tensor]:
    if stack != "encoder-decoder":
        return {stack: inputs["mask"]}
    return {"encoder": inputs["source_mask"], "decoder": inputs["target_mask"]}


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    real, tokens = inputs.get("target_mask", inputs.get("mask")), inputs.get("target", inputs.get("tokens"))
    return F.cross_entropy(model(**inputs)[real], tokens[real])


def watch(model: nn.Module, inputs: dict[str, Tensor], stack: str = "encoder-decoder", **options: Any) -> Any:
    sink = ListSink()
    return sink, Watcher(model, sink, mask=lambda: masks(inputs, stack), every=1, update_every=1, **options)


def sublayers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(site, stack, sub-layer), sites as in the tables of hooks."""
    for stack in ("encoder", "decoder"):
        if (module := getattr(model, stack)) is not None:
            for number, layer in enumerate(module.layers):
                for name, sublayer in layer.named_children():
                    yield f"{stack}.layers.{number}.{name}", stack, sublayer


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("arch", ARCHS)
def test_ln_input_and_its_parts(arch: str, stack: str) -> None:
    model, inputs = build(arch, stack), batch(1, stack)
    sink, watcher = watch(model, inputs, stack, probes="ln_input")
    seen: dict[str, dict[str, Tensor]] = {}
    handles = []
    for site, _, sublayer in sublayers(model):
        into = seen[f"{site}.norm"] = {}

        def keep(module: nn.Module, args: Any, output: Tensor, into: dict[str, Tensor] = into, what: str = "") -> None:
            into[what] = output if what == "F" else args[0]

        for what, module in (("x", sublayer), ("F", sublayer.f), ("entered", sublayer.norm)):
            handles.append(module.register_forward_hook(lambda *a, what=what, keep=keep: keep(*a, what=what)))
    loss_of(model, inputs).backward()
    for handle in handles:
        handle.remove()
    watcher.step()
    watcher.flush()

    expected: dict[str, dict[str, float]] = {column: {} for column in ("value", "branch", "scaled_branch", "shortcut")}
    alpha = 1.0 if model.schedule is None else float(np.float32(model.schedule.get()))  # the buffer is float32
    for site, name, sublayer in sublayers(model):
        here, real = seen[f"{site}.norm"], masks(inputs, stack)[name]
        scale = {"deepnorm": getattr(sublayer, "alpha", 1.0), "admin": getattr(sublayer, "omega", 1.0)}.get(arch, 1.0)
        parts = {
            "value": here["entered"],
            "branch": here["F"],
            "scaled_branch": alpha * here["F"],
            "shortcut": scale * here["x"],
        }
        if arch != "preln":  # what enters the norm is the sum of the two
            torch.testing.assert_close(parts["value"], parts["shortcut"] + parts["scaled_branch"])
        for column, x in parts.items():
            expected[column][f"{site}.norm"] = x[real].norm(dim=-1).mean().item()
    finals = {f"{name}.norm" for name in masks(inputs, stack)} if arch == "preln" else set()
    for column, exact in expected.items():
        found = sink.column(0, "ln_input", column)
        assert found.keys() == exact.keys() | finals
        assert {site: found[site] for site in exact} == pytest.approx(exact, rel=1e-9)
        assert all(math.isnan(found[site]) == (column != "value") for site in finals)  # a final norm has no branch
    assert {row.sublayer for row in sink.tables["ln_input"].rows} >= {"self_attn", "ffn"}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("arch", "settings"), [(arch, {}) for arch in ARCHS] + [("postln", {"tie": "none"})])
def test_grad_norm_by_role(arch: str, settings: dict[str, Any], stack: str) -> None:
    model, inputs = build(arch, stack, **settings), batch(2, stack)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-8)
    sink, watcher = watch(model, inputs, stack, probes="grad_norm", optimizer=optimizer)
    loss_of(model, inputs).backward()
    watcher.step()
    watcher.flush()

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    rows: dict[str, dict[str, float]] = {}
    kinds: dict[str, float] = {}
    for role, (name, part) in model.parameter_roles().items():
        gradient = gradients[name] if part is None else gradients[name][part]
        square = gradient.pow(2).sum().item()
        pieces = role.split(".")
        inside = len(pieces) > 3
        row = ".".join(pieces[:3]) if inside else role.removesuffix(".weight").removesuffix(".bias")
        matrix = inside and pieces[3] in ("q", "k", "v", "out", "fc1", "fc2")
        kind = f"branch_{pieces[0]}" if matrix else "nonbranch"
        kinds[kind] = kinds.get(kind, 0.0) + square
        groups = ["value"]
        if (inside and pieces[3] == "norm") or (not inside and pieces[-2:-1] == ["norm"]):
            groups.append("ln")
        elif matrix:
            groups.append("bias" if pieces[-1] == "bias" else "qk" if pieces[3] in "qk" else "vo_ffn")
        for group in groups:
            rows.setdefault(group, {})
            rows[group][row] = rows[group].get(row, 0.0) + square
    for column in ("value", "vo_ffn", "qk", "bias", "ln"):
        found = sink.column(0, "grad_norm", column)
        exact = {row: math.sqrt(square) for row, square in rows[column].items()}
        assert {row: found[row] for row in exact} == pytest.approx(exact, rel=1e-9, abs=1e-300)
        assert all(math.isnan(value) for row, value in found.items() if row not in exact)
    metrics = sink.row(0)[0]
    assert metrics["grad_norm_total"] == pytest.approx(math.sqrt(sum(kinds.values())), rel=1e-9)
    for kind, square in kinds.items():
        assert metrics[f"grad_norm_{kind}"] == pytest.approx(math.sqrt(square), rel=1e-9)
    entries = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert metrics["grad_under_eps"] == pytest.approx((entries.abs() < 1e-8).double().mean().item(), rel=1e-12)
    assert len(sink.tables["grad_norm"].rows) == len(rows["value"])


def test_every_sublayers_output_has_an_activation_gradient() -> None:
    model, inputs = build("branchnorm"), batch(3)
    sink, watcher = watch(model, inputs, probes="activation_grad_norm")
    double, outputs = copy.deepcopy(model), {}
    loss_of(model, inputs).backward()
    watcher.step()
    watcher.flush()
    watcher.close()

    def keep(site: str, take_input: bool = False) -> Any:
        return lambda module, args, output: outputs.update({site: args[0] if take_input else output})

    for stack in ("encoder", "decoder"):
        getattr(double, stack).layers[0].self_attn.register_forward_hook(keep(f"{stack}.input", True))
    for site, _, sublayer in sublayers(double):
        sublayer.register_forward_hook(keep(site))
    gradients = torch.autograd.grad(loss_of(double, inputs), list(outputs.values()))
    exact = {site: g.norm().item() for site, g in zip(outputs, gradients, strict=True)}
    assert sink.column(0, "activation_grad_norm", "value") == pytest.approx(exact, rel=1e-9)
    rows = [(row.stack, row.layer, row.sublayer) for row in sink.tables["activation_grad_norm"].rows]
    assert rows[:4] == [
        ("encoder", 0, "input"),
        ("encoder", 1, "self_attn"),
        ("encoder", 1, "ffn"),
        ("encoder", 2, "self_attn"),
    ]
    assert ("decoder", 3, "cross_attn") in rows


@pytest.mark.parametrize("arch", ARCHS)
def test_similarity_and_sparsity_and_update(arch: str) -> None:
    model, inputs = build(arch, dropout=0.3), batch(4)
    start = copy.deepcopy(model)
    probes = "cosine_similarity,activation_sparsity,model_update"
    sink, watcher = watch(
        model, inputs, probes=probes, schedule=model.schedule, reference=lambda: model(**inputs), optimizer=None
    )
    watcher.step()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel()) + number).view_as(parameter))
    model.set_row(3)
    watcher.step()
    watcher.flush()

    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    twin = copy.deepcopy(model).eval()
    for stack in ("encoder", "decoder"):
        real = masks(inputs)[stack].numpy()
        for number, layer in enumerate(getattr(twin, stack).layers):
            for site, module in (
                (f"{stack}.layers.{number}", layer),
                (f"{stack}.layers.{number}.ffn.f.activation", None),
            ):
                module = layer.ffn.f.activation if module is None else module
                module.register_forward_hook(
                    lambda m, a, y, site=site, real=real: seen.update({site: (a[0].numpy()[real], y.numpy()[real])})
                )
    with torch.no_grad():
        twin(**inputs)
    cosine = {
        site: ((x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)).mean()
        for site, (x, y) in seen.items()
        if "ffn" not in site
    }
    assert sink.column(1, "cosine_similarity", "raw") == pytest.approx(cosine, rel=1e-9)
    share = {site: (y > 0).mean() for site, (_, y) in seen.items() if "ffn" in site}
    assert sink.column(1, "activation_sparsity", "nonzero_fraction") == pytest.approx(share, rel=1e-12)
    assert {row.sublayer for row in sink.tables["activation_sparsity"].rows} == {"ffn"}

    def hidden(net: nn.Module, row: int) -> Tensor:
        net = copy.deepcopy(net).eval()
        net.set_row(row)
        with torch.no_grad():
            return net.hidden(**inputs)[inputs["target_mask"]]

    exact = {
        "cumulative": hidden(model, 3) - hidden(start, 0),
        "parameters": hidden(model, 3) - hidden(start, 3),
        "schedule": hidden(start, 3) - hidden(start, 0),
    }
    for column, difference in exact.items():
        found = sink.column(1, "model_update", column)["decoder"]
        assert found == pytest.approx(difference.norm(dim=-1).mean().item(), rel=1e-7, abs=1e-12)
    assert (sink.column(1, "model_update", "schedule")["decoder"] > 0) == (arch == "branchnorm")
    assert [row.site for row in sink.tables["model_update"].rows] == ["encoder", "decoder"]


def test_at_alpha_0_branches_have_a_gradient_of_exactly_0_which_is_not_absent() -> None:
    model, inputs = build("branchnorm", alpha=0.0), batch(5)
    sink, watcher = watch(model, inputs, probes="grad_norm,activation_grad_norm")
    loss_of(model, inputs).backward()
    watcher.step()
    watcher.flush()
    metrics = sink.row(0)[0]
    assert metrics["grad_norm_branch_encoder"] == metrics["grad_norm_branch_decoder"] == 0.0
    # the same squares; the total adds them in an order that the processor's instruction set decides
    assert metrics["grad_norm_nonbranch"] == pytest.approx(metrics["grad_norm_total"], rel=1e-12)
    assert metrics["grad_norm_total"] > 0
    assert sink.absent(0, "grad_norm") == set()
    assert set(sink.column(0, "grad_norm", "vo_ffn").values()) >= {0.0}
    stream = sink.column(0, "activation_grad_norm", "value")
    assert all(value == 0.0 for site, value in stream.items() if site.startswith("encoder"))


def test_a_watched_run_of_the_reference_model_equals_an_unwatched_one() -> None:
    runs = []
    for watched in (False, True):
        model = build("branchnorm", dropout=0.2).float()
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        inputs, watcher = batch(6), None
        if watched:
            options: dict[str, Any] = {"optimizer": optimizer, "schedule": model.schedule}
            sink, watcher = watch(model, inputs, probes="all", reference=lambda m=model, i=inputs: m(**i), **options)
        for t in range(4):
            model.set_row(t)
            loss = loss_of(model, inputs)
            loss.backward()
            if watcher is not None:
                watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        runs.append([loss.detach(), *model.parameters(), *optimizer.state[next(model.parameters())].values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert min(sink.column(2, "update_ratio", "value").values()) > 0
