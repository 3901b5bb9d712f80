"""What is counted of the schedule and of a step: loads, arithmetic, launches."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from mezzo_core.reproduction.beside import beside, growth
from mezzo_core.reproduction.measurement import Measurement
from mezzo_core.reproduction.published import Claim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.schedule import Softmax, Tile, fold, tiled_forward, tiles

NAIVE, TILED = "naive", "tiled"
LENGTHS = (2**8, 2**14)
HEAD_DIM = 8


@cache
def loads(num_tokens: int) -> dict[str, tuple[int, int]]:
    """Count the vectors that a head's attention loads, and the pairs of query and key it computes.

    A pair of key and value is two vectors, a query one. Temporary pairs are left out: both ways of
    evaluation load each once.
    """

    def count(found: Iterable[Tile]) -> tuple[int, int]:
        sizes = [(len(tile.keys), len(tile.queries)) for tile in found]
        return sum(2 * k + q for k, q in sizes), sum(k * q for k, q in sizes)

    # One query meets all persistent pairs.
    naive = (Tile(range(t), range(t, t + 1)) for t in range(1, num_tokens))
    return {NAIVE: count(naive), TILED: count(tiles(num_tokens))}


def hbm_traffic(claim: Claim) -> Measurement:
    """Count the vectors of a head that each evaluation loads."""
    rows = {
        "naive as T^2": (lambda T: loads(T)[NAIVE][0], lambda T: T**2),
        "tiled as T log T": (lambda T: loads(T)[TILED][0], lambda T: T * math.log2(T)),
    }
    return growth(rows, LENGTHS, "vectors of queries, keys and values that a head loads")


def attention_flops(claim: Claim) -> Measurement:
    """Count the pairs of query and key; each is the same arithmetic."""
    rows = {
        "naive as T^2": (lambda T: loads(T)[NAIVE][1], lambda T: T**2),
        "tiled as T^2": (lambda T: loads(T)[TILED][1], lambda T: T**2),
    }
    return growth(rows, LENGTHS, "pairs of query and key of a head")


def arithmetic_intensity(claim: Claim) -> Measurement:
    """Divide the pairs of query and key by the vectors that are loaded for them."""

    def intensity(name: str, T: int) -> float:
        vectors, pairs = loads(T)[name]
        return pairs / vectors

    rows = {
        "naive as 1": (lambda T: intensity(NAIVE, T), lambda T: 1),
        "tiled as T / log T": (lambda T: intensity(TILED, T), lambda T: T / math.log2(T)),
    }
    return growth(rows, LENGTHS, "pairs of query and key for each vector that a head loads")


def cache_locality(claim: Claim) -> Measurement:
    """Count the positions of the cache that a step of the schedule reads, on average."""

    def positions(T: int) -> float:
        return sum(len(tile.keys) for tile in tiles(T)) / T

    return growth({"as log T": (positions, math.log2)}, LENGTHS, "positions read by a step")


def tile_intensity(claim: Claim) -> Measurement:
    """Compare the arithmetic of tiles for each number in q, k and v with the paper's formula.

    torch counts the arithmetic, but no product with a single key, which is no matrix product to it.
    """
    ours, printed = dict[str, float](), dict[str, float]()
    for queries, keys in ((1, 64), (4, 4), (64, 4), (16, 64), (64, 64)):
        flops, numbers = _tile_costs(queries, keys)
        name = f"{queries} queries, {keys} keys"
        ours[name] = flops / 2 / numbers
        printed[name] = 2 * queries * keys / (queries + 2 * keys)
    return beside(printed, ours, "multiplications of a tile for each number of q, k, v")


def tile_example(claim: Claim) -> Measurement:
    """Count the multiplications for each number of k and v, with one query and with four.

    The example leaves the load of the queries out; its footnote counts it.
    """
    ours = {}
    for queries in (1, 4):
        flops, numbers = _tile_costs(queries, 4)
        ours[f"{queries} of 4"] = flops / 2 / (numbers - queries * HEAD_DIM)
    return beside(dict(zip(ours, map(float, claim.values), strict=True)), ours, "one tile")


def _tile_costs(queries: int, keys: int) -> tuple[int, int]:
    """Return the FLOPs that torch counts for a tile, and the numbers in its q, k and v."""
    tile = Tile(range(keys), range(keys, keys + queries))
    q, k, v = (torch.randn(keys + queries, 1, 1, HEAD_DIM) for _ in range(3))
    sums = Softmax(torch.zeros(q.shape[:3]), torch.ones(q.shape[:3]), torch.zeros_like(v))
    with FlopCounterMode(display=False) as counter:
        fold(sums, tile, q, k, v, torch.zeros(1))
    return counter.get_total_flops(), HEAD_DIM * (queries + 2 * keys)


class Launches(TorchDispatchMode):
    """Counts the calls of torch's operators that compute something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def kernel_launches(claim: Claim) -> Measurement:
    """Count the operators that Algorithm 1 in PyTorch launches for one layer."""
    block = RecurrentBlockConfig(head_dim=8).build(16)

    def launches(T: int) -> float:
        with Launches() as counter:
            tiled_forward(block, torch.randn(1, T, 16))
        return counter.count

    return growth({"launches as T": (launches, float)}, (32, 256), "operators of one layer")


def mlp_batch(claim: Claim) -> Measurement:
    """Divide the arithmetic of one token's MLP, of a batch, by the numbers that it moves."""
    C = 1024

    def intensity(B: int) -> float:
        products = ((C, 4 * C), (4 * C, C))
        moved = sum(B * inputs + inputs * outputs + B * outputs for inputs, outputs in products)
        return sum(2 * B * inputs * outputs for inputs, outputs in products) / moved

    setting = f"FLOPs of the MLP for each number that it moves, C = {C}, batches"
    return growth({"intensity as B": (intensity, float)}, (2, 128), setting)
