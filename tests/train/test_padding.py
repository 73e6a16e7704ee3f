"""On a GPU lengths are padded to multiples of 8: the same run, but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rest_slow import rest_slow

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import plan
from stabilitylab.train.environment import ALIGNMENT, aligned
from stabilitylab.train.loop import Trainer

SETTINGS = (
    "data.sentences=4 data.held_out=6 model.d_model=16 model.d_ffn=32 data.max_length=13 train.steps=4 train.lr=1e-3"
)


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
def test_what_is_added_is_padding(stack: str) -> None:
    config = resolve(parse_set([*SETTINGS.split(), f"model.stack={stack}"]), depth=2)
    batch = load_data(config.data, stack=config.model.stack).micro_batch(0)
    assert any(tensor.shape[-1] % 8 for tensor in batch.tensors())
    longer = aligned(batch, torch.device("cuda"))
    for short, long in zip(batch.tensors(), longer.tensors(), strict=True):
        assert long.dtype is short.dtype
        assert long.shape[-1] % 8 == 0
        assert torch.equal(long[:, : short.shape[-1]], short)
        assert not long[:, short.shape[-1] :].any()
    assert longer.tokens == batch.tokens
    assert longer.padded(8).shapes == longer.shapes
    assert aligned(batch, torch.device("cpu")).shapes == batch.shapes


@pytest.mark.slow
@pytest.mark.parametrize("stack", rest_slow(["encoder-decoder", "encoder", "decoder"], ["encoder"]))
def test_a_padded_run_is_the_run(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tables of every probe, too."""
    found = []
    for name in ("as it is", "padded"):
        if name == "padded":
            monkeypatch.setitem(ALIGNMENT, "cpu", 8)
        settings = [*SETTINGS.split(), f"model.stack={stack}", "probes.names=['all']", "probes.every=1"]
        prepared = plan(resolve(parse_set([*settings, "probes.update_every=1"]), depth=4))
        writer = RunWriter.create(tmp_path / name, {"config": {}})
        trainer = Trainer(prepared.config, prepared.dataset, writer, prepared.device)
        trainer.fit(lambda: False, lambda report: None)
        trainer.watcher.close()
        assert (trainer.passes.held_out.labels.shape[-1] % 8 == 0) is (name == "padded")
        found.append(Run.open(tmp_path / name))
    one, other = found
    assert one.metrics["nll"].to_numpy() == pytest.approx(other.metrics["nll"].to_numpy(), rel=1e-6, nan_ok=True)
    assert one.metrics["validation_nll"].iloc[-1] == pytest.approx(other.metrics["validation_nll"].iloc[-1], rel=1e-5)
    for table in one.tables:
        for column in one.table(table).columns:
            if "p99" in column:  # a token on the border of a bin
                continue
            a, b = (run.frame(table)[column].to_numpy(dtype=float, na_value=np.nan) for run in (one, other))
            size = np.nanmax(np.abs(a), initial=0)
            rough = 5e-2 if column == "residual" else 2e-3  # how far an iteration still is from its end
            if column == "moved":
                # softmax takes no notice of the keys' bias: its gradient is rounding, of which Adam makes whole steps.
                keys = one.frame(table)["site"].str.endswith("qkv.bias").to_numpy()
                np.testing.assert_allclose(b[keys], a[keys], rtol=0.1, err_msg=f"{table}.{column} of keys")
                a, b = a[~keys], b[~keys]
            np.testing.assert_allclose(b, a, rtol=rough, atol=1e-4 * size, err_msg=f"{table}.{column}")
