"""What is counted or computed without training: FLOPs, states in memory."""

from pathlib import Path

import torch
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.beside import beside_printed, in_pairs
from mezzo_core.reproduction.measurement import Entry, Measurement, entries
from mezzo_core.reproduction.published import Claim, Table, load_published
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mezzo_rat.mixer import RATConfig
from mezzo_rat.reproduction.speed import paper_layers
from mezzo_rat.reversed import RATReversedConfig

C, HEAD_DIM = 128, 32
GPU_BYTES = 120e9
"""Memory of the paper's GPU."""


def flops(claim: Claim) -> Measurement:
    """Compare what a longer context adds to each layer's FLOPs with the paper's growth.

    It is 0 for the RNN, and an L-th of attention's for RAT. The FLOPs are those of torch's counter,
    which counts masked logits in full, on a forward pass, and those of `flops_per_token`.
    """
    shares = {"RNN": 0.0, "Attention": 1.0, **{f"RAT(L={L})": 1 / L for L in (16, 64, 128)}}
    ways = {"torch": count_flops, "our formula": lambda mixer, T: mixer.flops_per_token(T)}
    mixers = {name: config.build(C) for name, config in paper_layers(HEAD_DIM).items()}
    rows = dict[str, tuple[float, float]]()
    for way, count in ways.items():
        added = {name: count(mixer, 1024) - count(mixer, 256) for name, mixer in mixers.items()}
        rows |= {
            f"{name}, by {way}": (shares[name] * added["Attention"], ours)
            for name, ours in added.items()
        }
    return in_pairs(rows, f"FLOPs a token at T = 1024 minus those at 256, C = {C}, D = {HEAD_DIM}")


def count_flops(mixer: nn.Module, num_tokens: int) -> float:
    """Return the FLOPs a token of the matrix products of one forward pass."""
    # torch's counter has no formula for the fused attention of a CPU. SDPBackend.MATH uses plain
    # matrix products, which it counts.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mixer(torch.randn(1, num_tokens, C))
    return counter.get_total_flops() / num_tokens


def reversed_chunks(claim: Claim) -> Measurement:
    """Find the chunk size (a power of two) at which the reversed design costs what RAT(L=64) does.

    The costs are the FLOPs a token that the context adds to those of a single token.
    """
    width, head_dim = 1024, 64

    def cost(config: MixerConfig, T: int) -> float:
        mixer = on_meta(config, width)
        return mixer.flops_per_token(T) - mixer.flops_per_token(1)

    def nearest(T: int) -> int:
        target = cost(RATConfig(64, head_dim), T)
        sizes = (2**i for i in range(T.bit_length()))
        return min(sizes, key=lambda L: abs(cost(RATReversedConfig(L, head_dim), T) - target))

    found = {label: nearest(int(label.removeprefix("T="))) for label in claim.labels}
    words = f"powers of two with FLOPs of the context nearest to RAT(L=64)'s, C = {width}"
    return beside_printed(claim, found, f"{words}, D = {head_dim}")


def out_of_memory(claim: Claim) -> Measurement:
    """Count at how many positions of Table 8 a batch's state fits the paper's GPU.

    Nothing is allocated: the sizes come from `state_bytes`, which tests compare with real tensors.
    A row's first columns are the positions that fit, in the paper and by our sizes.
    """
    width, head_dim = 2048, 128
    table = load_published(Path(__file__).with_name("published.toml")).by_id["rat.table8"]
    assert isinstance(table, Table)
    layers = paper_layers(head_dim)
    columns = ("printed", "ours", *(f"GB at {column}" for column in table.columns))
    found: list[Entry] = []
    for row in table.rows:
        mixer = on_meta(layers[row.model], width).bfloat16()
        batch = int(row.group.removeprefix("B="))
        sizes = [batch * mixer.state_bytes(int(column)) for column in table.columns]
        fits = sum(size <= GPU_BYTES for size in sizes)
        printed = sum(value != "OOM" for value in row.values)
        values = [printed, fits, *(size / 1e9 for size in sizes)]
        found += entries({row.model: values}, columns, row.group)
    return Measurement(
        tuple(found),
        columns,
        f"computed, not run: at how many of {len(table.columns)} positions the state of one layer, "
        f"C = {width}, bfloat16, of the whole batch fits {GPU_BYTES / 1e9:.0f} GB",
    )
