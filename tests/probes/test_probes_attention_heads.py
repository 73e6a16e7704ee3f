"""The largest logit of each head in the training forwards, against q k^T in float64; and what is not seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import stabilitylab
from stabilitylab.probes import Watcher
from stabilitylab.probes.library.attention import by_head
from stabilitylab.store import Run

EXACT = {"rel": 1e-12, "abs": 1e-14}
WIDTH, HEADS, TOKENS, VOCAB = 8, 2, 5, 11


class SelfAttention(nn.Module):
    """``kernel``: how its softmax is taken."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.kernel == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.mT / q.shape[-1] ** 0.5
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed = logits.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class FlexSelfAttention(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (
            self.out(torch.ops.aten.relu(q + k + v).transpose(1, 2).flatten(2)) if x.dim() else flex_attention(q, k, v)
        )


class Decoder(nn.Module):
    def __init__(self, kernel: str = "fused", recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        kind = FlexSelfAttention if kernel == "flex" else SelfAttention
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), kind(kernel)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.recompute and self.training:
                x = x + checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = x + layer(x)
        return x


def ids(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(seed))


def largest(model: nn.Module, batches: list[Tensor], real: Tensor) -> dict[str, float]:
    """max_j<=i q_i k_j / sqrt(d_h) over real queries i, by (module, head): one query at a time."""
    found: dict[str, float] = {}
    for tokens in batches:
        x = model.embed(tokens)
        for n, layer in enumerate(model.layers):
            q, k, _ = layer[1].qkv(layer[0](x)).chunk(3, -1)
            for head in range(HEADS):
                name, own = f"layers.{n}.1.head_{head}", slice(head * 4, head * 4 + 4)
                for b, i in real.nonzero().tolist():
                    logits = [float(q[b, i, own] @ k[b, j, own]) / 2 for j in range(i + 1)]
                    found[name] = max(found.get(name, -1e300), *logits)
            x = x + layer(x)
    for n in range(2):
        found[f"layers.{n}.1"] = max(found[f"layers.{n}.1.head_{head}"] for head in range(HEADS))
    return found


def trained(watched: bool, rows: int = 2, micro: int = 2, **options: Any) -> tuple[list[Tensor], ListSink]:
    torch.manual_seed(0)
    model, sink = Decoder(**options).double(), ListSink()
    real = torch.arange(TOKENS)[None] < torch.tensor([[5], [3], [4]])
    watcher = Watcher(model, sink, probes="attention_heads", every=1, mask=real, strict=True) if watched else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for row in range(rows):
        for part in range(micro):
            model(ids(row * micro + part)).square().mean().backward()
        if watcher is not None:
            watcher.step()
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.flush()
        watcher.close()
    return [parameter.detach() for parameter in model.parameters()], sink


@pytest.mark.parametrize("recompute", ["", "reentrant", "not"])
@pytest.mark.parametrize("kernel", ["fused", "written out"])
def test_each_head_has_the_largest_logit_of_all_micro_batches(kernel: str, recompute: str) -> None:
    parameters, sink = trained(True, kernel=kernel, recompute=recompute)
    untouched, _ = trained(False, kernel=kernel, recompute=recompute)
    assert all(map(torch.equal, parameters, untouched))
    torch.manual_seed(0)
    real = torch.arange(TOKENS)[None] < torch.tensor([[5], [3], [4]])
    with torch.no_grad():
        exact = largest(Decoder(kernel).double(), [ids(0), ids(1)], real)
    assert sink.column(0, "attention_heads", "max_logit") == pytest.approx(exact, **EXACT)
    assert {(row.site, row.layer, row.sublayer) for row in sink.tables["attention_heads"].rows} == {
        (f"layers.{n}.1{head}", n + 1, f"1{head}") for n in range(2) for head in ("", ".head_0", ".head_1")
    }
    assert sink.column(1, "attention_heads", "max_logit") != sink.column(0, "attention_heads", "max_logit")


def test_a_batch_without_sentences_has_no_heads() -> None:
    caught = {"max_logit": torch.empty(0, HEADS, 5)}
    assert by_head(caught, nn.MultiheadAttention(4, HEADS, batch_first=True), torch.empty(0, 5)) == {}


def test_it_looks_at_training_where_attention_looks_at_the_held_out_batch() -> None:
    torch.manual_seed(0)
    model, sink = Decoder().double(), ListSink()
    held_out = lambda: model(ids(0))  # noqa: E731
    both = "attention,attention_heads"
    with Watcher(model, sink, probes=both, every=1, update_every=1, reference=held_out, strict=True) as watcher:
        for seed in (0, 1):
            model.zero_grad()
            model(ids(seed)).square().mean().backward()
            watcher.step()
    of_heads = [sink.column(row, "attention_heads", "max_logit") for row in (0, 1)]
    held = [sink.column(row, "attention", "max_logit") for row in (0, 1)]
    assert held[0] == held[1]
    for name, value in held[0].items():
        assert of_heads[0][name] == pytest.approx(value, **EXACT)
    assert of_heads[1] != of_heads[0]


def test_rows_that_are_probed_now_and_then_have_their_heads() -> None:
    model, sink = Decoder(), ListSink()
    with Watcher(model, sink, probes="attention_heads,residual_norm", every=2, strict=True) as watcher:
        for row in range(5):
            model(ids(row)).square().mean().backward()
            watcher.step()
    probed = [step for step, _, tables in sink.rows if "attention_heads" in tables]
    assert probed == [0, 2, 4]
    assert not any(sink.absent(step, "attention_heads") for step in probed)


def test_torchs_own_attention_has_its_heads() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True)
    model, sink = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double(), ListSink()
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    with Watcher(model, sink, probes="attention_heads", every=1, strict=True) as watcher:
        model(x).square().mean().backward()
        watcher.step()
    own = model.layers[0].self_attn
    q, k, _ = F.linear(x, own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
    exact = (q.unflatten(-1, (HEADS, -1)).transpose(1, 2) @ k.unflatten(-1, (HEADS, -1)).transpose(1, 2).mT / 2).amax(
        (0, 2, 3)
    )
    found = sink.column(0, "attention_heads", "max_logit")
    assert [found[f"layers.0.self_attn.head_{h}"] for h in range(HEADS)] == pytest.approx(exact.tolist(), **EXACT)


def test_a_kernel_that_shows_no_logits_is_named_once(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    model = Decoder("flex")
    with stabilitylab.watch(
        model, out=tmp_path / "run", probes="attention,attention_heads", every=1, reference=lambda: model(ids(0))
    ) as watcher:
        for _ in range(2):
            model(ids(0)).square().mean().backward()
            watcher.step(loss=1.0)
    said = [record.getMessage() for record in caplog.records if "no number of" in record.getMessage()]
    assert said == [
        f"row 0: no number of {table} for layers.0.1, layers.1.1: each calls flex_attention."
        for table in ("attention_heads", "attention")
    ]
    unseen = Run.open(tmp_path / "run").manifest["places_unseen"]
    assert unseen["attention_heads"] == unseen["attention"] == ["layers.0.1", "layers.1.1"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_is_named_and_keeps_its_graph(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model, sink = Decoder(), ListSink()
    model.compile(backend="eager", fullgraph=True)
    with Watcher(model, sink, probes="attention_heads,ln_input", every=1) as watcher:
        model(ids(0)).square().mean().backward()
        watcher.step()
    assert sink.row(0)[1]["attention_heads"].absent.all()
    assert not sink.absent(0, "ln_input")
    said = [record.getMessage() for record in caplog.records if "no number of" in record.getMessage()]
    assert said == [
        "row 0: no number of attention_heads for layers.0.1, layers.1.1: each takes its softmax in compiled code, or "
        "in a kernel that shows no logits."
    ]
    torch._dynamo.reset()


def test_hooks_and_modes_are_gone_after_a_forward_that_failed() -> None:
    class Failing(SelfAttention):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("it fails")
            return super().forward(x)

    model, sink = Decoder(), ListSink()
    own = model.layers[1][1] = Failing("fused")
    with Watcher(model, sink, probes="attention_heads", every=1, strict=True) as watcher:
        own.fails = True
        with pytest.raises(RuntimeError, match="it fails"):
            model(ids(0))
        assert torch.overrides._len_torch_function_stack() == 0
        own.fails = False
        model(ids(0)).square().mean().backward()
        watcher.step()
    assert not sink.absent(0, "attention_heads")
    assert not own._forward_pre_hooks
    assert not own._forward_hooks


def test_a_resumed_run_has_the_heads_from_its_first_row_on(tmp_path: Any) -> None:
    model = Decoder()
    options: dict[str, Any] = {"out": tmp_path / "run", "probes": "attention_heads", "every": 1, "reference": None}
    first = stabilitylab.watch(model, **options)
    model(ids(0)).sum().backward()
    first.step(loss=1.0)
    state = first.checkpoint()
    first.close()
    first.run.close()
    with stabilitylab.watch(model, resume=state, **options) as watcher:
        model(ids(1)).sum().backward()
        watcher.step(loss=1.0)
    frame = Run.open(tmp_path / "run").frame("attention_heads")
    assert len(frame) == 2 * 6
    assert not frame["max_logit"].isna().any()
