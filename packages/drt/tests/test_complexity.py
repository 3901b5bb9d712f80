"""What the paper says that attention costs, in time and in memory, counted in our stack.

A count grows as the paper says if it does so within a quarter, over the lengths given.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from mezzo_core.nn import AttentionConfig, BlocksConfig, MixerBlockConfig
from mezzo_core.nn.on_meta import on_meta
from mezzo_drt import DRTConfig, layer, queries
from mezzo_drt.baselines.landmark import LandmarkConfig, attention
from mezzo_drt.places import whole_places
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

PAPER = DRTConfig()
TRAINED_AT, LONGEST = 2**14, 2**24


def growth(count: Callable, first: int = TRAINED_AT, last: int = LONGEST) -> float:
    """Return how many times a count is as large at the last length as at the first."""
    return count(last) / count(first)


def linear(times: float = LONGEST / TRAINED_AT):
    return pytest.approx(times, rel=0.25)


def square(first: int = TRAINED_AT, last: int = LONGEST):
    return pytest.approx((last / first) ** 2, rel=0.25)


@cache
def pairs(config: DRTConfig, num_tokens: int) -> tuple[float, float, float]:
    """Count what attention computes in a forward of one sequence.

    Returns:
        The pairs of landmarks, the pairs of queries and keys that a head reads in chunks, and those
        in the windows.
    """
    c, L = config, config.chunk_size
    places = whole_places(num_tokens, L, torch.device("cpu"))
    readable = (places.hi - places.lo)[0, : num_tokens // L].clamp(min=0)
    # The chunk after n reads what n retrieved; the chunks after the last one do not exist.
    reads = readable.clamp(max=c.num_retrieved)[: places.num_chunks - 1].sum()
    P, W = places.num_places, min(c.window_size, places.num_places)
    scores = float(c.num_groups * readable.sum())
    reading = float(c.num_layers // 2 * reads * L * (L + 1))
    return scores, reading, float(c.num_layers * (W * (W + 1) // 2 + (P - W) * W))


def test_pairs_are_those_of_a_forward(monkeypatch):
    config = DRTConfig(
        num_layers=4, num_groups=2, chunk_size=4, num_retrieved=3, window_size=9, head_dim=8,
        hidden=8,
    )  # fmt: skip
    scores, reading = [], []
    right_retrieve, right_op = queries.retrieve, layer.grouped_cross_attention

    def retrieve(asked, keys, lo, hi, *others, **options):
        # The last chunk's landmark retrieves for a chunk that does not exist.
        scores.append(int((hi - lo).clamp(min=0).sum()))
        return right_retrieve(asked, keys, lo, hi, *others, **options)

    def op(q, k, v, indices, *others, **options):
        reading.append(int((indices >= 0).sum()) * q.shape[2] * k.shape[2])
        return right_op(q, k, v, indices, *others, **options)

    monkeypatch.setattr(queries, "retrieve", retrieve)
    monkeypatch.setattr(layer, "grouped_cross_attention", op)
    with torch.no_grad():
        config.build(16)(torch.randn(1, 32, 16))
    places = 40
    window = 4 * sum(min(p + 1, 9) for p in range(places))
    assert (sum(scores), sum(reading), window) == pairs(config, 32)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_complexity_full(num_layers):
    """By torch's counter, without the projections, as the square of the length."""
    blocks = (MixerBlockConfig(AttentionConfig(head_dim=8)),) * num_layers
    layers = on_meta(BlocksConfig(blocks), 16)  # shapes are enough for the counter
    weights = sum(w.numel() for w in layers.parameters() if w.ndim == 2)

    def flops(T: int) -> float:
        # torch's counter has no formula for the fused attention of a CPU.
        math = sdpa_kernel(SDPBackend.MATH)
        with torch.no_grad(), math, FlopCounterMode(display=False) as counter:
            layers(torch.empty(1, T, 16, device="meta"))
        return counter.get_total_flops() - 2 * T * weights

    assert growth(flops, 256, 1024) == square(256, 1024)


@pytest.mark.parametrize(("G", "S"), [*product((1, 2, 3), (32, 64))])
def test_complexity_scores(G, S):
    def scores(T: int) -> float:
        return pairs(DRTConfig(num_groups=G, chunk_size=S), T)[0]

    assert growth(scores, 2**14, 2**20) == square(2**14, 2**20)
    assert scores(2**20) == pytest.approx(G * 2**40 / S**2 / 2, rel=0.01), "half: they are causal"


