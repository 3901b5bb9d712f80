"""Counts of our schedule's loads, arithmetic and launches grow as the paper says.

Over the lengths given, the growth may differ from the paper's by a quarter.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache

import pytest
import torch
from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.schedule import Softmax, Tile, fold, tiled_forward, tiles
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

HEAD_DIM = 8


def assert_grows(count: Callable, claimed: Callable, first: int = 2**8, last: int = 2**14) -> None:
    """Assert that a count grows as the paper says between two lengths."""
    assert count(last) / count(first) == pytest.approx(claimed(last) / claimed(first), rel=0.25)


def loads(found: Iterable[Tile]) -> tuple[int, int]:
    """Count the vectors that a head loads, and the pairs of query and key that it computes.

    A pair of key and value is two vectors, a query one. Temporary pairs are left out: tiled and
    naive evaluation both load each once.
    """
    sizes = [(len(tile.keys), len(tile.queries)) for tile in found]
    return sum(2 * k + q for k, q in sizes), sum(k * q for k, q in sizes)


@cache
def tiled(T: int) -> tuple[int, int]:
    return loads(tiles(T))


@cache
def naive(T: int) -> tuple[int, int]:
    """One query meets all persistent pairs."""
    return loads(Tile(range(t), range(t, t + 1)) for t in range(1, T))


def test_hbm_traffic():
    assert_grows(lambda T: naive(T)[0], lambda T: T**2)
    assert_grows(lambda T: tiled(T)[0], lambda T: T * math.log2(T))


def test_attention_flops():
    for way in (naive, tiled):
        assert_grows(lambda T, way=way: way(T)[1], lambda T: T**2)


def test_arithmetic_intensity():
    assert_grows(lambda T: naive(T)[1] / naive(T)[0], lambda T: 1)
    assert_grows(lambda T: tiled(T)[1] / tiled(T)[0], lambda T: T / math.log2(T))


def test_cache_locality():
    assert_grows(lambda T: sum(len(tile.keys) for tile in tiles(T)) / T, math.log2)


def tile_costs(queries: int, keys: int) -> tuple[int, int]:
    """Return the multiplications of a tile by torch's counter, and the numbers in its q, k and v.

    torch counts no product with a single key, which is no matrix product to it.
    """
    tile = Tile(range(keys), range(keys, keys + queries))
    q, k, v = (torch.randn(keys + queries, 1, 1, HEAD_DIM) for _ in range(3))
    sums = Softmax(torch.zeros(q.shape[:3]), torch.ones(q.shape[:3]), torch.zeros_like(v))
    with FlopCounterMode(display=False) as counter:
        fold(sums, tile, q, k, v, torch.zeros(1))
    return counter.get_total_flops() // 2, HEAD_DIM * (queries + 2 * keys)


@pytest.mark.parametrize(("queries", "keys"), [(1, 64), (4, 4), (64, 4), (16, 64), (64, 64)])
def test_tile_intensity(queries, keys):
    multiplications, numbers = tile_costs(queries, keys)
    assert multiplications / numbers == 2 * queries * keys / (queries + 2 * keys)


@pytest.mark.parametrize("queries", [1, 4])
def test_tile_example(queries):
    """The paper's example has four keys and does not count the load of the queries."""
    multiplications, numbers = tile_costs(queries, 4)
    assert multiplications / (numbers - queries * HEAD_DIM) == queries


class Launches(TorchDispatchMode):
    """Counts the calls of torch's operators that compute something."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_kernel_launches():
    block = RecurrentBlockConfig(head_dim=8).build(16)

    def launches(T: int) -> int:
        with Launches() as counter:
            tiled_forward(block, torch.randn(1, T, 16))
        return counter.count

    assert_grows(launches, lambda T: T, 32, 256)


def test_mlp_batch():
    """One token's MLP: its arithmetic per number moved grows as the batch."""
    C = 1024
    products = ((C, 4 * C), (4 * C, C))

    def intensity(B: int) -> float:
        moved = sum(B * inputs + inputs * outputs + B * outputs for inputs, outputs in products)
        return sum(2 * B * inputs * outputs for inputs, outputs in products) / moved

    assert_grows(intensity, lambda B: B, 2, 128)
