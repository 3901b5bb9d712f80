"""The paper's equations beside what DRT's parts compute: errors in float64 that only round."""

import math

import torch
from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim
from torch import Tensor

from mezzo_drt.ops import grouped_cross_attention
from mezzo_drt.retrieval import Reads, retrieve
from mezzo_drt.stack import DRTConfig

N, L, R, H, D, C = 9, 4, 3, 3, 8, 24  # N chunks
ERROR = "error"


def relevance_score(claim: Claim) -> Measurement:
    """Equation 1: compare each chunk's choice and weights with those of the bilinear form."""
    torch.manual_seed(0)
    h, landmarks, weight_h, weight_l = _noise(N, C), _noise(N, C), _noise(C, C), _noise(C, C)
    reads = _retrieve(h @ weight_h.T, landmarks @ weight_l.T)
    r = h @ weight_h.T @ weight_l @ landmarks.T / math.sqrt(C)
    expected = torch.zeros_like(r)
    for t in range(1, N):
        best = r[t, :t].topk(min(R, t))
        expected[t, best.indices] = best.values.softmax(0)
    ours = torch.zeros_like(r).scatter_add(1, reads.indices[0].clamp(min=0), reads.weights[0])
    return _errors({"chunks and their weights": _error(ours, expected)})


def gca_fusion(claim: Claim) -> Measurement:
    """Equation 2: compare what each chunk reads with a sum over its chunks."""
    torch.manual_seed(0)
    q, k, v = _noise(N, L + 1, H, D), _noise(N, L, H, D), _noise(N, L, H, D)
    reads = _retrieve(_noise(N, C), _noise(N, C))
    fused = grouped_cross_attention(q[None], k[None], v[None], *reads, softmax1=True)[0]
    expected = torch.zeros_like(q)
    for n in range(N):
        for chunk, weight in zip(reads.indices[0, n].tolist(), reads.weights[0, n], strict=True):
            if chunk >= 0:
                logits = torch.einsum("mhd,lhd->hml", q[n], k[chunk]) / math.sqrt(D)
                expected[n] += weight * torch.einsum("hml,lhd->mhd", _softmax1(logits), v[chunk])
    return _errors({"sum over chunks": _error(fused, expected)})


def gca_head(claim: Claim) -> Measurement:
    """Equation 3: compare a head of the op with its formula, and the keys of all upper layers."""
    torch.manual_seed(0)
    q, k, v = _noise(1, 1, L, 1, D), _noise(1, 1, L, 1, D), _noise(1, 1, L, 1, D)
    index, one = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1)
    ours = grouped_cross_attention(q, k, v, index, one, softmax1=True)[0, 0, :, 0]
    logits = q[0, 0, :, 0] @ k[0, 0, :, 0].T / math.sqrt(D)
    errors = {"one head": _error(ours, _softmax1(logits) @ v[0, 0, :, 0])}
    config = DRTConfig(
        num_layers=6, chunk_size=L, num_retrieved=R, head_dim=D, num_encoder_layers=1
    )
    stack, memories = config.build(C).double().eval(), []
    for layer in stack.upper:
        layer.register_forward_hook(lambda _, inputs, out: memories.append(inputs[2]))
    with torch.no_grad():
        stack(_noise(1, N * L, C))
    for i, memory in enumerate(memories[1:], 2):
        name = f"keys and values of upper layer {i} are those of the first"
        pairs = zip(memory[1:], memories[0][1:], strict=True)
        errors[name] = max(_error(a, b) for a, b in pairs)
    return _errors(errors)


def _retrieve(queries: Tensor, keys: Tensor) -> Reads:
    """Let each chunk choose R of those before it."""
    hi = torch.arange(N)[None]
    return retrieve(queries[None], keys[None], hi * 0, hi, R, noise=False)


def _softmax1(s: Tensor) -> Tensor:
    """Return the softmax off by one over the last axis."""
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True))


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def _errors(errors: dict[str, float]) -> Measurement:
    rows = {name: (value,) for name, value in errors.items()}
    return Measurement(entries(rows, (ERROR,)), (ERROR,), "in float64", How.PAPER, unit=ERROR)