def test_complexity_total():
    """Scores as G L^2/S^2, reading as (N/2) L K S, windows as N L W."""
    scores, reading, window = (
        growth(lambda T, part=part: pairs(PAPER, T)[part]) for part in range(3)
    )
    assert (scores, reading, window) == (square(), linear(), linear())


def products(config: DRTConfig, T: int) -> float:
    """Add the products of all pairs: C for two landmarks, 2 C for a query with a key and a value.

    The scores are quadratic, but 64^2 times fewer than the pairs of tokens.
    """
    scores, reading, window = pairs(config, T)
    return scores + 2 * (reading + window)


def test_linear_attention_cost():
    assert growth(lambda T: products(PAPER, T)) == linear()
    every = replace(PAPER, num_retrieved=10**9)  # each chunk reads all before it
    assert growth(lambda T: products(every, T)) > 100 * LONGEST / TRAINED_AT


@pytest.mark.parametrize(("num_layers", "d"), [*product((12, 24), (64, 128))])
def test_kv_memory_full(num_layers, d):
    block = MixerBlockConfig(AttentionConfig(head_dim=16))
    whole = on_meta(BlocksConfig((block,) * num_layers), d)
    assert growth(whole.state_bytes) == linear()
    keys_and_values = 2 * 4 * num_layers * d  # bytes a token
    assert whole.state_bytes(LONGEST) == pytest.approx(keys_and_values * LONGEST, rel=0.01)


def test_kv_memory_offload():
    """The three terms have constants of their own: keys and values of the window count twice."""
    c, d = PAPER, 64
    reading = c.num_layers / 2 * c.num_retrieved * c.chunk_size

    def formula(T: int) -> float:
        return T * d / c.chunk_size + reading * d + c.num_layers * c.window_size * d

    on_gpu, whole = (
        on_meta(replace(c, offload=offload), d).state_bytes for offload in (True, False)
    )
    assert growth(on_gpu) == pytest.approx(growth(formula), rel=0.5)
    assert growth(whole) > 2 * growth(formula)


@pytest.mark.parametrize("G", [1, 2, 3])
@torch.no_grad()
def test_swap_frequency(G):
    """A stack retrieves G times a chunk, where Landmark Attention does in each layer and token."""
    S = 4
    layers = DRTConfig(
        num_layers=2 * G, num_groups=G, chunk_size=S, window_size=8, head_dim=8
    ).build(16)
    seen = []
    for query in layers.queries:
        query.register_forward_hook(lambda *_: seen.append(1))
    state = layers.reserve(layers.init_state(1), 2 * S + 1)
    for _ in range(2 * S + 1):
        layers.before_step(state)
        layers.step(torch.randn(1, 1, 16), state)
    assert len(seen) == 2 * G


@torch.no_grad()
def test_retrieval_vs_landmark(monkeypatch):
    """DRT retrieves once a chunk, Landmark Attention at each token in each of its 12 layers."""
    L, T, sizes = 4, 64, {"num_layers": 12, "chunk_size": 4, "head_dim": 8}
    by_drt, by_landmark = [], []
    right, right_landmark = queries.retrieve, attention._retrieve

    def retrieve(asked, *others, **options):
        by_drt.append(asked.shape[1])
        return right(asked, *others, **options)

    def at_tokens(q, landmarks, places, reach, P):
        by_landmark.append(int((places.offset < P - 1).sum()))
        return right_landmark(q, landmarks, places, reach, P)

    monkeypatch.setattr(queries, "retrieve", retrieve)
    monkeypatch.setattr(attention, "_retrieve", at_tokens)
    x = torch.randn(1, T, 16)
    DRTConfig(num_groups=1, window_size=8, **sizes).build(16)(x)
    LandmarkConfig(local_chunks=1, retrieved_chunks=1, **sizes).build(16)(x)
    assert sum(by_drt) / sum(by_landmark) == 1 / (12 * L)
    assert (PAPER.num_layers, PAPER.chunk_size, PAPER.num_groups) == (12, 64, 1)
