"""The check of several processes, as far as one process can see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import stabilitylab as sl
from stabilitylab.check import BOUNDS, RankCheck
from stabilitylab.check.bounds import not_checked, weigh
from stabilitylab.check.ranks import NAMES
from stabilitylab.check.ranks.data import batches
from stabilitylab.check.ranks.dropout import Drawn, DropoutListener, dropouts
from stabilitylab.check.ranks.gradients import copies
from stabilitylab.check.ranks.members import holders, parted, said
from stabilitylab.errors import UsageError


@dataclass
class Told:
    """Members of which all but this rank have said what is given."""

    others: Sequence[Any]
    data: list[int] = field(default_factory=lambda: [0, 1])
    tensor: list[int] = field(default_factory=lambda: [0, 0])
    parts: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def data_ranks(self) -> int:
        return max(self.data) + 1

    @property
    def tensor_ranks(self) -> int:
        return max(self.tensor) + 1

    def gathered(self, own: Any) -> list[Any]:
        return [own, *self.others]

    def gather(self, action: Any) -> list[Any]:
        return self.gathered(action())


TENSOR = {"data": [0, 0], "tensor": [0, 1]}


def test_one_process_is_told_so() -> None:
    model = nn.Linear(2, 2)
    found = sl.check_ranks(model, torch.ones(1, 2), lambda model, x: model(x).sum())
    assert found.ok
    assert [check.name for check in found.checks] == list(NAMES)
    assert {check.state for check in found.checks} == {"not checked"}
    lines = str(found).splitlines()
    assert lines[0] == "1 process"
    assert "there is one process: start several, as with torchrun --nproc-per-node 2" in lines[1]
    assert lines[-1] == "nothing was checked"
    assert found.as_dict()["ranks"] == 1


def test_a_name_to_skip_must_be_a_question() -> None:
    with pytest.raises(UsageError, match=r"'replica', which is no question\. Did you mean 'replicas'\?"):
        sl.check_ranks(nn.Linear(2, 2), torch.ones(1, 2), lambda model, x: model(x).sum(), skip=["replica"])


def test_every_question_has_a_bound_with_a_remedy_or_finds_one() -> None:
    for name in NAMES:
        own = [bound for (known, _), bound in BOUNDS.items() if known == name]
        assert own, f"{name} has no bound"
        assert all(bound.remedy for bound in own) or name == "gradient copies"


def test_the_ranks_that_differ_from_the_most_are_named() -> None:
    assert parted([(0, 7), (1, 7), (2, 7)]) == []
    assert parted([(0, 7), (1, 8), (2, 7)]) == [1]
    assert parted([(0, 7), (1, None)]) == [1], "a rank that lacks it differs"
    assert parted([(0, 1.0), (1, 1.01), (2, 2.0)], lambda a, b: abs(a - b) < 0.1) == [2]
    assert said([3]) == "rank 3"
    assert said([0, 1, 2]) == "ranks 0, 1 and 2"


def test_copies_are_those_of_one_part() -> None:
    """Two replicas of two shards: ranks 0 and 2 hold one part, 1 and 3 the other."""
    first, second = (0, 2, 0, 0), (2, 4, 0, 0)
    each = [{"w": (first, "a")}, {"w": (second, "b")}, {"w": (first, "a")}, {"w": (second, "c")}]
    assert list(holders(each)) == [("w", [(0, "a"), (2, "a")]), ("w", [(1, "b"), (3, "c")])]
    lacking = [{"w": (first, "a")}, {}]
    assert list(holders(lacking)) == [("w", [(0, "a"), (1, None)])]


@pytest.mark.parametrize(("shared", "state"), [(0, "ok"), (1, "warn"), (2, "warn"), (3, "fail")])
def test_the_share_of_samples_on_two_data_ranks_is_counted(shared: int, state: str) -> None:
    """Of 4 samples each; a sample is all tensors of its row, and rows of one value do not count."""
    draw = torch.Generator().manual_seed(0)
    own, other = (torch.randn(5, 3, generator=draw) for _ in range(2))
    own[4] = other[4] = 0.0
    other[:shared] = own[:shared]
    whole = {"x": own, "mask": torch.ones(5)}
    theirs: list[Any] = []
    told = Told([])
    told.gather = lambda action: theirs.append(action()) or theirs * 2  # type: ignore[method-assign]
    list(batches(told, [{"x": other, "mask": torch.ones(5)}]))  # type: ignore[arg-type]
    same, tensor = batches(Told(theirs), [whole])  # type: ignore[arg-type]
    assert (same.value, same.state) == (shared / 4, state)
    assert tensor.state == "not checked"
    same, tensor = batches(Told(theirs, **TENSOR), [whole])  # type: ignore[arg-type]
    assert same.state == "not checked"
    assert tensor.state == "fail", "rows differ, whatever they share"


def test_masks_are_told_from_their_input_and_output() -> None:
    x = torch.ones(64)
    listener = DropoutListener()
    torch.manual_seed(0)
    with listener:
        nn.Dropout(0.5)(x)
        nn.Dropout(0.5).eval()(x)
        nn.functional.scaled_dot_product_attention(*(torch.ones(1, 2, 2) for _ in range(3)), dropout_p=0.5)
    first, attention = listener.calls
    assert first.entering is not None
    assert first.leaving != first.entering
    assert (attention.entering, attention.leaving) == (None, None)
    again = DropoutListener()
    torch.manual_seed(0)
    with again:
        nn.Dropout(0.5)(x)
    assert again.calls == [first]


def test_dropout_is_right_where_tensor_ranks_agree_and_data_ranks_do_not() -> None:
    def told(other: Drawn, **where: Any) -> list[str]:
        listener = DropoutListener()
        listener.calls = [Drawn("s", 1, 2)]
        return [check.state for check in dropouts(Told([[other]], **where), listener)]  # type: ignore[arg-type]

    assert told(Drawn("s", 1, 2)) == ["warn", "not checked"]
    assert told(Drawn("t", 1, 3)) == ["ok", "not checked"]
    assert told(Drawn("s", 1, 2), **TENSOR) == ["not checked", "ok"]
    assert told(Drawn("t", 1, 3), **TENSOR) == ["not checked", "fail"]
    assert told(Drawn("t", 5, 3), **TENSOR) == ["not checked", "not checked"], "each rank has activations of its own"


def test_remedies_say_whether_tensor_or_data_ranks_differ() -> None:
    gradient, part = torch.tensor([1.0, 2.0]), (0, 2, 0, 0)
    shown: list[Any] = []
    told = Told([], parts={"norm.weight": part})
    told.gather = lambda action: shown.append(action()) or [shown[-1], shown[-1]]  # type: ignore[method-assign]
    assert copies(told, {"norm.weight": gradient})[0].state == "ok"  # type: ignore[arg-type]
    for where, remedy in (({}, "after_backward="), (TENSOR, "over the tensor group")):
        other = Told([], parts={"norm.weight": part}, **where)
        other.gather = lambda action: [action(), shown[0]]  # type: ignore[method-assign]
        check, names = copies(other, {"norm.weight": 2 * gradient})  # type: ignore[arg-type]
        assert check.state == "fail"
        assert names == {"norm.weight"}
        assert remedy in check.remedy


def test_the_text_has_findings_after_what_is_right_and_the_verdict_last() -> None:
    checks = [
        weigh("dropout on data ranks", 2.0, "ranks 0 and 1 begin at the same state"),
        weigh("replicas", 0.0, "3 parameters"),
        weigh("same batch", 1.0, "ranks 0 and 1"),
        not_checked("buffers", "the model has no buffers"),
    ]
    found = RankCheck(4, 2, 2, checks)
    lines = str(found).splitlines()
    assert lines[0] == "4 processes: 2 data ranks, each of 2 tensor ranks"
    assert [line.split(":")[0].split("  ")[0] for line in lines[1:5]] == ["ok", "FAIL", "WARN", "not checked"]
    assert lines[-1] == "not ready to train; look first at same batch"
    assert found.suspect is not None
    assert found.as_dict()["suspect"]["bound"] == "same batch"
    warned = RankCheck(2, 2, 1, checks[:2])
    assert warned.ok
    assert str(warned).endswith("ok, with warnings; look first at dropout on data ranks")
