from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from stabilitylab.errors import InputError, ResourceError
from stabilitylab.store.identity import Identity
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


def test_a_flipped_bit_anywhere_is_never_loaded_in_silence(tmp_path: Path) -> None:
    weights = torch.arange(500.0)
    path = checkpoint.save(tmp_path / "c", 1, {"row": 1, "x": weights})
    data, chance, refused = path.read_bytes(), random.Random(3), 0
    places = [data.index(weights[250:251].numpy().tobytes()), *chance.sample(range(len(data)), 200)]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = checkpoint.load(tmp_path / "c", CPU)["x"]
        except InputError:
            refused += 1
        else:  # in the digest's own name, which nothing depends on
            assert torch.equal(loaded, weights)
    assert refused >= 198


def test_a_checkpoint_is_its_runs_own(tmp_path: Path) -> None:
    """Of a run with an id every checkpoint names it; of one that an older version began, those of before need not."""
    own, other = Identity("a" * 32), Identity("b" * 32)
    path = checkpoint.save(tmp_path / "c", 1, {"row": 1}, own.run_id)
    assert checkpoint.load(tmp_path / "c", CPU, own) == {"row": 1}
    with pytest.raises(InputError, match=r"cannot be read \(it belongs to another run\); remove it and start the run"):
        checkpoint.load(tmp_path / "c", CPU, other)
    data = path.read_bytes()
    for damaged in (
        data.replace(b" run=", b" Run="),
        data.replace(b"sha256=", b"Sha256="),
        data.replace(b"aaaa", b"a\xffaa"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"it names no run|not what was written"):
            checkpoint.load(tmp_path / "c", CPU, own)
    path = checkpoint.save(tmp_path / "c", 1, {"row": 1})  # as schema 3 had it
    assert checkpoint.load(tmp_path / "c", CPU, Identity()) == {"row": 1}
    assert checkpoint.load(tmp_path / "c", CPU, Identity("a" * 32, since=2)) == {"row": 1}
    with pytest.raises(InputError, match="it names no run"):
        checkpoint.load(tmp_path / "c", CPU, own)


def test_a_checkpoint_without_a_digest_is_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    torch.save({"row": 7}, tmp_path / "c" / "step-00000007.pt")
    (tmp_path / "c" / "step-best.pt").write_text("mine")
    assert checkpoint.load(tmp_path / "c", CPU) == {"row": 7}


def test_a_checkpoint_elsewhere_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="link out of the run"):
        checkpoint.save(tmp_path / "run/checkpoints", 1, {})
    with pytest.raises(InputError, match="link out of the run"):
        checkpoint.load(tmp_path / "run/checkpoints", CPU)
    assert not [*(tmp_path / "elsewhere").iterdir()]
