"""What is counted without training: attention's pairs, caches, retrievals, groups of layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mezzo_core.nn import AttentionConfig, BlocksConfig, MixerBlockConfig
from mezzo_core.papers.beside import beside
from mezzo_core.papers.growth import growing
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Value
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mezzo_drt.places import whole_places
from mezzo_drt.recipes import RECIPES, attention_field
from mezzo_drt.stack import DRT, DRTConfig

LENGTHS = tuple(2**i for i in range(14, 25, 2))
"""T, from the paper's training length to 16M."""
WIDTHS = (64, 128)
PAPER = DRTConfig()
OFFLOADED = replace(PAPER, offload=True)
PAPER_DRT = "128m_pg19_drt1"
NEAR = {"total attention field": 1e-3, "parameters": 0.08}
"""658 x 14 is about 9216, as printed; and "comparable" parameters, of which none are printed."""
SCORES, READING, WINDOW = "scores over G L^2/S^2", "reading over (N/2) L K S", "window over N L W"


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
    rows: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {}
    for N in (1, 3):
        blocks = (MixerBlockConfig(AttentionConfig(head_dim=8)),) * N
        with torch.device("meta"):  # shapes are enough for the counter
            stack = BlocksConfig(blocks).build(16)
        weights = sum(w.numel() for w in stack.parameters() if w.ndim == 2)

        def attention(T: int, stack: nn.Module = stack, weights: int = weights) -> float:
            # torch's counter has no formula for the fused attention of a CPU.
            math = sdpa_kernel(SDPBackend.MATH)
            with torch.no_grad(), math, FlopCounterMode(display=False) as counter:
                stack(torch.empty(1, T, 16, device="meta"))
            return counter.get_total_flops() - 2 * T * weights

        def formula(T: int, N: int = N) -> float:
            return N * T**2

        rows[f"{N} layers"] = attention, formula
    setting = "FLOPs of the products of q, k and v, over N L^2"
    return growing(rows, setting, (256, 512, 1024, 2048))


def complexity_scores(claim: Claim) -> Measurement:
    """Count the pairs of landmarks that are compared, with one group and with more."""
    rows = {
        f"G = {G}, S = {S}": (
            lambda T, G=G, S=S: pairs(DRTConfig(num_groups=G, chunk_size=S), T)[SCORES],
            lambda T, G=G, S=S: G * T**2 / S**2,
        )
        for G in (1, 2, 3)
        for S in (32, 64)
    }
    return growing(rows, "pairs of landmarks, over G L^2/S^2", LENGTHS)


def complexity_total(claim: Claim) -> Measurement:
    """Count each of the three parts of attention, at the paper's sizes."""
    c = PAPER
    formulas = {
        SCORES: lambda T: c.num_groups * T**2 / c.chunk_size**2,
        READING: lambda T: c.num_layers / 2 * T * c.num_retrieved * c.chunk_size,
        WINDOW: lambda T: c.num_layers * T * c.window_size,
    }
    rows = {
        part: (lambda T, part=part: pairs(c, T)[part], formula)
        for part, formula in formulas.items()
    }
    return growing(rows, "pairs of a forward of the 12 layers", LENGTHS)


def linear_attention_cost(claim: Claim) -> Measurement:
    """Add the products of all pairs: C for two landmarks, 2 C for a query with a key and a value.

    The scores are quadratic, but 64^2 times fewer than the pairs of tokens.
    """

    def products(T: int) -> float:
        found = pairs(PAPER, T)
        return found[SCORES] + 2 * (found[READING] + found[WINDOW])

    rows: Any = {"products over T": (products, float)}
    return growing(rows, "products of attention in 12 layers, for each channel", LENGTHS)


def kv_memory_full(claim: Claim) -> Measurement:
    """Take the state of full attention, of several depths and widths."""
    rows = {}
    for N in (12, 24):
        for C in WIDTHS:
            stack = BlocksConfig((MixerBlockConfig(AttentionConfig(head_dim=16)),) * N).build(C)
            rows[f"{N} layers, d = {C}"] = (
                stack.state_bytes,
                lambda T, N=N, C=C: N * T * C,
            )
    return growing(rows, "bytes of state, over N L d", LENGTHS)


def kv_memory_offload(claim: Claim) -> Measurement:
    """Take the state on the GPU, with the keys and values of chunks in the host's memory.

    The three terms have constants of their own: keys and values of the window count twice.
    """
    c, C = OFFLOADED, WIDTHS[0]
    with torch.device("meta"):
        stack = c.build(C)

    def formula(T: int) -> float:
        reading = c.num_layers / 2 * c.num_retrieved * c.chunk_size
        return T * C / c.chunk_size + reading * C + c.num_layers * c.window_size * C

    setting = "bytes of state on the GPU, over L d/S + (N/2) K S d + N W d"
    return growing({"12 layers": (stack.state_bytes, formula)}, setting, LENGTHS)


