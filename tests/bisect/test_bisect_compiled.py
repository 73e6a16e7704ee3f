"""Bisect of models as people have them: the reference Transformer compiled, and Hugging Face's GPT-2 in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planted import after, ids, noisy, reference_loss, reference_model
from torch import Tensor, nn

import stabilitylab as sl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # from torch._dynamo
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),  # from torch._dynamo
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from inside torch._inductor
]


def test_the_reference_model_eager_and_compiled() -> None:
    """Compiled it differs by rounding; a fault of 1 % in a compiled sub-layer is named and confirmed. The fault is
    compiled without inductor, whose kernels the first half tries."""
    model = reference_model(1, "preln")
    torch._dynamo.reset()
    found = sl.bisect(model, torch.compile(copy.deepcopy(model)), ids(), reference_loss)
    assert found.verdict in ("rounding", "identical")
    assert found.exit_code == 0
    other = copy.deepcopy(model)
    after("decoder.layers.0.ffn.f", noisy(0.01))(other)
    torch._dynamo.reset()
    broken = sl.bisect(model, torch.compile(other, backend="aot_eager"), ids(), reference_loss)
    assert (broken.where, broken.confirmed) == ("decoder.layers.0.ffn.f", True)
    assert broken.exit_code == 1


def test_gpt2_in_float32_and_bfloat16() -> None:
    """Under autocast it differs by rounding; a block whose attention has a wrong scale is named in bfloat16 too."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=48, n_head=4, vocab_size=61, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # attention that chooses, as a trained one does
        for block in model.get_submodule("transformer.h"):
            block.attn.c_attn.weight.mul_(8)  # pyright: ignore
    batch = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(0))

    def loss_of(own: Any, tokens: Tensor) -> Tensor:
        return own(input_ids=tokens, labels=tokens).loss

    def in_bf16(own: Any, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(own, tokens)

    clean = sl.bisect(model, copy.deepcopy(model), batch, (loss_of, in_bf16))
    assert clean.verdict == "rounding"
    other = copy.deepcopy(model)
    other.get_submodule("transformer.h.1.attn").scaling = 1.0  # pyright: ignore
    for loss in (loss_of, in_bf16):
        found = sl.bisect(model, other, batch, (loss_of, loss))
        assert found.where == "transformer.h.1.attn"
        assert found.confirmed
