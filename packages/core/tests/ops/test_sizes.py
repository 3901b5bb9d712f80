"""Sizes of tiles and grids."""

import math

import pytest
from mezzo_core.ops.sizes import ceil_div, next_power_of_2


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 63, 64, 65, 2**40 + 1])
def test_sizes_are_rounded_up(n):
    assert next_power_of_2(n) == 2 ** math.ceil(math.log2(max(n, 1)))
    for b in (1, 2, 3, 64):
        assert ceil_div(n, b) * b - n in range(b)
