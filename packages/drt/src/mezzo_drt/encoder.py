"""The chunk encoder: turns the lower layers' outputs of a chunk into keys and values to read."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.ops.attention import attention
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import apply_rope, rope_angles
from torch import Tensor, nn

from mezzo_drt.memory.chunks import Memory

NORM_EPS = 1e-6
ROPE_BASE = 10_000.0


class ChunkEncoder(nn.Module):
    """Bidirectional layers over each chunk alone, its landmark included (section 3.1).

    The output at the landmark becomes the chunk's key for retrieval; the outputs at tokens become
    their keys and values.
    """

    def __init__(
        self,
        d_model: int,
        head_dim: int,
        num_layers: int,
        hidden: int | None,
        key: str,
        norm_eps: float,
    ) -> None:
        """Create the layers.

        Args:
            d_model: C.
            head_dim: D.
            num_layers: 0 keeps only the norm of the inputs and the last norm.
            hidden: width of the MLPs, see `MLPConfig`.
            key: the key for retrieval. "projected" is Wl l of the landmark's output l, "landmark"
                is l, "mean" the normalized mean of the chunk's lower outputs, without a gradient.
            norm_eps: epsilon of the norm of the inputs; all other norms have NORM_EPS.
        """
        super().__init__()
        self.head_dim = head_dim
        self.key = key
        self.input_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, head_dim, hidden) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.wk = Linear(d_model, d_model, bias=False)
        self.wv = Linear(d_model, d_model, bias=False)
        self.wl = Linear(d_model, d_model, bias=False) if key == "projected" else None

    def forward(self, chunks: Tensor) -> Memory:
        """Encode chunks, (B, N, L + 1, C), each alone."""
        B, N, M = chunks.shape[:3]
        x = self.input_norm(chunks.flatten(0, 1))
        angles = rope_angles(
            torch.arange(M, device=x.device),
            self.head_dim,
            ROPE_BASE,
            dtype=accumulation_dtype(x.dtype),
        )
        for layer in self.layers:
            x = layer(x, *angles)
        x = self.norm(x).unflatten(0, (B, N))
        tokens, landmark = x[:, :, :-1], x[:, :, -1]
        k, v = (w(tokens).unflatten(-1, (-1, self.head_dim)) for w in (self.wk, self.wv))
        if self.key == "mean":
            mean = chunks[:, :, :-1].detach().mean(2)
            return Memory(F.rms_norm(mean, mean.shape[-1:], eps=NORM_EPS), k, v)
        return Memory(landmark if self.wl is None else self.wl(landmark), k, v)

    def flops_per_chunk(self, chunk_size: int) -> int:
        """Return the FLOPs of a complete chunk of L tokens."""
        L, C = chunk_size, self.wk.in_features
        weights = (L + 1) * num_weights([self.layers]) + L * num_weights([self.wk, self.wv])
        landmark = 0 if self.wl is None else num_weights([self.wl])
        return 2 * (weights + landmark) + len(self.layers) * 4 * C * (L + 1) ** 2


class EncoderLayer(nn.Module):
    """`x + attention(norm x)`, bidirectional and with RoPE, then `x + mlp(norm x)`."""

    def __init__(self, d_model: int, head_dim: int, hidden: int | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.wq = Linear(d_model, d_model, bias=False)
        self.wk = Linear(d_model, d_model, bias=False)
        self.wv = Linear(d_model, d_model, bias=False)
        self.wo = Linear(d_model, d_model, bias=False)
        self.mlp_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.mlp = MLPConfig("swiglu", hidden).build(d_model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, M, C) to (B, M, C)."""
        z = self.attention_norm(x)
        q, k, v = (w(z).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        x = x + self.wo(attention(q, k, v, causal=False).out.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def num_weights(modules: Iterable[nn.Module]) -> int:
    """Return the number of weights of the matrices; norms are not counted."""
    parts = [part for module in modules for part in module.modules()]
    return sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
