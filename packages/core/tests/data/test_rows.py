"""Rows of a task in memory: epochs, the test, what identifies them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mezzo_core.data import Batch, Rows, RowsData
from mezzo_core.data.batches import with_places


def rows(first, count):
    """Rows of four tokens, no two of them alike, with a target at the last token."""
    inputs = 4 * np.arange(first, first + count)[:, None] + np.arange(4)
    targets = np.full_like(inputs, -100)
    targets[:, -1] = inputs[:, 0]
    return Rows(inputs, targets)


def source(seed=0, train=20, test=5):
    return RowsData("task", rows(0, train), rows(100, test), vocab_size=500, seed=seed)


def rows_of(batch):
    return {tuple(row) for row in batch.tokens.tolist()}


def test_rows_may_be_parts_of_wider_arrays():
    """As next tokens are: inputs without the last, and targets without the first."""
    wide = rows(0, 20).inputs
    parts = Rows(wide[:, :-1], wide[:, 1:])
    whole = Rows(*(part.copy() for part in parts))
    found, wanted = (
        RowsData("task", each, each, vocab_size=500, seed=0) for each in (parts, whole)
    )
    assert found.fingerprint == wanted.fingerprint
    for part, expected in zip(
        found.train_batch(0, 8)[:2], wanted.train_batch(0, 8)[:2], strict=True
    ):
        assert part.equal(expected)


def test_an_epoch_takes_no_row_twice_and_another_has_another_order():
    first, second = ([source().train_batch(2 * epoch + i, 8) for i in (0, 1)] for epoch in (0, 1))
    for batches in (first, second):
        assert [batch.tokens.shape for batch in batches] == [(8, 4)] * 2
        assert len(rows_of(batches[0]) | rows_of(batches[1])) == 16
        assert all((batch.targets[:, -1] == batch.tokens[:, 0]).all() for batch in batches)
    assert rows_of(first[0]) != rows_of(second[0])
    again = source().train_batch(3, 8)  # without the steps before it
    assert all(map(np.array_equal, again[:2], second[1][:2]))
    assert rows_of(source(seed=5).train_batch(3, 8)) != rows_of(again)


def test_each_test_row_is_read_once_and_filler_has_no_targets():
    batches = list(source().validation_batches(4))
    assert [batch.tokens.shape for batch in batches] == [(4, 4)] * 2
    found = [np.concatenate(parts) for parts in zip(*(each[:2] for each in batches), strict=True)]
    for part, expected, filler in zip(found, rows(100, 5), (0, -100), strict=True):
        assert np.array_equal(part[:5], expected)
        assert (part[5:] == filler).all()


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_batches_have_the_places_of_all_targets_and_few_shapes(are_targets):
    targets = torch.tensor(are_targets).long()[None] - 1
    targets = targets.where(targets == 0, -100)
    fewer = targets.clone()
    fewer[:, 3:] = -100
    parts = with_places([Batch(each, each) for each in (fewer, targets, fewer)])
    size, most = len(are_targets), sum(are_targets)
    eighth = -(-size // 8)
    if parts[0].places is None:
        assert parts[1].places is parts[2].places is None
        assert max(most, 1) > size - eighth
        return
    for part in parts:
        places = part.places.tolist()
        assert len(places) == len(set(places)) == len(parts[0].places) <= most + eighth
        assert len(places) % eighth == 0
        assert set(np.flatnonzero(part.targets[0] != -100)) <= set(places) <= set(range(size))


def test_the_fingerprint_tells_what_is_learned_from():
    assert source().fingerprint == source(seed=5).fingerprint == source(test=7).fingerprint
    changed = rows(0, 20)
    changed.targets[3, 1] = 2
    other = RowsData("task", changed, rows(100, 5), vocab_size=500, seed=0)
    assert len({each.fingerprint for each in (source(), source(train=21), other)}) == 3


def test_a_batch_that_cannot_be_is_named():
    with pytest.raises(ValueError, match="batch_size must be at most the 20 rows, got 21"):
        source().train_batch(0, 21)
    with pytest.raises(ValueError, match="step must be 0 or more"):
        source().train_batch(-1, 4)
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        source().validation_batches(0)
