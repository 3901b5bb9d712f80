"""What is counted: loads, arithmetic and launches of the schedule; caches, widths of recipes."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.positions import alibi_slopes
from mezzo_core.reproduction.beside import growth, in_pairs
from mezzo_core.reproduction.measurement import How, Measurement, entries
from mezzo_core.reproduction.published import Claim
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.optim import build_optimizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.recipes import RECIPES
from mezzo_recurrent_transformer.schedule import Softmax, Tile, fold, tiled_forward, tiles

NAIVE, TILED = "naive", "tiled"
LENGTHS = (2**8, 2**14)
HEAD_DIM = 8
SCALED = {f"{what}, {size}": 0.05 for what in ("width", "KV cache") for size in ("150m", "300m")}
"""Widths are multiples of a head's: they scale by 1.375 and 1.455 in the place of sqrt(2)."""
SCALED["scale"] = 0.05


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
    rows = {}
    for queries, keys in ((1, 64), (4, 4), (64, 4), (16, 64), (64, 64)):
        flops, numbers = _tile_costs(queries, keys)
        printed = 2 * queries * keys / (queries + 2 * keys)
        rows[f"{queries} queries, {keys} keys"] = (printed, flops / 2 / numbers)
    return in_pairs(rows, "multiplications of a tile for each number of q, k, v")


def tile_example(claim: Claim) -> Measurement:
    """Count the multiplications for each number of k and v, with one query and with four.

    The example leaves the load of the queries out; its footnote counts it.
    """
    rows = {}
    for queries, printed in zip((1, 4), claim.values, strict=True):
        flops, numbers = _tile_costs(queries, 4)
        rows[f"{queries} of 4"] = (printed, flops / 2 / (numbers - queries * HEAD_DIM))
    return in_pairs(rows, "one tile")


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


def kv_cache_30(claim: Claim) -> Measurement:
    """Compute the cache of a sequence of T tokens with 6 layers and with 12, at 300M weights."""
    rows = {f"{n} layers": [_cache(f"300m_{n}_recurrent") / 1e6] for n in (12, 6)}
    setting = "keys and values of 512 tokens in float32, recipes 300m_12_recurrent and 300m_6_..."
    return Measurement(entries(rows, ("MB",)), ("MB",), setting, How.PAPER, unit="MB")


def kv_cache_sqrt(claim: Claim) -> Measurement:
    """Compare width and cache with 12 layers and with 6 with the square root of 2."""
    rows = {}
    for size in ("150m", "300m"):
        deep, wide = (f"{size}_{layers}_recurrent" for layers in (12, 6))
        rows[f"width, {size}"] = (math.sqrt(2), _width(wide) / _width(deep))
        rows[f"KV cache, {size}"] = (math.sqrt(2), _cache(deep) / _cache(wide))
    return in_pairs(rows, "half the layers, alpha = 2, at 150M and at 300M weights")


def width_scaling(claim: Claim) -> Measurement:
    """Compare the widths of the 300M recipes."""
    twelve, six = (_width(f"300m_{layers}_recurrent") for layers in (12, 6))
    rows = {
        "width at 12 layers": (claim.values[0], twelve),
        "width at 6 layers": (claim.values[1], six),
        "scale": (math.sqrt(2), six / twelve),
    }
    return in_pairs(rows, "recipes 300m_12_recurrent, 300m_6_recurrent")


def epsilon(config: TrainConfig) -> float:
    """Return the epsilon of a recipe's optimizer."""
    return float(build_optimizer(nn.Linear(1, 1), config.optim).defaults["eps"])


def largest_bias(config: TrainConfig) -> float:
    """Return the maximum ALiBi bias of a recipe: the exponent of the smallest slope."""
    stack = on_meta(config.model).stack
    layer = stack.blocks[0].config
    return -math.log2(float(alibi_slopes(stack.d_model // layer.head_dim, layer.alibi)[-1]))


def _width(recipe: str) -> int:
    return RECIPES[recipe]().model.d_model


def _cache(recipe: str) -> int:
    config = RECIPES[recipe]()
    return int(on_meta(config.model).state_bytes(config.seq_len))
