"""Checks of the method that need no training: its limits, RoPE by chunk, decoding, its sizes.

Each compares counts, or numbers in float64 that can differ by rounding only.
"""

import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import AbstractMixer, MixerConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers import Finding, Measurement, ResultRow, Status
from mezzo_core.reproduction import checks
from mezzo_core.reproduction.checks import equality
from torch import Tensor

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.ops.rat_attention import chunk_rat_attention
from mezzo_rat.reproduction.definition import rat_by_definition

T, H, G, D = 75, 4, 2, 8


def limit_attention() -> Finding:
    """With L = 1 RAT is softmax attention with RoPE by token; keys and values are times 1 - f."""
    q, k, v, g, z = _inputs()
    write, heads = torch.sigmoid(-g), torch.arange(H) % G
    query, key = (_rope(x, torch.arange(T)) for x in (q[:, heads], write * k[:, heads]))
    logits = torch.einsum("thd,shd->hts", query, key) / D**0.5
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, float("-inf")).softmax(-1)
    expected = torch.sigmoid(z) * torch.einsum("hts,shd->thd", weights, write * v)
    return equality(
        "rat.check.limit_attention",
        "RAT with L = 1 is softmax attention over gated keys and values",
        _rat(q, k, v, g, z, 1),
        expected,
    )


def limit_rnn() -> Finding:
    """With L >= T RAT is the gated linear RNN: queries and keys have no effect."""
    q, k, v, g, z = _inputs()
    keep, h, states = torch.sigmoid(g), torch.zeros_like(v[0]), []
    for t in range(T):
        h = keep[t] * h + (1 - keep[t]) * v[t]
        states.append(h)
    return equality(
        "rat.check.limit_rnn",
        "RAT with L = T is the gated linear RNN",
        _rat(q, k, v, g, z, T),
        torch.sigmoid(z) * torch.stack(states),
    )


def rope_by_chunk() -> Finding:
    """The op agrees with the paper's equations, where RoPE is a complex product by chunk."""
    q, k, v, g, z = _inputs()
    L = 16
    return equality(
        "rat.check.rope_by_chunk",
        f"RAT with L = {L}, RoPE by chunk index, is the paper's equation 3, T = {T} not a multiple",
        _rat(q, k, v, g, z, L),
        rat_by_definition(q, k, v, g, z, chunk_size=L, rope_base=10_000.0),
    )


def decode_equals_prefill() -> Finding:
    """Logits step by step, after a prefill that ends inside a chunk, equal those of a forward."""
    hybrid = (RATConfig(chunk_size=16, head_dim=16), AttentionConfig(head_dim=16, window_size=24))
    model = LMConfig(vocab_size=64, d_model=64, mixers=hybrid)
    return checks.decode_equals_prefill(
        "rat.check.decode_equals_prefill", model, "RAT and SWA layers"
    )


def parameter_budget() -> Finding:
    """The three layers have about as many weights, as in the paper: RAT's heads share q and k."""
    C, head_dim = 2048, 128
    budget = 4 * C * C
    expected: dict[str, tuple[MixerConfig, int]] = {
        "RNN": (LinearRNNConfig(), budget),
        "Attention": (AttentionConfig(head_dim=head_dim), budget),
        "RAT(L=16), G = 1": (RATConfig(16, head_dim, num_groups=1), budget + 2 * head_dim * C),
        "RAT(L=16), G = 2": (RATConfig(16, head_dim, num_groups=2), budget + 4 * head_dim * C),
    }
    rows, right = [], True
    for name, (config, weights) in expected.items():
        counted = sum(p.numel() for p in _on_meta(config, C).parameters() if p.ndim == 2)
        right &= counted == weights
        rows.append(ResultRow(name, ((counted, counted / budget),)))
    return Finding(
        "rat.check.parameter_budget",
        "check",
        Status.REPRODUCED if right else Status.DIFFERS,
        "RNN and attention have 4C² weights; RAT adds the shared q and k, 2GDC: "
        f"{rows[3].values[1]:.4f} times the budget with the released code's G = 2",
        (Measurement(("weights", "of 4C²"), tuple(rows), f"one mixer, C = {C}, D = {head_dim}"),),
    )


def state_shrinks() -> Finding:
    """The state of RAT holds N = ceil(T / L) entries where attention holds T (Listing 2)."""
    C, head_dim = 64, 16
    lengths = (64, 256, 1024)
    configs: dict[str, MixerConfig] = {
        "Attention": AttentionConfig(head_dim=head_dim),
        "RAT(L=16)": RATConfig(chunk_size=16, head_dim=head_dim),
        "RAT(L=64)": RATConfig(chunk_size=64, head_dim=head_dim),
        "RNN": LinearRNNConfig(),
    }
    rows, right = [], True
    for name, config in configs.items():
        mixer = config.build(C)
        held = tuple(_state_entries(mixer, C, length) for length in lengths)
        right &= held == tuple(_expected_entries(config, length) for length in lengths)
        rows.append(ResultRow(name, (held,)))
    return Finding(
        "rat.check.state_shrinks",
        "check",
        Status.REPRODUCED if right else Status.DIFFERS,
        "after T tokens a RAT layer holds T/L keys and values, attention T of each, the RNN none",
        (
            Measurement(
                tuple(f"T={length}" for length in lengths),
                tuple(rows),
                "pairs of key and value in the state after a prefill, counted in its tensors",
                unit="entries",
            ),
        ),
    )


def _state_entries(mixer: AbstractMixer, d_model: int, num_tokens: int) -> int:
    """Count the slots (the second axis of a 4-dimensional tensor) in the state of a prefill."""
    with torch.no_grad():
        _, state = mixer(torch.randn(1, num_tokens, d_model), mixer.init_state(1))
    return max((part.shape[1] for part in state if part.ndim == 4), default=0)


def _expected_entries(config: MixerConfig, num_tokens: int) -> int:
    if isinstance(config, RATConfig):
        return -(-num_tokens // config.chunk_size)
    return num_tokens if isinstance(config, AttentionConfig) else 0


def _on_meta(config: MixerConfig, d_model: int) -> AbstractMixer:
    with torch.device("meta"):
        return config.build(d_model)


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = [
        torch.randn(T, heads, D, generator=generator, dtype=torch.float64)
        for heads in (G, G, H, H, H)
    ]
    return draw[0], draw[1], draw[2], draw[3], draw[4]


def _rat(q: Tensor, k: Tensor, v: Tensor, g: Tensor, z: Tensor, chunk_size: int) -> Tensor:
    batched = (x[None] for x in (q, k, v, g))
    return chunk_rat_attention(*batched, chunk_size=chunk_size, z=z[None]).out[0]


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate (T, H, D) by token position; the halves of D are the real and imaginary parts."""
    frequencies = 10_000.0 ** (-torch.arange(D // 2, dtype=x.dtype) * 2 / D)
    angles = (positions[:, None] * frequencies)[:, None]
    real, imaginary = x.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


CHECKS = {
    "rat.check.limit_attention": limit_attention,
    "rat.check.limit_rnn": limit_rnn,
    "rat.check.rope_by_chunk": rope_by_chunk,
    "rat.check.decode_equals_prefill": decode_equals_prefill,
    "rat.check.parameter_budget": parameter_budget,
    "rat.check.state_shrinks": state_shrinks,
}
