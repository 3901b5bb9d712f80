"""Rows of a task in memory: epochs, the test, what identifies them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mezzo_core.data import Batch, Rows, RowsData


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


def test_the_places_of_targets_are_told():
    batch = source().train_batch(0, 8)
    assert batch.places.tolist() == [4 * row + 3 for row in range(8)]
    for part in (batch.part(0, 2), batch.part(1, 2)):
        assert part.places.tolist() == [4 * row + 3 for row in range(4)]
    assert next(source().validation_batches(4)).places is None


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_batches_have_the_places_of_all_targets_and_few_shapes(are_targets):
    targets = torch.tensor(are_targets).long()[None] - 1
    targets = targets.where(targets == 0, -100)
    places = Batch(targets, targets).with_places().places
    if places is None:
        assert 8 * sum(are_targets) > 6 * len(are_targets) or len(are_targets) < 8
        return
    assert len(places) > 0
    assert len(set(places.tolist())) == len(places) <= sum(are_targets) + -(-len(are_targets) // 8)
    assert set(np.flatnonzero(are_targets)) <= set(places.tolist())
    assert len(places) % -(-len(are_targets) // 8) == 0


def test_parts_of_a_batch_have_their_own_places_and_as_many_of_them():
    targets = torch.full((1, 64), -100)
    targets[0, 40:44], targets[0, 3] = 1, 1
    borders = torch.tensor([0, 32, 64, 64], dtype=torch.int32)
    for batch in (Batch(targets, targets, borders), Batch(*[targets.view(4, 16)] * 2)):
        parts = [batch.with_places().part(i, 2) for i in range(2)]
        assert len({part.places.shape for part in parts}) == 1
        for part in parts:
            wanted = (part.targets.flatten() != -100).nonzero()[:, 0].tolist()
            assert set(wanted) <= set(part.places.tolist()) <= set(range(32))


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
