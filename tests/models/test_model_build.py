"""From names, presets and settings to a model; what is refused, and how early."""

from __future__ import annotations

import pytest
import torch
from rest_slow import rest_slow

from stabilitylab.config import ModelConfig
from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.models import ARCHS, Residual, Transformer, build_model, canonical, parameter_count
from stabilitylab.models.archs.admin import Admin
from stabilitylab.models.archs.branchnorm import BranchNorm
from stabilitylab.models.archs.deepnorm import DeepNorm
from stabilitylab.models.archs.postln import PostLN
from stabilitylab.models.archs.postln_init import PostLNInit
from stabilitylab.models.archs.preln import PreLN
from stabilitylab.models.base import arch

VOCAB = {"source_vocab": 7, "target_vocab": 9}


def test_the_registry_holds_the_papers_architectures() -> None:
    published = {
        "postln": PostLN,
        "preln": PreLN,
        "postln-init": PostLNInit,
        "deepnorm": DeepNorm,
        "branchnorm": BranchNorm,
        "admin": Admin,
    }
    assert published.items() <= dict(ARCHS).items()
    rows_of_the_papers_tables = {"dsinit", "rezero", "rfixup", "tfixup", "dlcl", "normformer", "subln"}
    in_use_today = {"sandwich", "periln", "layernorm-scaling", "resi-dual"}
    in_use_today |= {"keel", "gpas", "mix-ln", "hybridnorm", "hybridnorm-star", "completep"}
    in_use_today |= {"hyper-connections", "mhc", "siamese-norm", "attnres"}
    variants = {"dsinit-code", "dlcl-post", "hyper-connections-static", "attnres-block"}
    assert ARCHS.keys() - published.keys() == rows_of_the_papers_tables | in_use_today | variants
    assert ARCHS.kind == "architecture"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Post-LN", "postln"),
        ("post_ln", "postln"),
        ("PostLN init", "postln-init"),
        ("DeepNorm", "deepnorm"),
        ("ResiDual", "resi-dual"),
        ("Peri-LN", "periln"),
        ("DS-Init", "dsinit"),
        ("Sub-LN", "subln"),
    ],
)
def test_names_are_forgiving(written, name) -> None:
    model = build_model(arch=written, depth=2, **VOCAB)
    assert model.config.arch == name
    assert {type(residual) for residual in model.residuals()} == {ARCHS[name]}
    mixed = canonical(ModelConfig(arch=written, decoder_arch="pre-ln"))
    assert (mixed.arch, mixed.decoder_arch) == (name, "preln")


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(UsageError, match=r"unknown architecture 'branchnrom'; choose one of admin, .*'branchnorm'\?"):
        build_model(arch="branchnrom", depth=2, **VOCAB)


@pytest.mark.parametrize("name", ["mixnorm", "Mix-Norm"])
def test_mixnorm_is_defined_by_no_paper(name) -> None:
    with pytest.raises(UsageError, match=r"no paper defines it; BranchNorm's Table 2 .* choose one of admin"):
        build_model(arch="postln", decoder_arch=name, depth=2, **VOCAB)
    with pytest.raises(UsageError, match="no paper defines"):
        ARCHS.resolve(name)


def test_an_architecture_is_added_by_one_class() -> None:
    with ARCHS.restored():

        @arch("half")
        class Half(PostLN):
            def forward(self, x, *context):
                return self.norm(self.shortcut(0.5 * x) + self.branch(self.f(x, *context)))

        tokens = torch.arange(6).view(2, 3)
        half, deepnorm = (build_model(arch=a, depth=4, **VOCAB, **more) for a, more in (
            ("half", {}), ("deepnorm", {"alpha": 0.5, "init": "xavier"})))  # fmt: skip
        assert torch.equal(half(source=tokens, target=tokens), deepnorm(source=tokens, target=tokens))
        with pytest.raises(ValueError, match="registered already"):
            arch("HALF")(Half)
    assert "half" not in ARCHS


@pytest.mark.parametrize("name", ["postln", "preln", "postln-init", "admin"])
def test_an_alpha_where_there_is_none_is_refused(name) -> None:
    with pytest.raises(UsageError, match=f"{name!r} has no alpha to replace.*branchnorm, deepnorm"):
        build_model(arch=name, alpha=2.0, depth=2, **VOCAB)
    build_model(arch=name, decoder_arch="deepnorm", alpha=2.0, depth=2, **VOCAB)
    build_model(arch=name, growth="exp", T=3, t0=0, depth=2, **VOCAB)


