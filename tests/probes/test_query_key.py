"""Which weights make queries and keys: by families of models, and by what a gradient of them alone is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stabilitylab as sl
from stabilitylab.probes.places.attending import query_key

CUT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}


def apart(model: nn.Module) -> set[str]:
    """Names of the weights of which something counts as queries and keys alone."""
    modules = dict(model.named_modules())
    return {
        name
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and any(part.apart for part in query_key(name, modules, weight.shape))
    }


def test_families_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    special = {"bos_token_id": 0, "eos_token_id": 1}
    bert = apart(transformers.BertModel(transformers.BertConfig(**CUT)))
    assert bert == {f"encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key")}
    llama = apart(transformers.LlamaModel(transformers.LlamaConfig(**CUT, **special)))
    assert llama == {f"layers.0.self_attn.{name}_proj.weight" for name in "qk"}
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    t5 = apart(transformers.T5Model(transformers.T5Config(**sizes)))
    places = ("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention")
    assert t5 == {f"{at}.{n}.weight" for at in (*places, "decoder.block.0.layer.1.EncDecAttention") for n in "qk"}
    assert apart(transformers.GPT2Model(transformers.GPT2Config(**GPT2))) == {"h.0.attn.c_attn.weight"}
    neox = transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**CUT, **special))
    assert apart(neox) == {"layers.0.attention.query_key_value.weight"}


@pytest.mark.parametrize("family", ["GPTNeoX", "Bloom", "Falcon", "GPT2"])
def test_without_them_attention_sees_no_difference_between_tokens(family: str) -> None:
    """What is told apart makes queries and keys: where it is 0 two sentences are attended alike, else they are not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = GPT2 if family in ("Bloom", "GPT2") else {**CUT, "bos_token_id": 0, "eos_token_id": 1}
    sizes |= {"Bloom": {"hidden_size": 16}, "Falcon": {"multi_query": False, "alibi": False}}.get(family, {})
    sizes["n_head" if family in ("Bloom", "GPT2") else "num_attention_heads"] = 4  # of 2 thirds would pass for heads
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{family}Model")(config).eval()
    modules, ids = dict(model.named_modules()), torch.randint(3, 50, (2, 6))
    (name,) = apart(model)
    weight = model.get_parameter(name)
    parts = query_key(name, modules, weight.shape)
    assert sum(weight[own.part].numel() for own in parts) == weight.numel()
    bias = modules[name.removesuffix(".weight")].bias
    for removed in (True, False):
        with torch.no_grad():
            kept = weight.clone()
            if bias is not None:
                bias.zero_()
            for own in parts:
                if own.apart == removed:
                    weight[own.part] = 0
            found = model(ids, output_attentions=True)
            weight.copy_(kept)
        one, other = found.attentions[0]
        assert torch.allclose(one, other, atol=1e-6) == removed


def test_columns_of_gpt2(tmp_path: Any) -> None:
    """Whose weights are (in, out): against the slices of the gradient itself, in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, n_positions=8)).double().eval()
    ids = torch.randint(50, (3, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sl.watch(model, out=tmp_path / "run", every=1, reference=None, optimizer=optimizer) as w:
        loss = model(ids, labels=ids).loss
        loss.backward()
        w.step(loss=loss)
        own: Any = model.transformer.h[0].attn
        grads = [parameter.grad.clone() for parameter in (own.c_attn.weight, *own.parameters())]
        optimizer.step()
    frame = sl.Run.open(tmp_path / "run").frame("grad_norm")
    found = frame[frame["sublayer"] == "attn"].iloc[0]
    assert found["qk"] == pytest.approx(float(torch.linalg.vector_norm(grads[0][:, :32])), rel=1e-6)
    whole = float(sum((grad**2).sum() for grad in grads[1:])) ** 0.5
    assert found["value"] == pytest.approx(whole, rel=1e-6)
    assert 0 < found["qk"] < found["value"]


def test_torch_s_attention_is_cut_and_keys_with_values_are_not() -> None:
    assert apart(nn.MultiheadAttention(16, 2)) == {"in_proj_weight"}
    assert apart(nn.MultiheadAttention(16, 2, kdim=8, vdim=8)) == {"q_proj_weight", "k_proj_weight"}

    nano = nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
    assert apart(nn.Sequential(nano)) == {"0.c_attn.weight"}
    grouped = nn.ModuleDict({"qkv_proj": nn.Linear(8, 16), "out_proj": nn.Linear(8, 8)})
    assert apart(nn.Sequential(grouped)) == set()  # fewer keys than queries: where they end is not told
    neox = nn.ModuleDict({"query_key_value": nn.Linear(8, 24), "dense": nn.Linear(8, 8)})
    assert apart(nn.Sequential(neox)) == set()  # by heads, of which nothing says how large they are
    neox.head_dim = 3
    assert apart(nn.Sequential(neox)) == set()
    neox.head_dim = 4
    assert apart(nn.Sequential(neox)) == {"0.query_key_value.weight"}

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.kv_proj, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    assert apart(nn.Sequential(Shared())) == {"0.q_proj.weight"}
    assert apart(nn.Sequential(nn.ModuleDict({"key": nn.Linear(8, 8), "value": nn.Linear(8, 8)}))) == set()


@pytest.mark.parametrize("fused", [True, False])
def test_their_gradient_norm_is_a_column(fused: bool, tmp_path: Any) -> None:
    """Against the slices of the gradient itself, in float64."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    if not fused:
        layer.self_attn = nn.MultiheadAttention(8, 2, kdim=8, vdim=8, batch_first=True)
        own = layer.self_attn
        own._qkv_same_embed_dim = False
        own.q_proj_weight, own.k_proj_weight, own.v_proj_weight = (nn.Parameter(torch.randn(8, 8) / 3) for _ in "qkv")
        own.register_parameter("in_proj_weight", None)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    with sl.watch(model, out=tmp_path / "run", every=1, reference=None) as w:
        loss = (model(x) ** 3).mean()
        loss.backward()
        w.step(loss=loss)
        expected = []
        for each in model.layers:
            own: Any = each.self_attn
            weights = (
                own.in_proj_weight.grad[:16] if fused else torch.cat([own.q_proj_weight.grad, own.k_proj_weight.grad])
            )
            expected.append(float(torch.linalg.vector_norm(weights)))
    frame = sl.Run.open(tmp_path / "run").frame("grad_norm")
    found = frame[frame["sublayer"] == "self_attn"]["qk"].tolist()
    assert found == pytest.approx(expected, rel=1e-6)
    assert (frame[frame["sublayer"] == "self_attn"]["value"] > found).all()
