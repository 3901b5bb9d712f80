"""What is counted of the schedule and of a step: loads, arithmetic, launches."""

import math
from collections.abc import Callable
from typing import Any

import torch
from mezzo_core.papers.beside import beside
from mezzo_core.papers.growth import growing
from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim, Value
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.schedule import Softmax, Tile, fold, tiled_forward, tiles

NAIVE, TILED = "naive", "tiled"
LENGTHS = tuple(2**i for i in range(8, 15))
HEAD_DIM = 8


def loads(num_tokens: int) -> dict[str, tuple[int, int]]:
    """Count the vectors that a head's attention loads, and the pairs of query and key it computes.

    A pair of key and value is two vectors, a query one. Temporary pairs are left out: both ways of
    evaluation load each once.
    """
    found = {NAIVE: (0, 0), TILED: (0, 0)}
    for t in range(1, num_tokens):  # one query meets all persistent pairs
        found[NAIVE] = _add(found[NAIVE], Tile(range(t), range(t, t + 1)))
    for tile in tiles(num_tokens):
        found[TILED] = _add(found[TILED], tile)
    return found


def _add(sums: tuple[int, int], tile: Tile) -> tuple[int, int]:
    keys, queries = len(tile.keys), len(tile.queries)
    return sums[0] + 2 * keys + queries, sums[1] + keys * queries


def hbm_traffic(claim: Claim) -> Measurement:
    """Count the vectors of a head that each evaluation loads."""
    found = {T: loads(T) for T in LENGTHS}
    return growing(
        {
            "naive over T^2": (lambda T: found[T][NAIVE][0], lambda T: T**2),
            "tiled over T log T": (lambda T: found[T][TILED][0], _t_log_t),
        },
        "vectors of queries, keys and values that a head loads",
        LENGTHS,
    )


def attention_flops(claim: Claim) -> Measurement:
    """Count the pairs of query and key; each is the same arithmetic."""
    found = {T: loads(T) for T in LENGTHS}
    return growing(
        {
            "naive over T^2": (lambda T: found[T][NAIVE][1], lambda T: T**2),
            "tiled over T^2": (lambda T: found[T][TILED][1], lambda T: T**2),
        },
        "pairs of query and key of a head",
        LENGTHS,
    )


def arithmetic_intensity(claim: Claim) -> Measurement:
    """Divide the pairs of query and key by the vectors that are loaded for them."""
    found = {T: loads(T) for T in LENGTHS}

    def intensity(name: str) -> Callable[[int], float]:
        return lambda T: found[T][name][1] / found[T][name][0]

    return growing(
        {
            "naive": (intensity(NAIVE), lambda T: 1),
            "tiled over T / log T": (intensity(TILED), lambda T: T / math.log2(T)),
        },
        "pairs of query and key for each vector that a head loads",
        LENGTHS,
    )


def cache_locality(claim: Claim) -> Measurement:
    """Count the positions of the cache that a step of the schedule reads, on average."""

    def positions(T: int) -> float:
        return sum(len(tile.keys) for tile in tiles(T)) / T

    return growing(
        {"positions over log T": (positions, math.log2)}, "positions read by a step", LENGTHS
    )


def tile_intensity(claim: Claim) -> Measurement:
    """Divide the arithmetic of tiles, which torch counts, by the numbers in q, k and v.

    What is left after a division by the paper's formula must be the same for every tile. A product
    with a single key is no matrix product to torch, which does not count it.
    """
    found = dict[str, float]()
    for queries, keys in ((1, 64), (4, 4), (64, 4), (16, 64), (64, 64)):
        flops, numbers = _tile_costs(queries, keys)
        formula = 2 * queries * keys / (queries + 2 * keys)
        found[f"{queries} queries, {keys} keys"] = flops / numbers / formula
    return Measurement(
        entries({"intensity over the formula": list(found.values())}, tuple(found)),
        tuple(found),
        f"a tile of one head, D = {HEAD_DIM}: FLOPs that torch counts for each number of q, k, v",
        How.PAPER,
    )


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


def tile_size(claim: Claim) -> Measurement:
    """Compare every tile with the paper's formula, and count how often each pair is folded."""
    printed, ours = dict[str, Value](), dict[str, Value]()
    for T in (100, 256):
        sides, folded = 0, list[tuple[int, int]]()
        for t, tile in enumerate(tiles(T), 1):
            side = 1
            while t % (2 * side) == 0:
                side *= 2
            # The paper counts positions from 1: keys t-P+1..t, queries t+1..min(t+P, N).
            keys, queries = range(t - side + 1, t + 1), range(t + 1, min(t + side, T) + 1)
            right = [[i + 1 for i in part] for part in (tile.keys, tile.queries)]
            sides += right == [list(keys), list(queries)]
            folded += [(i, j) for i in tile.queries for j in tile.keys]
        printed |= {f"tiles as printed, T = {T}": T - 1, f"pairs, T = {T}": T * (T - 1) // 2}
        ours[f"tiles as printed, T = {T}"] = sides
        ours[f"pairs, T = {T}"] = len(set(folded)) if len(set(folded)) == len(folded) else 0
    return beside(printed, ours, "tiles of the schedule; pairs folded exactly once")


class Launches(TorchDispatchMode):
    """Counts the calls of torch's operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

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

    lengths = (64, 128, 256, 512)
    return growing(
        {"launches over T": (launches, float)}, "operators launched by one layer", lengths
    )


def mlp_batch(claim: Claim) -> Measurement:
    """Divide the arithmetic of one token's MLP, of a batch, by the numbers that it moves."""
    C = 1024

    def intensity(B: int) -> float:
        products = ((C, 4 * C), (4 * C, C))
        moved = sum(B * inputs + inputs * outputs + B * outputs for inputs, outputs in products)
        return sum(2 * B * inputs * outputs for inputs, outputs in products) / moved

    batches = tuple(2**i for i in range(1, 8))
    setting = f"FLOPs of the MLP for each number that it moves, C = {C}, by batch"
    return growing({"intensity over B": (intensity, float)}, setting, batches)


def _t_log_t(num_tokens: int) -> float:
    return num_tokens * math.log2(num_tokens)
