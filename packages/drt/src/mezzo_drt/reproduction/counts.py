"""What is counted without training: attention's pairs, caches, retrievals, fields."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from mezzo_core.nn import AttentionConfig, BlocksConfig, MixerBlockConfig
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.beside import Count, growth, in_pairs
from mezzo_core.reproduction.measurement import Measurement
from mezzo_core.reproduction.published import Claim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mezzo_drt.places import whole_places
from mezzo_drt.recipes import RECIPES, attention_field
from mezzo_drt.stack import DRTConfig

LENGTHS = (2**14, 2**24)
"""T: the paper's training length, and 16M."""
PAPER = DRTConfig()
OFFLOADED = replace(PAPER, offload=True)
PAPER_DRT = "128m_pg19_drt1"
NEAR = {"total attention field": 1e-3, "parameters": 0.08}
"""658 x 14 is about 9216, as printed; and "comparable" parameters, of which none are printed."""
SCORES, READING, WINDOW = "scores as G L^2/S^2", "reading as (N/2) L K S", "window as N L W"


def square(T: int) -> float:
    """Return T^2."""
    return T**2


def pairs(config: DRTConfig, num_tokens: int) -> dict[str, float]:
    """Count what attention computes in a forward of one sequence, in each of its three parts.

    Returns:
        By SCORES the pairs of landmarks, by READING and WINDOW the pairs of queries and keys of one
        head.
    """
    c, L = config, config.chunk_size
    places = whole_places(num_tokens, L, torch.device("cpu"))
    readable = (places.hi - places.lo)[0, : num_tokens // L].clamp(min=0)
    # The chunk after n reads what n retrieved; the chunks after the last one do not exist.
    reads = readable.clamp(max=c.num_retrieved)[: places.num_chunks - 1].sum()
    P, W = places.num_places, min(c.window_size, places.num_places)
    half = c.num_layers // 2
    return {
        SCORES: float(c.num_groups * readable.sum()),
        READING: float(half * reads * L * (L + 1)),
        WINDOW: float(c.num_layers * (W * (W + 1) // 2 + (P - W) * W)),
    }


def complexity_full(claim: Claim) -> Measurement:
    """Count the FLOPs of full attention by torch's counter, without those of its projections."""

    def attention(num_layers: int) -> Count:
        blocks = (MixerBlockConfig(AttentionConfig(head_dim=8)),) * num_layers
        stack = on_meta(BlocksConfig(blocks), 16)  # shapes are enough for the counter
        weights = sum(w.numel() for w in stack.parameters() if w.ndim == 2)

        def flops(T: int) -> float:
            # torch's counter has no formula for the fused attention of a CPU.
            math = sdpa_kernel(SDPBackend.MATH)
            with torch.no_grad(), math, FlopCounterMode(display=False) as counter:
                stack(torch.empty(1, T, 16, device="meta"))
            return counter.get_total_flops() - 2 * T * weights

        return flops

    rows = {f"{N} layers as L^2": (attention(N), square) for N in (1, 3)}
    return growth(rows, (256, 1024), "FLOPs of the products of q, k and v")


def complexity_scores(claim: Claim) -> Measurement:
    """Count the pairs of landmarks that are compared, with one group and with more."""

    def scores(G: int, S: int) -> Count:
        return lambda T: pairs(DRTConfig(num_groups=G, chunk_size=S), T)[SCORES] * S**2 / G

    rows = {f"G = {G}, S = {S}": (scores(G, S), square) for G in (1, 2, 3) for S in (32, 64)}
    return growth(rows, (2**14, 2**20), "pairs of landmarks times S^2/G, as L^2")


def complexity_total(claim: Claim) -> Measurement:
    """Count each of the three parts of attention, at the paper's sizes."""

    def part(name: str) -> Count:
        return lambda T: pairs(PAPER, T)[name]

    claimed: dict[str, Count] = {SCORES: square, READING: float, WINDOW: float}
    rows = {name: (part(name), grows) for name, grows in claimed.items()}
    return growth(rows, LENGTHS, "pairs of a forward of the 12 layers")


def linear_attention_cost(claim: Claim) -> Measurement:
    """Add the products of all pairs: C for two landmarks, 2 C for a query with a key and a value.

    The scores are quadratic, but 64^2 times fewer than the pairs of tokens.
    """

    def products(T: int) -> float:
        found = pairs(PAPER, T)
        return found[SCORES] + 2 * (found[READING] + found[WINDOW])

    setting = "products of attention in 12 layers, for each channel"
    return growth({"products as T": (products, float)}, LENGTHS, setting)


def kv_memory_full(claim: Claim) -> Measurement:
    """Take the state of full attention, of several depths and widths, as N L d."""
    block = MixerBlockConfig(AttentionConfig(head_dim=16))
    rows = {
        f"{N} layers, d = {d}": (on_meta(BlocksConfig((block,) * N), d).state_bytes, float)
        for N, d in product((12, 24), (64, 128))
    }
    return growth(rows, LENGTHS, "bytes of state, as L")


def kv_memory_offload(claim: Claim) -> Measurement:
    """Take the state on the GPU, with the keys and values of chunks in the host's memory.

    The three terms have constants of their own: keys and values of the window count twice.
    """
    c, d = OFFLOADED, 64
    stack = on_meta(c, d)

    def formula(T: int) -> float:
        reading = c.num_layers / 2 * c.num_retrieved * c.chunk_size
        return T * d / c.chunk_size + reading * d + c.num_layers * c.window_size * d

    setting = "bytes of state on the GPU, as L d/S + (N/2) K S d + N W d"
    return growth({"12 layers": (stack.state_bytes, formula)}, LENGTHS, setting)


@torch.no_grad()
def swap_frequency(claim: Claim) -> Measurement:
    """Decode two chunks of a small stack, and count its retrievals, with each number of groups."""
    S, rows = 4, {}
    for G in (1, 2, 3):
        stack = DRTConfig(
            num_layers=2 * G, num_groups=G, chunk_size=S, window_size=8, head_dim=8
        ).build(16)
        seen: list[int] = []
        for query in stack.queries:
            query.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        state = stack.reserve(stack.init_state(1), 2 * S + 1)
        for _ in range(2 * S + 1):
            stack.before_step(state)
            stack.step(torch.randn(1, 1, 16), state)
        rows[f"retrievals in {S} tokens, G = {G}"] = (G, len(seen) / 2)
    return in_pairs(rows, "decoding of two chunks")


def retrieval_vs_landmark(claim: Claim) -> Measurement:
    """Compare with Landmark Attention, which retrieves at every token in every layer.

    DRT retrieves once a chunk for each group (`swap_frequency`).
    """
    tokens = PAPER.chunk_size / PAPER.num_groups
    rows = {
        "tokens a retrieval": (float(claim.values[0]), tokens),
        "share of Landmark Attention's retrievals": (
            1 / (12 * 64),
            1 / (tokens * PAPER.num_layers),
        ),
    }
    return in_pairs(rows, "the paper's")


def baseline_field_768(claim: Claim) -> Measurement:
    """Compare the attention fields of BaseLM with the wider window and of DRT."""
    layers = _windows("128m_pg19_base_wide")
    c: Any = RECIPES[PAPER_DRT]().model.stack
    rows = {
        "BaseLM's field": (12 * 768, sum(layers)),
        "DRT's field": (12 * 512 + 6 * 512, attention_field(c)),
    }
    return in_pairs(rows, f"recipes 128m_pg19_base_wide, {PAPER_DRT}")


def baseline_14_layers(claim: Claim) -> Measurement:
    """Compare BaseLM with two layers more: its window, field and weights."""
    name = "128m_pg19_base_deep"
    layers, (printed_layers, window, *_) = _windows(name), claim.values
    rows = {
        "layers": (printed_layers, len(layers)),
        "window": (window, layers[0]),
        "total attention field": (12 * 512 + 6 * 512, sum(layers)),
        "parameters": (_model(PAPER_DRT).num_parameters(), _model(name).num_parameters()),
    }
    return in_pairs(rows, f"recipe {name}; its parameters beside those of {PAPER_DRT}")


def _windows(recipe: str) -> list[int]:
    return [block.mixer.config.window_size for block in _model(recipe).stack.blocks]


def _model(recipe: str) -> Any:
    return on_meta(RECIPES[recipe]().model)
