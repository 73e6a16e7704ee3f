"""Digests of tensors: the closed form in whole numbers, and the changes that they must see."""

from __future__ import annotations

import pytest
import torch

from stabilitylab.probes.state import Digester, multipliers

MASK = 2**64 - 1


def splitmix(index: int) -> int:
    """SplitMix64 of an index in Python's own numbers, with its last bit set."""
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def digest(tensor: torch.Tensor) -> int:
    return int(Digester().of(tensor)) & MASK


def expected(tensor: torch.Tensor) -> int:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return sum((int(w) + 1) * splitmix(i) for i, w in enumerate(tensor.contiguous().view(words).flatten())) & MASK


def test_multipliers_are_splitmix_and_odd() -> None:
    found = multipliers(200)
    assert [int(one) & MASK for one in found] == [splitmix(index) for index in range(200)]
    assert bool((found % 2 != 0).all()), "an even multiplier would lose a word's last bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_digest_is_the_sum_over_words(dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(7, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert digest(tensor) == expected(tensor)
    assert digest(tensor.T) == expected(tensor.T), "the order of entries counts, not that of the memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_digest_must_see(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    swapped, reversed_, one = tensor.clone(), tensor.flip(0), tensor.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    one[5] = -one[5]
    two = one.clone()
    two[6] = -two[6]
    changed = {"swapped": swapped, "reversed": reversed_, "one sign": one, "two signs": two, "all signs": -tensor}
    changed |= {"shorter": tensor[:-1], "rolled": tensor.roll(1), "minus zero": torch.zeros(64, dtype=dtype)}
    found = {name: digest(other) for name, other in changed.items()}
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) not in found.values(), found
    assert len(set(found.values())) == len(found)
    assert digest(torch.zeros(4)) != digest(-torch.zeros(4))
    assert digest(torch.zeros(4)) != digest(torch.zeros(5))


def test_torchs_own_hash_does_not_see_order_and_signs() -> None:
    """The reason why there is another digest: if torch's sees them one day, it can take its place."""
    tensor = torch.tensor([1.0, 2.0, -3.0, 4.0])
    assert torch.hash_tensor(tensor) == torch.hash_tensor(tensor.flip(0))
    assert torch.hash_tensor(tensor) == torch.hash_tensor(-tensor)


def test_later_chunks_count_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilitylab.probes.state.digests.CHUNK", 4)
    tensor = torch.randn(10, generator=torch.Generator().manual_seed(2))
    moved = torch.cat([tensor[4:8], tensor[:4], tensor[8:]])
    assert digest(tensor) != digest(moved), "two chunks changed places unseen"
    assert digest(tensor) == digest(tensor.clone())
