"""The paper's equations beside what the stack computes: errors in float64 that only round.

What the stack's parts are given and give is watched from outside. The equations are written once
more, chunk by chunk.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim
from torch import Tensor, nn

from mezzo_drt.encoder import Memory
from mezzo_drt.ops import grouped_cross_attention
from mezzo_drt.retrieval import Reads
from mezzo_drt.stack import DRT, DRTConfig

C, D, L, R, CHUNKS = 24, 8, 4, 3, 9
ERROR = "error"
CONFIG = DRTConfig(
    num_layers=4,
    num_groups=2,
    chunk_size=L,
    num_retrieved=R,
    window_size=9,
    head_dim=D,
    hidden=32,
    num_encoder_layers=1,
)


class Watched(NamedTuple):
    """A forward of the stack: inputs and output of its parts, by their names."""

    stack: DRT
    inputs: dict[str, tuple[Any, ...]]
    outputs: dict[str, Any]


def watch(config: DRTConfig = CONFIG) -> Watched:
    """Run a stack with random weights over CHUNKS chunks of noise, and watch it."""
    torch.manual_seed(0)
    stack = config.build(C).double().eval()
    for module in stack.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    inputs, outputs = dict[str, tuple[Any, ...]](), dict[str, Any]()

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            inputs[name], outputs[name] = args, out

        return hook

    for name, module in stack.named_modules():
        module.register_forward_hook(keep(name))
    with torch.no_grad():
        stack(torch.randn(1, CHUNKS * L, C, dtype=torch.float64))
    return Watched(stack, inputs, outputs)


def reads_of(seen: Watched, layer: int) -> tuple[Memory, Reads]:
    """Return what an upper layer could read, and what it read."""
    return seen.inputs[f"upper.{layer}"][2:4]


def relevance_score(claim: Claim) -> Measurement:
    """Equation 1: compare each chunk's choice and weights with those of the bilinear form."""
    seen, errors = watch(), dict[str, float]()
    weight_l = _weight(seen.stack.encoder.wl)
    landmarks = seen.inputs["encoder.wl"][0][0]  # l, (N, C)
    for g in range(CONFIG.num_groups):
        weight_h = _weight(seen.stack.queries[g])
        h = seen.inputs[f"queries.{g}"][0][0]
        _, reads = reads_of(seen, g * len(seen.stack.upper) // CONFIG.num_groups)
        worst = 0.0
        for t in range(1, CHUNKS - 1):
            r = [float((weight_h @ h[t]) @ (weight_l @ landmarks[k])) for k in range(t)]
            r = [score / math.sqrt(C) for score in r]
            chosen = sorted(range(t), key=r.__getitem__, reverse=True)[:R]
            total = sum(math.exp(r[k]) for k in chosen)
            ours = {
                int(k): float(w)
                for k, w in zip(reads.indices[0, t + 1], reads.weights[0, t + 1], strict=True)
                if k >= 0
            }
            if ours.keys() != set(chosen):
                worst = math.inf
            else:
                worst = max(worst, *(abs(ours[k] - math.exp(r[k]) / total) for k in chosen))
        errors[f"chunks and weights of group {g + 1}"] = worst
    return errors_of(errors, "the chunks that each chunk reads, and their weights")


def gca_fusion(claim: Claim) -> Measurement:
    """Equation 2: compare what each chunk reads, and what follows, with sums over its chunks."""
    seen, errors = watch(), dict[str, float]()
    for i, layer in enumerate(seen.stack.upper):
        memory, reads = reads_of(seen, i)
        q = seen.outputs[f"upper.{i}.wq"].unflatten(1, (CHUNKS, L + 1))[0]
        expected = torch.zeros_like(q)
        for n in range(2, CHUNKS):
            for k, w in zip(reads.indices[0, n], reads.weights[0, n], strict=True):
                if k >= 0:
                    each = [
                        softmax1(q[n, :, head] @ memory.k[0, k, :, h].T / math.sqrt(D))
                        @ memory.v[0, k, :, h]
                        for h, head in enumerate(heads())
                    ]
                    expected[n] += w * torch.cat(each, -1)
        fused = seen.inputs[f"upper.{i}.wo"][0].unflatten(1, (CHUNKS, L + 1))[0]
        errors[f"layer {i + 1}, sum over chunks"] = error(fused, expected)
        h_and_o = seen.inputs[f"upper.{i}.cross_norm"][0] + seen.outputs[f"upper.{i}.wo"]
        normalized = seen.outputs[f"upper.{i}.mlp_norm"]
        scale = (h_and_o.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt()
        wanted = h_and_o * scale * layer.mlp_norm.weight.detach()
        errors[f"layer {i + 1}, Norm(H + O)"] = error(normalized, wanted)
    return errors_of(errors, "each upper layer's cross-attention and the norm behind it")


def gca_head(claim: Claim) -> Measurement:
    """Equation 3: compare a head of the op with its formula, and the keys of all upper layers."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, L + 1, 1, D, dtype=torch.float64)
    k, v = torch.randn(2, 1, 1, L, 1, D, dtype=torch.float64)
    index, one = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1)
    ours = grouped_cross_attention(q, k, v, index, one, softmax1=True)[0, 0, :, 0]
    logits = q[0, 0, :, 0] @ k[0, 0, :, 0].T / math.sqrt(D)
    errors = {"one head": error(ours, softmax1(logits) @ v[0, 0, :, 0])}
    seen = watch()
    first, _ = reads_of(seen, 0)
    for i in range(1, len(seen.stack.upper)):
        memory, _ = reads_of(seen, i)
        errors[f"keys and values of layer {i + 1} are those of layer 1"] = max(
            error(a, b) for a, b in zip(memory[1:], first[1:], strict=True)
        )
    return errors_of(errors, "a head of cross-attention, and what the upper layers share")


def softmax1(s: Tensor) -> Tensor:
    """Return the softmax off by one over the last axis."""
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True))


def _weight(linear: Any) -> Tensor:
    assert isinstance(linear, nn.Linear)
    return linear.weight.detach()


def heads() -> list[slice]:
    """Return where each head's channels are."""
    return [slice(a, a + D) for a in range(0, C, D)]


def error(ours: Tensor, expected: Tensor) -> float:
    """Return the error of a tensor relative to what is expected."""
    return float((ours - expected).norm() / expected.norm())


def errors_of(errors: dict[str, float], setting: str) -> Measurement:
    """Return errors as a measurement."""
    rows = {name: (value,) for name, value in errors.items()}
    where = f"{setting}; random weights in float64"
    return Measurement(entries(rows, (ERROR,)), (ERROR,), where, How.PAPER, unit=ERROR)
