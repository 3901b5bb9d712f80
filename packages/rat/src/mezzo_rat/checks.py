"""Checks of RAT's method that need no training: its limits, its definition, decoding, its sizes.

Each compares counts, or numbers in float64 that can differ by rounding only.
"""

import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers.checks import decode_equals_prefill, equality
from mezzo_core.papers.claims import Check
from mezzo_core.papers.criteria import Judgement, Outcome
from torch import Tensor

from mezzo_rat.counts import on_meta
from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.ops.rat_attention import chunk_rat_attention

T, H, G, D = 75, 4, 2, 8
ROPE_BASE = 10_000.0


def limit_attention() -> Judgement:
    """With L = 1 RAT is softmax attention with RoPE by token; keys and values are times 1 - f."""
    q, k, v, g, z = _inputs()
    write, heads = torch.sigmoid(-g), torch.arange(H) % G
    query, key = (_turned(x, torch.arange(T)) for x in (q[:, heads], write * k[:, heads]))
    logits = torch.einsum("thd,shd->hts", query, key.conj()).real / D**0.5
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, float("-inf")).softmax(-1)
    expected = torch.sigmoid(z) * torch.einsum("hts,shd->thd", weights, write * v)
    statement = "RAT with L = 1 is softmax attention over gated keys and values"
    return equality(statement, _rat(q, k, v, g, z, 1), expected)


def limit_rnn() -> Judgement:
    """With L >= T RAT is the gated linear RNN: queries and keys have no effect."""
    q, k, v, g, z = _inputs()
    keep, h, states = torch.sigmoid(g), torch.zeros_like(v[0]), []
    for t in range(T):
        h = keep[t] * h + (1 - keep[t]) * v[t]
        states.append(h)
    expected = torch.sigmoid(z) * torch.stack(states)
    statement = "RAT with L = T is the gated linear RNN"
    return equality(statement, _rat(q, k, v, g, z, T), expected)


def rope_by_chunk() -> Judgement:
    """The op agrees with the paper's equations, where RoPE is a complex product by chunk."""
    inputs, L = _inputs(), 16
    statement = f"RAT with L = {L}, RoPE by chunk index, is the paper's equation 3, T = {T}"
    return equality(statement, _rat(*inputs, L), rat_by_definition(*inputs, L))


def rat_by_definition(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, z: Tensor, chunk_size: int
) -> Tensor:
    """Compute equation 3 of the paper token by token, with RoPE by chunk index.

    This shares no code with `mezzo_rat.ops`, so a common mistake is unlikely. q and k are
    (T, G, D), of which head h reads group h % G; v and the gates' logits g and z are (T, H, D), and
    so is the result.
    """
    heads, keep = torch.arange(H) % G, torch.sigmoid(g)
    ends_k: list[Tensor] = []
    ends_v: list[Tensor] = []
    outputs = []
    for t in range(T):
        n = t // chunk_size
        if t % chunk_size == 0:
            run_k, run_v = torch.zeros_like(v[0]), torch.zeros_like(v[0])
        run_k = keep[t] * run_k + (1 - keep[t]) * k[t, heads]
        run_v = keep[t] * run_v + (1 - keep[t]) * v[t]
        keys = torch.stack([*ends_k, run_k])
        key = _turned(keys, torch.arange(n + 1))
        query = _turned(q[t, heads], torch.tensor(n))
        weights = ((query * key.conj()).real.sum(-1) / D**0.5).softmax(0)[..., None]
        outputs.append(torch.sigmoid(z[t]) * (weights * torch.stack([*ends_v, run_v])).sum(0))
        if t % chunk_size == chunk_size - 1:
            ends_k.append(run_k)
            ends_v.append(run_v)
    return torch.stack(outputs)


