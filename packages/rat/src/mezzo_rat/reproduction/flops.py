"""FLOPs: the growth that the paper claims, checked by counting our layers' products."""

from collections.abc import Callable, Sequence

import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.papers import Claim, Finding, Measurement, ResultRow, Status
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.reversed import RATReversedConfig

C, HEAD_DIM = 128, 32
LENGTHS = (256, 512, 1024)
LAYERS: dict[str, MixerConfig] = {
    "RNN": LinearRNNConfig(),
    "RAT(L=64)": RATConfig(chunk_size=64, head_dim=HEAD_DIM),
    "RAT(L=16)": RATConfig(chunk_size=16, head_dim=HEAD_DIM),
    "Attention": AttentionConfig(head_dim=HEAD_DIM),
}


def flops_growth(claim: Claim) -> Finding:
    """Check FLOPs a token: constant for the RNN, growing as T/L for RAT, and as T for attention.

    Growth is the FLOPs that one more token of context adds to each token. It is counted in two
    ways: by torch's counter on a forward pass, which counts masked logits in full, and from
    `flops_per_token`, which leaves them out. The first is twice the second, for RAT as for
    attention.
    """
    rows, counted_growth, formula_growth = [], {}, {}
    for name, config in LAYERS.items():
        mixer = config.build(C)
        counted = [count_flops(mixer, length) for length in LENGTHS]
        formula = [mixer.flops_per_token(length) for length in LENGTHS]
        counted_growth[name], formula_growth[name] = growth(counted), growth(formula)
        rows.append(ResultRow(name, ((*counted, counted_growth[name], formula_growth[name]),)))
    right = all(_grows_as_claimed(each) for each in (counted_growth, formula_growth))
    ratios = [counted_growth["Attention"] / counted_growth[f"RAT(L={L})"] for L in (16, 64)]
    columns = (*(f"T={length}" for length in LENGTHS), "growth, counted", "growth, formula")
    return Finding(
        claim.id,
        "claim",
        Status.REPRODUCED if right else Status.DIFFERS,
        "the RNN's FLOPs a token do not grow with T; attention's grow "
        f"{ratios[0]:.2f} times as fast as those of RAT(L=16), {ratios[1]:.2f} times as fast as "
        "those of RAT(L=64)",
        (
            Measurement(
                columns,
                tuple(rows),
                f"one mixer, C = {C}, D = {HEAD_DIM}, forward; matrix products counted by torch",
                unit="FLOPs a token",
            ),
        ),
    )


def count_flops(mixer: nn.Module, num_tokens: int) -> float:
    """Return the FLOPs a token of the matrix products of one forward pass."""
    # torch's counter has no formula for the fused attention of a CPU. SDPBackend.MATH uses plain
    # matrix products, which it counts.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mixer(torch.randn(1, num_tokens, C))
    return counter.get_total_flops() / num_tokens


def growth(flops: Sequence[float]) -> float:
    """Return the FLOPs a token that each further token of context adds, over all LENGTHS."""
    return (flops[-1] - flops[0]) / (LENGTHS[-1] - LENGTHS[0])


def _grows_as_claimed(growths: dict[str, float]) -> bool:
    attention = growths["Attention"]
    return growths["RNN"] == 0 and all(
        abs(attention / growths[f"RAT(L={L})"] / L - 1) < 0.01 for L in (16, 64)
    )


def reversed_chunks(claim: Claim) -> Finding:
    """Find the chunk size at which the reversed design has the FLOPs of RAT(L=64)."""
    width, head_dim = 1024, 64
    contexts = (8192, 16_384, 32_768)
    found = []
    for num_tokens in contexts:
        target = _attention_flops(RATConfig(64, head_dim), width, num_tokens)

        def distance(L: int, T: int = num_tokens, target: float = target) -> float:
            return abs(_attention_flops(RATReversedConfig(L, head_dim), width, T) - target)

        found.append(_nearest_power(distance, num_tokens))
    right = list(claim.values) == found
    return Finding(
        claim.id,
        "claim",
        Status.REPRODUCED if right else Status.DIFFERS,
        f"by our layers' FLOPs the reversed design costs what RAT(L=64) does at chunks of {found}",
        (
            Measurement(
                claim.labels,
                (ResultRow("RAT-Reversed", (tuple(found),)),),
                "the power of two whose attention FLOPs are nearest to RAT(L=64)'s; "
                f"C = {width}, D = {head_dim}",
                unit="tokens a chunk",
            ),
        ),
    )


def _nearest_power(distance: Callable[[int], float], largest: int) -> int:
    return min((2**i for i in range(largest.bit_length())), key=distance)


def _attention_flops(config: MixerConfig, d_model: int, num_tokens: int) -> float:
    """Return the FLOPs a token that the context adds to those of a single token."""
    with torch.device("meta"):
        mixer = config.build(d_model)
    return mixer.flops_per_token(num_tokens) - mixer.flops_per_token(1)
