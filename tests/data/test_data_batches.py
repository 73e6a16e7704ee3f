"""Batches: pure in (seed, position), full, consistent, each pair once an epoch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from invented_text import Writer, invented
from rest_slow import rest_slow

from stabilitylab.config import DataConfig, Stack
from stabilitylab.data import Batch, Dataset, load_data
from stabilitylab.data.batches import mask_tokens
from stabilitylab.data.corpus import BOS, EOS, MASK, PAD, Rows

STACKS: tuple[Stack, ...] = ("encoder-decoder", "encoder", "decoder")


def text_config(paths: tuple[Path, Path], **settings) -> DataConfig:
    return DataConfig(source=f"text:{paths[0]},{paths[1]}", **{"vocab_size": 300, "held_out": 48, **settings})


def same(one: Batch, two: Batch) -> bool:
    tensors = [[*b.inputs.values(), b.labels, b.weight, *b.masks.values()] for b in (one, two)]
    return one.inputs.keys() == two.inputs.keys() and all(map(torch.equal, *tensors))


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> Stack:
    return request.param


@pytest.fixture
def data(stack: Stack, parallel: tuple[Path, Path]) -> Dataset:
    return load_data(text_config(parallel), stack=stack)


@pytest.mark.slow
def test_a_micro_batch_depends_on_seed_and_position_alone(parallel: tuple[Path, Path], stack: Stack) -> None:
    one, two = (load_data(text_config(parallel, seed=5), stack=stack) for _ in range(2))
    far = 3 * one.batches_per_epoch + 1
    forward = [one.micro_batch(step) for step in (0, 1, 2, far)]
    backward = [two.micro_batch(step) for step in (far, 2, 1, 0)][::-1]
    assert all(map(same, forward, backward))
    assert same(one.micro_batch(3, 1, 4), two.micro_batch(13))
    assert not same(forward[0], forward[1])
    other = load_data(text_config(parallel, seed=6), stack=stack)
    assert not same(other.micro_batch(0), forward[0])
    assert same(other.held_out, one.held_out)


@pytest.mark.parametrize(("step", "index", "count"), rest_slow([(0, 2, 2), (0, -1, 1), (-1, 0, 1)], [(0, 2, 2)]))
def test_a_micro_batch_outside_its_update_is_refused(step: int, index: int, count: int) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_data(DataConfig(), stack="decoder").micro_batch(step, index, count)


@pytest.mark.parametrize(("shapes", "multiple"), rest_slow([(2, 1), (5, 1), (4, 8), (1, 8)], {(2, 1), (4, 8)}))
def test_batches_come_in_the_shapes_that_are_asked_for(
    parallel: tuple[Path, Path], stack: Stack, shapes: int, multiple: int
) -> None:
    """Each pair once an epoch, whatever the shapes; and ``padding`` is what is found by counting."""
    one, two = (
        load_data(text_config(parallel, sentences=4, shapes=shapes, length_multiple=multiple), stack=stack)
        for _ in range(2)
    )
    batches = [one.micro_batch(step) for step in range(one.batches_per_epoch)]
    assert all(map(same, batches[::-1], [two.micro_batch(step) for step in reversed(range(len(batches)))]))
    found = {(len(b.labels), *(mask.shape[1] for mask in b.masks.values())) for b in batches}
    assert found == {(bucket.rows, *bucket.lengths) for bucket in one.buckets}
    assert len(found) <= shapes
    assert not any(length % multiple for _, *lengths in found for length in lengths)
    rows = Counter(bytes(row[row != PAD].numpy().astype("<u4")) for batch in batches for row in batch.labels)
    assert not Counter(bytes(row[row != PAD].astype("<u4")) for row in one._rows.target) - rows
    held = sum(mask.numel() for batch in batches for mask in batch.masks.values())
    real = sum(int((one._rows[side] != PAD).sum()) for side in ((0, 1) if stack == "encoder-decoder" else (1,)))
    assert one.padding() == one.describe()["padding"] == pytest.approx(1 - real / held)
    eight = [batch.padded(8) for batch in batches]
    held = sum(mask.numel() for batch in eight for mask in batch.masks.values())
    assert one.padding(8) == pytest.approx(1 - real / held)


def test_each_sentence_gets_the_source_of_the_next_one(data: Dataset, stack: Stack) -> None:
    """In a batch with a row that only fills it up, as the last of the validation set."""
    batch = data.held_out
    batch = replace(batch, weight=batch.weight.clone())
    batch.weight[-1] = 0
    found, rows = batch.of_other_sources(), len(batch.weight)
    assert found.keys() == batch.inputs.keys()
    for name, tensor in batch.inputs.items():
        expected = [*range(1, rows - 1), 0, rows - 1] if name.startswith("source") else [*range(rows)]
        assert found[name].tolist() == [tensor[row].tolist() for row in expected]
    assert ("source" in found) == (stack == "encoder-decoder")


def test_global_generators_neither_matter_nor_move(stack: Stack) -> None:
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the legacy global generator is what must not matter
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        data = load_data(DataConfig(fraction=0.5), stack=stack)
        batches.append((data.held_out, data.micro_batch(7)))
        assert torch.equal(torch.get_rng_state(), before[0])
        np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert all(map(same, *batches))


def test_every_pair_stands_once_in_an_epoch(data: Dataset) -> None:
    orders = []
    for epoch in range(2):
        batches = [data.micro_batch(epoch * data.batches_per_epoch + place) for place in range(data.batches_per_epoch)]
        rows = [bytes(row[row != PAD].numpy().astype("<u4")) for batch in batches for row in batch.labels]
        seen, training = Counter(rows), Counter(bytes(r[r != PAD].astype("<u4")) for r in data._rows.target)
        repeated = sum(b.batches * b.rows - len(b.members) for b in data.buckets)
        assert not training - seen
        assert sum((seen - training).values()) == repeated < sum(b.rows for b in data.buckets)
        orders.append([frozenset(map(bytes, batch.labels.numpy())) for batch in batches])
    assert len(set(orders[0]) & set(orders[1])) < 0.1 * len(orders[0])  # other companions, not only another order


def test_the_training_text_is_what_the_files_hold_without_the_held_out_lines(write_pair: Writer) -> None:
    source, target = invented(300)
    data = load_data(text_config(write_pair(source, target)), stack="encoder-decoder")
    trained = {data.decode(row.tolist()) for p in range(data.batches_per_epoch) for row in data.micro_batch(p).labels}
    held_out = {data.decode(row.tolist()) for row in data.held_out.labels}
    validation = {data.decode(row.tolist()) for batch in data.validation() for row in batch.labels}
    assert (len(held_out), len(validation)) == (48, 30)
    assert trained | held_out | validation == set(target)
    assert not trained & (held_out | validation)
    assert not held_out & validation


def test_every_batch_is_full_and_has_the_shape_of_a_bucket(data: Dataset, stack: Stack) -> None:
    shapes = {(b.rows, *b.lengths) for b in data.buckets}
    inputs = ("source", "target") if stack == "encoder-decoder" else ("tokens",)
    seen = set()
    for place in range(data.batches_per_epoch):
        batch = data.micro_batch(place)
        seen.add((len(batch.labels), *(batch.inputs[name].shape[1] for name in inputs)))
        assert all(mask.any(dim=1).all() for mask in batch.masks.values())
    assert seen == shapes


def test_labels_weights_masks_and_inputs_fit_together(data: Dataset, stack: Stack) -> None:
    for batch in (data.held_out, *(data.micro_batch(step) for step in range(20))):
        assert batch.labels.dtype == torch.int64
        assert batch.weight.dtype == torch.float32
        assert batch.weight.shape == batch.labels.shape
        assert batch.weight.sum().item() == batch.tokens > 0
        assert set(batch.weight.unique().tolist()) <= {0.0, 1.0}
        names = {"encoder": "source", "decoder": "target"} if stack == "encoder-decoder" else {stack: "tokens"}
        assert batch.masks.keys() == names.keys()
        for where, name in names.items():
            mask = batch.masks[where]
            assert mask.dtype == torch.bool
            assert torch.equal(mask, batch.inputs[name] != PAD)
            assert torch.equal(
                mask, batch.inputs[name.replace("tokens", "mask") if name == "tokens" else f"{name}_mask"]
            )
            assert (mask[:, 1:] <= mask[:, :-1]).all()  # padding only at the end
        if stack == "encoder":
            continue
        for row, tokens, mask in zip(batch.labels, batch.inputs[names["decoder"]], batch.masks["decoder"], strict=True):
            length = int(mask.sum())
            assert row[length - 1] == EOS
            assert EOS not in row[: length - 1]
            assert not row[length:].any()
            assert tokens[0] == BOS
            assert torch.equal(tokens[1:length], row[: length - 1])
        assert batch.tokens == batch.masks["decoder"].sum()
    if stack == "encoder-decoder":
        source, mask = data.held_out.inputs["source"], data.held_out.masks["encoder"]
        assert (source.gather(1, mask.sum(1, keepdim=True) - 1) == EOS).all()


def test_masked_tokens_follow_the_80_10_10_rule() -> None:
    data = load_data(DataConfig(), stack="encoder")
    fates: Counter[str] = Counter()
    words = 0
    for place in range(data.batches_per_epoch):
        batch = data.micro_batch(place)
        tokens, labels, chosen = batch.inputs["tokens"], batch.labels, batch.weight > 0
        assert torch.equal(tokens[~chosen], labels[~chosen])
        assert chosen.any(dim=1).all()
        assert not ((labels[chosen] == EOS) | (labels[chosen] == PAD)).any()
        assert (tokens[chosen] >= MASK).all()  # a random word is never PAD, BOS, EOS or UNK
        fates["mask"] += int((tokens[chosen] == MASK).sum())
        fates["same"] += int((tokens == labels)[chosen].sum())
        fates["all"] += batch.tokens
        words += int(((labels != PAD) & (labels != EOS)).sum())
        expected = torch.maximum(torch.tensor(1), (0.15 * ((labels != PAD).sum(1) - 1)).round())
        assert torch.equal(chosen.sum(1), expected.long())
    assert fates["all"] / words == pytest.approx(0.15, abs=0.01)
    assert fates["mask"] / fates["all"] == pytest.approx(0.8, abs=0.01)
    assert fates["same"] / fates["all"] == pytest.approx(0.1, abs=0.01)


def test_the_shortest_sentences_are_masked_too() -> None:
    rows = np.array([[7, EOS, PAD, PAD], [7, 8, EOS, PAD], [7, 8, 9, EOS]])
    for seed in range(20):
        _, chosen = mask_tokens(rows, 300, np.random.default_rng(seed))
        assert (chosen.sum(axis=1) == 1).all()


def test_hashes_see_order_and_side_but_not_padding() -> None:
    source, target = np.array([[7, 8, EOS]]), np.array([[9, EOS]])
    one = Rows(source, target).hashes()
    assert Rows(np.pad(source, ((0, 0), (0, 4))), np.pad(target, ((0, 0), (0, 2)))).hashes() == one
    assert Rows(source[:, [1, 0, 2]], target).hashes() != one
    assert Rows(target, source).hashes() != one
    assert Rows(np.array([[7, EOS]]), np.array([[8, 9, EOS]])).hashes() != one


def test_a_sentence_is_masked_anew_each_epoch() -> None:
    data = load_data(DataConfig(fraction=0.004, sentences=64), stack="encoder")
    patterns: dict[bytes, set[bytes]] = {}
    for place in range(12 * data.batches_per_epoch):
        batch = data.micro_batch(place)
        for row, weight in zip(batch.labels, batch.weight, strict=True):
            patterns.setdefault(bytes(row.numpy()), set()).add(bytes(weight.numpy()))
    assert sum(len(seen) > 1 for seen in patterns.values()) > 0.9 * len(patterns)


def test_the_held_out_batch_is_the_same_for_all_and_no_training_pair(stack: Stack, parallel: tuple[Path, Path]) -> None:
    data = load_data(text_config(parallel), stack=stack)
    less = load_data(text_config(parallel, seed=9, fraction=0.3, sentences=4), stack=stack)
    assert same(data.held_out, less.held_out)
    assert len(data.held_out.labels) == 48
    training = {source.tobytes() + target.tobytes() for source, target in zip(*data._rows, strict=True)}
    widths = [side.shape[1] for side in data._rows]
    held_out = [
        b"".join(np.pad(row, (0, width - len(row))).tobytes() for row, width in zip(pair, widths, strict=True))
        for pair in zip(*data._held_rows, strict=True)
    ]
    assert len(held_out[0]) == len(next(iter(training)))
    assert not training & set(held_out)


def test_pairs_of_the_validation_text_never_train(write_pair: Writer) -> None:
    source, target = invented(200)
    paths = write_pair(source, target)
    valid = write_pair(source[10:30], target[10:30], name="valid")
    config = text_config(paths, valid=f"{valid[0]},{valid[1]}", held_out=20)
    data = load_data(config, stack="encoder-decoder")
    assert [data.decode(row.tolist()) for row in data.held_out.labels] == target[10:30]
    trained = {data.decode(row.tolist()) for p in range(data.batches_per_epoch) for row in data.micro_batch(p).labels}
    assert trained == set(target[:10] + target[30:])
    assert data.describe()["left_out"]["held_out"] == 20


def test_a_smaller_fraction_lies_inside_a_larger_one() -> None:
    kept = {}
    everything = load_data(DataConfig(), stack="encoder-decoder").describe()["train"]
    for fraction in (0.01, 0.1, 1.0):
        data = load_data(DataConfig(fraction=fraction), stack="encoder-decoder")
        kept[fraction] = Counter(data._rows.hashes().tolist())
        assert data.describe()["train"] == kept[fraction].total() == round(fraction * everything)
    assert kept[0.01] < kept[0.1] < kept[1.0]
    other = load_data(DataConfig(fraction=0.1, seed=1), stack="encoder-decoder")
    assert Counter(other._rows.hashes().tolist()) != kept[0.1]


def test_to_moves_every_tensor() -> None:
    batch = load_data(DataConfig(), stack="encoder-decoder").held_out
    moved = batch.to("meta")
    assert moved.tokens == batch.tokens
    for tensor in (*moved.inputs.values(), moved.labels, moved.weight, *moved.masks.values()):
        assert tensor.device.type == "meta"


def test_the_unigram_baseline_against_a_count_by_hand(data: Dataset, stack: Stack) -> None:
    counts: Counter[int] = Counter()
    for row in data._rows.target.tolist():
        counts.update(token for token in row if token != PAD and not (stack == "encoder" and token == EOS))
    labels = data.held_out.labels[data.held_out.weight.bool()].tolist()
    total = counts.total() + data.target_vocab
    cost = [-np.log((counts[label] + 1) / total) for label in labels]
    frequent = max(counts, key=lambda token: counts[token])
    assert data.unigram.cross_entropy == pytest.approx(np.mean(cost), rel=1e-12)
    assert data.unigram.accuracy == pytest.approx(labels.count(frequent) / len(labels), rel=1e-12)


def test_the_validation_set_is_the_whole_validation_text(write_pair: Writer, stack: Stack) -> None:
    source, target = invented(400)
    train, valid = write_pair(source[:300], target[:300]), write_pair(source[290:], target[290:], name="valid")
    config = text_config(train, valid=f"{valid[0]},{valid[1]}", max_length=11)
    data = load_data(config, stack=stack)
    batches = [*data.validation()]
    validation = [data.decode(row.tolist()) for batch in batches for row in batch.labels]
    facts = data.describe()
    assert len(validation) == facts["validation"] == data.validation_sentences
    assert facts["validation"] + sum(facts["validation_left_out"].values()) == 110
    assert facts["validation_left_out"]["too_long"] > 0
    trained = {data.decode(row.tolist()) for p in range(data.batches_per_epoch) for row in data.micro_batch(p).labels}
    assert not trained & {*validation}
    held_out = {data.decode(row.tolist()) for row in data.held_out.labels}
    assert held_out <= {*validation}  # the batch of the course is a part of it
    assert data.validation_unigram is not None
    assert data.validation_unigram != data.unigram
    again = [*load_data(config.model_copy(update={"seed": 7}), stack=stack).validation()]
    assert all(map(same, batches, again))  # whatever the seed
    assert not [*load_data(config.model_copy(update={"validation": 0}), stack=stack).validation()]


@pytest.mark.parametrize("asked", rest_slow([40, 400], [40]))
def test_the_synthetic_task_makes_fresh_pairs_to_validate(asked: int) -> None:
    data, without = (load_data(DataConfig(validation=count), stack="encoder-decoder") for count in (asked, 0))
    assert data.validation_sentences == asked
    assert data.describe()["train_sha256"] == without.describe()["train_sha256"]  # training is what it was
    trained = {data.decode(row.tolist()) for p in range(data.batches_per_epoch) for row in data.micro_batch(p).labels}
    validation = [data.decode(row.tolist()) for batch in data.validation() for row in batch.labels]
    assert len(validation) == asked
    assert sum(line in trained for line in validation) < 0.5 * asked  # a translation may stand with another source