def parameter_budget() -> Judgement:
    """RNN and attention have the same weights, 4C²; RAT adds the q and k that its heads share."""
    C, D = 2048, 128
    layers: dict[str, tuple[MixerConfig, int]] = {
        "RNN": (LinearRNNConfig(), 0),
        "Attention": (AttentionConfig(head_dim=D), 0),
        **{f"RAT(L=16), G = {G}": (RATConfig(16, D, num_groups=G), G) for G in (1, 2)},
    }
    counted = {
        name: sum(p.numel() for p in on_meta(config, C).parameters() if p.ndim == 2)
        for name, (config, _) in layers.items()
    }
    right = all(counted[name] == 4 * C * C + 2 * G * D * C for name, (_, G) in layers.items())
    return Judgement(
        Outcome.AGREES if right else Outcome.DIFFERS,
        "RNN and attention have 4C² weights; RAT adds the shared q and k, 2GDC: "
        f"{counted['RAT(L=16), G = 2'] / (4 * C * C):.4f} times the budget with the released "
        f"code's G = 2 (one mixer, C = {C}, D = {D})",
        tuple(
            f"{name}: {n:,} weights, {n / (4 * C * C):.4f} of 4C²" for name, n in counted.items()
        ),
    )


def state_shrinks() -> Judgement:
    """The state of RAT holds N = T / L entries where attention holds T (Listing 2)."""
    C, D, lengths = 64, 16, (64, 256, 1024)
    layers: dict[str, tuple[MixerConfig, int]] = {
        "Attention": (AttentionConfig(head_dim=D), 1),
        **{f"RAT(L={L})": (RATConfig(L, D), L) for L in (16, 64)},
        "RNN": (LinearRNNConfig(), 2 * max(lengths)),
    }
    held = {name: [_entries(config, C, T) for T in lengths] for name, (config, _) in layers.items()}
    right = all(held[name] == [T // L for T in lengths] for name, (_, L) in layers.items())
    return Judgement(
        Outcome.AGREES if right else Outcome.DIFFERS,
        "after T tokens a RAT layer holds T/L keys and values, attention T of each, the RNN none "
        "(counted in the tensors of the state after a prefill)",
        tuple(f"{name}: {counted} entries at T = {lengths}" for name, counted in held.items()),
    )


def _entries(config: MixerConfig, d_model: int, num_tokens: int) -> int:
    """Count the slots (the second axis of a 4-dimensional tensor) in the state of a prefill."""
    mixer = config.build(d_model)
    with torch.no_grad():
        _, state = mixer(torch.randn(1, num_tokens, d_model), mixer.init_state(1))
    return max((part.shape[1] for part in state if part.ndim == 4), default=0)


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(T, heads, D) for heads in (G, G, H, H, H)]
    q, k, v, g, z = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return q, k, v, g, z


def _rat(q: Tensor, k: Tensor, v: Tensor, g: Tensor, z: Tensor, chunk_size: int) -> Tensor:
    batched = (x[None] for x in (q, k, v, g))
    return chunk_rat_attention(*batched, chunk_size=chunk_size, z=z[None]).out[0]


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate (..., H, D) by position, to (..., H, D/2) complex numbers.

    The halves of D are the real and the imaginary parts.
    """
    frequencies = ROPE_BASE ** (-torch.arange(D // 2, dtype=x.dtype) * 2 / D)
    angles = (positions[..., None] * frequencies)[..., None, :]
    real, imaginary = x.chunk(2, dim=-1)
    return torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)


_HYBRID = (RATConfig(chunk_size=16, head_dim=16), AttentionConfig(head_dim=16, window_size=24))
CHECKS = (
    Check("rat.check.limit_attention", limit_attention),
    Check("rat.check.limit_rnn", limit_rnn),
    Check("rat.check.rope_by_chunk", rope_by_chunk),
    decode_equals_prefill(
        "rat.check.decode_equals_prefill",
        LMConfig(vocab_size=64, d_model=64, mixers=_HYBRID),
        "RAT and SWA layers",
    ),
    Check("rat.check.parameter_budget", parameter_budget),
    Check("rat.check.state_shrinks", state_shrinks),
)
