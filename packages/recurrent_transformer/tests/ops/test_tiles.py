"""How tokens are cut into tiles and leaves: each pair comes once, and no token is wasted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import (
    LARGEST,
    LONGEST,
    Tiling,
    batches_of,
    given_by,
    leaf_size,
)


@pytest.mark.parametrize(("S", "leaf"), [(16, 16), (64, 16), (60, 15), (3, 3)])
def test_leaves_and_steps_see_each_earlier_token_of_the_tile_once(S, leaf):
    pairs = []
    for step in range(S):
        if step and step % leaf == 0:
            size = given_by(step, leaf)
            assert step + size <= S
            pairs += [(q, k) for q in range(step, step + size) for k in range(step - size, step)]
        pairs += [(step, k) for k in range(step // leaf * leaf, step)]
    assert sorted(pairs) == [(q, k) for q in range(S) for k in range(q)]


@given(
    n=st.integers(1, 24),
    B=st.integers(0, 3000),
    T=st.integers(1, 3000),
    block=st.integers(1, 80),
    backward=st.booleans(),
)
def test_longer_tiles_cost_no_padding_and_few_steps(n, B, T, block, backward):
    tiling, b = Tiling.of(n, B, T, block, backward=backward), min(block, T)
    leaf = min(leaf_size(b), -(-T // b) * b)
    tokens = tiling.S
    assert tokens % leaf == 0
    assert tokens == leaf or (tokens <= LONGEST and tokens * B <= LARGEST)
    assert tiling.padded == -(-T // leaf) * leaf
    steps = len(list(tiling)) * tokens
    shortest = tiling.padded + leaf * (n - 1)
    assert steps <= shortest + (T if backward or B >= 256 else T / 8)


@pytest.mark.parametrize(
    ("n", "B", "T", "S"),
    [
        (1, 1, 512, 64), (1, 1, 80, 16), (1, 1, 96, 32), (1, 1, 1000, 16), (1, 1, 20, 32),
        (1, 512, 512, 32), (1, 1024, 512, 16),
        (12, 32, 512, 16), (12, 512, 512, 32), (12, 32, 4096, 32), (6, 32, 4096, 64),
    ],
)  # fmt: skip
def test_tiles_are_long_where_rows_or_tokens_are_many(n, B, T, S):
    assert Tiling.of(n, B, T, 1).S == S


def test_batches_hold_each_packed_token_once_and_padding_for_half_at_most():
    borders = torch.tensor([0, 1, 1, 3, 6, 10, 15, 23, 32, 49, 82, 82])
    batches = batches_of(borders)
    for batch in batches:
        assert ((batch < 82).sum(1) * 2 >= batch.shape[1]).all()
    assert sum(batch.shape[1] for batch in batches) < 3 * 33
    tokens = torch.cat([batch[batch < 82] for batch in batches])
    assert tokens.sort().values.tolist() == [*range(82)]
