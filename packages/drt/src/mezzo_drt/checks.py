"""Checks of the method that need no training: its limits, and decoding."""

from dataclasses import replace

import torch
from mezzo_core.nn import AttentionConfig, BlocksConfig, MixerBlockConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.papers.checks import decode_equals_prefill, equality
from mezzo_core.papers.claims import Check
from mezzo_core.papers.criteria import Judgement
from torch import Tensor, nn

from mezzo_drt.equations import CONFIG, C, L
from mezzo_drt.ops import grouped_cross_attention
from mezzo_drt.stack import DRT

B, N, M, H, D = 2, 6, 5, 3, 8
TOLERANCE = 1e-12


def limit_dense() -> Judgement:
    """Cross-attention to all chunks is dense, if each has the weight of its part of the softmax.

    A chunk's weight is the same for all its queries and heads, so there is one of each.
    """
    torch.manual_seed(0)
    q = _noise(B, N, 1, 1, D)
    k, v = _noise(B, N, L, 1, D), _noise(B, N, L, 1, D)
    logits = torch.einsum("bnhd,bslhd->bnsl", q[:, :, 0], k) * D**-0.5
    everything = torch.arange(N).expand(B, N, N)
    weights = logits.logsumexp(-1).softmax(-1)
    ours = grouped_cross_attention(q, k, v, everything, weights, softmax1=False)
    dense = logits.flatten(2).softmax(-1) @ v[:, :, :, 0].flatten(1, 2)
    statement = f"with R = N = {N} chunks the op is dense cross-attention over all their tokens"
    return equality(statement, ours[:, :, 0, 0], dense, TOLERANCE)


def softmax1_limit() -> Judgement:
    """The softmax off by one is a softmax over one more key of zeros, whose value is zero."""
    torch.manual_seed(0)
    q = _noise(B, N, M, H, D)
    k, v = _noise(B, N, L, H, D), _noise(B, N, L, H, D)
    indices = torch.stack([torch.randperm(N)[:3] for _ in range(B * N)]).view(B, N, 3)
    weights = _noise(B, N, 3).softmax(-1)
    ours = grouped_cross_attention(q, k, v, indices, weights, softmax1=True)
    k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (k, v))
    padded = grouped_cross_attention(q, k, v, indices, weights, softmax1=False)
    statement = "softmax off by one is the softmax over one more key and value of zeros"
    return equality(statement, ours, padded, TOLERANCE)


def nothing_to_read() -> Judgement:
    """Two chunks have nothing to read, so DRT is the plain stack of its weights, with landmarks."""
    torch.manual_seed(0)
    drt = _random(CONFIG.build(C))
    attention = AttentionConfig(CONFIG.head_dim, None, CONFIG.window_size, None, "olmo")
    block = MixerBlockConfig(attention, MLPConfig("swiglu", CONFIG.hidden), CONFIG.norm_eps)
    plain = BlocksConfig((block,) * CONFIG.num_layers).build(C).double().eval()
    for ours, theirs in zip(plain.blocks, (*drt.lower, *drt.upper), strict=True):
        names = {"mixer": "attention", "mixer_norm": "attention_norm"}
        for name in ("mixer", "mixer_norm", "mlp", "mlp_norm"):
            its_name = name if hasattr(theirs, name) else names[name]
            part, other = ours.get_submodule(name), theirs.get_submodule(its_name)
            part.load_state_dict(other.state_dict())
    x = _noise(B, 2 * L, C)
    landmark = drt.landmark.weight.expand(B, 1, C)
    with torch.no_grad():
        places, _ = plain(torch.cat([x[:, :L], landmark, x[:, L:], landmark], 1))
        ours, _ = drt(x)
    expected = torch.cat([places[:, :L], places[:, L + 1 : -1]], 1)
    statement = f"over two chunks DRT is the plain stack of its {CONFIG.num_layers} layers"
    return equality(statement, ours, expected, TOLERANCE)


def all_chunks() -> Judgement:
    """R beyond the number of chunks is R = N: nothing is read twice, and nothing is made up."""
    found = []
    for num_retrieved in (N, 5 * N):
        torch.manual_seed(0)
        stack = _random(replace(CONFIG, num_retrieved=num_retrieved).build(C))
        with torch.no_grad():
            found.append(stack(_noise(B, N * L, C))[0])
    few, many = found
    return equality(f"R = {5 * N} and R = {N} read the same of {N} chunks", many, few, TOLERANCE)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _random(stack: DRT) -> DRT:
    """Give a stack weights that are far from zero, in float64."""
    for module in stack.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    return stack.double().eval()


CHECKS = (
    Check("drt.check.limit_dense", limit_dense),
    Check("drt.check.all_chunks", all_chunks),
    Check("drt.check.softmax1_limit", softmax1_limit),
    Check("drt.check.nothing_to_read", nothing_to_read),
    decode_equals_prefill(
        "drt.check.decode_equals_prefill",
        LMConfig(vocab_size=64, d_model=C, stack=CONFIG),
        f"two lower and two upper layers, chunks of {L} tokens",
    ),
)
