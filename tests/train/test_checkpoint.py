from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stabilitylab.errors import InputError, ResourceError
from stabilitylab.train import checkpoint

CPU = torch.device("cpu")


def test_the_newest_of_two_kept(tmp_path: Path) -> None:
    for row in (5, 10, 200):
        checkpoint.save(tmp_path / "c", row, {"row": row, "x": torch.arange(3)})
    assert [path.name for path in checkpoint.found(tmp_path / "c")] == ["step-00000010.pt", "step-00000200.pt"]
    state = checkpoint.load(tmp_path / "c", CPU)
    assert state["row"] == 200
    assert torch.equal(state["x"], torch.arange(3))


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    for row in (1, 2):
        checkpoint.save(tmp_path, row, {"row": row, "x": torch.arange(1000)})
    newest = tmp_path / "step-00000002.pt"
    newest.write_bytes(newest.read_bytes()[:500])
    with pytest.raises(InputError, match=r"step-00000002.pt cannot be read .* remove it to resume from step-00000001"):
        checkpoint.load(tmp_path, CPU)
    newest.unlink()
    assert checkpoint.load(tmp_path, CPU)["row"] == 1


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        checkpoint.load(tmp_path / "none", CPU)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, {"row": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stabilitylab.train.checkpoint.os.fsync", full)
    with pytest.raises(ResourceError, match="No space left on device; free some space"):
        checkpoint.save(tmp_path, 2, {"row": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert checkpoint.load(tmp_path, CPU)["row"] == 1
