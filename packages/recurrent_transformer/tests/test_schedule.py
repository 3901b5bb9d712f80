"""The schedule of Algorithm 1 is the paper's."""

import pytest
from mezzo_recurrent_transformer.schedule import tiles


@pytest.mark.parametrize("T", [1, 2, 100, 256])
def test_tile_size(T):
    """Tiles are as printed, and fold each pair once."""
    found = list(tiles(T))
    for t, tile in enumerate(found, 1):
        side = next(2**i for i in range(t.bit_length())[::-1] if t % 2**i == 0)
        # The paper counts positions from 1: keys t-P+1..t, queries t+1..min(t+P, N).
        assert [i + 1 for i in tile.keys] == list(range(t - side + 1, t + 1))
        assert [i + 1 for i in tile.queries] == list(range(t + 1, min(t + side, T) + 1))
    folded = [(i, j) for tile in found for i in tile.queries for j in tile.keys]
    assert sorted(folded) == [(i, j) for i in range(T) for j in range(i)]