def test_settings_override_the_configuration() -> None:
    config = ModelConfig(arch="deepnorm", encoder_layers=3, decoder_layers=2, T=50)
    assert build_model(config, **VOCAB).config == config
    changed = build_model(config, **VOCAB, depth=8, heads=4, dropout=0.1).config
    assert (changed.encoder_layers, changed.decoder_layers, changed.heads, changed.T) == (4, 4, 4, 50)
    small = build_model(config, **VOCAB, preset="small").config
    assert (small.d_model, small.d_ffn, small.heads, small.T, small.arch) == (256, 1024, 4, 4000, "deepnorm")
    assert (small.encoder_layers, small.decoder_layers) == (3, 2)
    tiny = build_model(preset="tiny", depth=4, **VOCAB).config
    assert (tiny.arch, tiny.d_model, tiny.d_ffn, tiny.heads, tiny.T) == ("branchnorm", 64, 128, 2, 100)
    single = build_model(stack="decoder", depth=3, **VOCAB)
    assert single.encoder is None
    assert single.decoder is not None
    assert len(single.decoder.layers) == 3
    assert single.decoder.embedding.num_embeddings == 9


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"depth": 3}, "--depth 3 is odd"),
        ({"depth": 0}, "--depth 0 is out of range"),
        ({"depth": 10**9}, "--depth 1000000000 is out of range"),
        ({"depth": 2, "width": 64}, "unknown setting 'model.width'"),
        ({"depth": 2, "preset": "huge"}, "unknown preset 'huge'"),
        ({"depth": 2, "heads": 3}, "must be a multiple of model.heads = 3"),
        ({"depth": 2, "tie": "all"}, "one vocabulary for both sides, not 7 and 9"),
        ({"depth": 2, "target_vocab": 0}, "target_vocab = 0 must be at least 1"),
    ],
)
def test_wrong_settings_get_one_sentence(settings, sentence) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(**(VOCAB | settings))
    assert sentence in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_model_that_cannot_fit_is_refused_before_it_is_built() -> None:
    with pytest.raises(ResourceError, match=r"the weights of this model alone take [\d,]+ GiB"):
        build_model(depth=20_000, d_model=65_536, d_ffn=1_048_576, **VOCAB)


@pytest.mark.parametrize(
    ("name", "stack"),
    rest_slow(
        [(name, stack) for name in sorted(ARCHS) for stack in ARCHS[name].defined_for],
        [*((name, "encoder-decoder") for name in ARCHS), ("preln", "encoder"), ("postln", "decoder")],
    ),
)
def test_parameter_count(name, stack) -> None:
    model = build_model(arch=name, stack=stack, depth=6, **VOCAB)
    assert parameter_count(model.config, **VOCAB) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tie", ["none", "output"])
def test_parameter_count_of_unequal_and_mixed_stacks(tie) -> None:
    model = build_model(arch="admin", decoder_arch="preln", encoder_layers=2, decoder_layers=5, tie=tie, **VOCAB)
    assert parameter_count(model.config, **VOCAB) == sum(p.numel() for p in model.parameters())


def paths(model: Transformer) -> set[str]:
    return {name for name, _ in model.named_modules()}


def test_module_paths_and_taps_are_the_documented_ones() -> None:
    model = build_model(arch="branchnorm", decoder_arch="preln", depth=4, **VOCAB)
    names = paths(model)
    for stack, sublayers in (("encoder", ("self_attn", "ffn")), ("decoder", ("self_attn", "cross_attn", "ffn"))):
        layer = model.get_submodule(f"{stack}.layers.1")
        assert [name for name, _ in layer.named_children()] == list(sublayers)
        for sublayer in sublayers:
            tails = {"f", "norm", "shortcut", "branch"} | ({"scaled_branch"} if stack == "encoder" else set())
            residual = layer.get_submodule(sublayer)
            assert isinstance(residual, Residual)
            assert {name for name, _ in residual.named_children()} == tails
    assert {"encoder.layers.1.ffn.f.fc1", "encoder.layers.1.ffn.f.activation", "decoder.layers.0.ffn.f.fc2"} <= names
    assert "decoder.norm" in names
    assert "encoder.norm" not in names
    assert isinstance(model.get_submodule("decoder.layers.0.ffn.f.activation"), torch.nn.ReLU)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {module.eps for module in norms} == {1e-5}


NOT_BUILT = (
    "SpanNorm",
    "FuseNorm",
    "DeepCrossAttention",
    "DCA",
    "Complete(d)P",
    "nGPT",
    "LAuReL",
    "LAuReL-LR",
    "SimpleNorm",
    "SimpleGPT",
)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_schemes_that_are_not_built_are_refused_with_what_is_missing(name) -> None:
    with pytest.raises(UsageError, match=r"is not built: .*(read|state|later).*; choose one of"):
        ARCHS.resolve(name)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_plug_in_may_build_such_a_scheme(name) -> None:
    with ARCHS.restored():

        @arch(name.lower())
        class Built(PreLN):
            pass

        assert ARCHS[name] is Built
        build_model(arch=name, depth=2, **VOCAB)