def swap_frequency(claim: Claim) -> Measurement:
    """Decode S tokens three times, and count the retrievals."""
    S, printed, ours = 8, {}, {}
    for G in (1, 2, 3):
        found = retrievals(_small(12, G, S), 3 * S)
        printed[f"retrievals in {S} tokens, G = {G}"] = G
        ours[f"retrievals in {S} tokens, G = {G}"] = found / 3
    return beside(printed, ours, "decoding of three chunks")


def retrieval_vs_landmark(claim: Claim) -> Measurement:
    """Decode two chunks with the paper's layers and chunks, and count the retrievals."""
    tokens = 2 * PAPER.chunk_size
    found = retrievals(_small(PAPER.num_layers, 1, PAPER.chunk_size), tokens)
    # Landmark Attention retrieves at every token in every layer (section 2).
    ours = (tokens / found, found / (PAPER.num_layers * tokens))
    names = ("tokens a retrieval", "share of Landmark Attention's retrievals")
    printed = (float(claim.values[0]), 1 / (12 * 64))
    return beside(
        dict(zip(names, printed, strict=True)),
        dict(zip(names, ours, strict=True)),
        "decoding of two chunks with 12 layers",
    )


@torch.no_grad()
def retrievals(config: DRTConfig, num_tokens: int) -> int:
    """Decode so many tokens; count the retrievals before the one that follows."""
    stack, _, counter = _build(config)
    state = stack.reserve(stack.init_state(1), num_tokens + 1)
    for _ in range(num_tokens + 1):
        stack.before_step(state)
        stack.step(torch.randn(1, 1, stack.d_model), state)
    return counter[0]


def group_map(claim: Claim) -> Measurement:
    """Watch which retrieval is the latest when an upper layer runs, and compare with g(l)."""
    printed, ours = {}, {}
    for N, G in ((12, 1), (12, 2), (12, 3), (8, 4)):
        stack, groups, _ = _build(_small(N, G, 4))
        with torch.no_grad():
            stack(torch.randn(1, 12, stack.d_model))
        for i, group in enumerate(groups):
            layer = N // 2 + 1 + i  # layers count from 1
            name = f"group of layer {layer} of {N}, G = {G}"
            printed[name] = -(-(layer - N // 2) // (N // (2 * G)))
            ours[name] = group
    return beside(printed, ours, "the order of retrievals and layers in a forward")


def baseline_field_768(claim: Claim) -> Measurement:
    """Compare the attention fields of BaseLM with the wider window and of DRT."""
    layers = _windows("128m_pg19_base_wide")
    c: Any = RECIPES[PAPER_DRT]().model.stack
    printed = {"BaseLM's field": 12 * 768, "DRT's field": 12 * 512 + 6 * 512}
    ours = {"BaseLM's field": sum(layers), "DRT's field": attention_field(c)}
    return beside(printed, ours, f"recipes 128m_pg19_base_wide, {PAPER_DRT}")


def baseline_14_layers(claim: Claim) -> Measurement:
    """Compare BaseLM with two layers more: its window, field and weights."""
    name = "128m_pg19_base_deep"
    layers = _windows(name)
    printed: dict[str, Value] = {
        "layers": claim.values[0],
        "window": claim.values[1],
        "total attention field": 12 * 512 + 6 * 512,
        "parameters": _parameters(PAPER_DRT),
    }
    ours: dict[str, Value] = {
        "layers": len(layers),
        "window": layers[0],
        "total attention field": sum(layers),
        "parameters": _parameters(name),
    }
    setting = f"recipe {name}; its parameters beside those of {PAPER_DRT}"
    return beside(printed, ours, setting)


def _small(num_layers: int, num_groups: int, chunk_size: int) -> DRTConfig:
    """Describe a narrow stack."""
    return DRTConfig(
        num_layers=num_layers,
        num_groups=num_groups,
        chunk_size=chunk_size,
        num_retrieved=2,
        window_size=8,
        head_dim=8,
        hidden=8,
        num_encoder_layers=1,
    )


def _build(config: DRTConfig) -> tuple[DRT, list[int], list[int]]:
    """Build a small stack.

    Returns:
        It, a list that each run of an upper layer in a forward appends its group to, counted from
        1, and a list of one number, the retrievals so far.
    """
    torch.manual_seed(0)
    stack, groups, count = config.build(16).eval(), list[int](), [0]

    def retrieved(*_: Any) -> None:
        count[0] += 1

    def ran(*_: Any) -> None:
        groups.append(count[0])

    for query in stack.queries:
        query.register_forward_hook(retrieved)
    for layer in stack.upper:
        layer.register_forward_hook(ran)
    return stack, groups, count


def _windows(recipe: str) -> list[int]:
    return [block.mixer.config.window_size for block in _model(recipe).stack.blocks]


def _parameters(recipe: str) -> int:
    return sum(weight.numel() for weight in _model(recipe).parameters())


def _model(recipe: str) -> Any:
    """Build a recipe's model without memory for its weights."""
    with torch.device("meta"):
        return RECIPES[recipe]().model.build()
