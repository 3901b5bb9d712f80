"""An upper layer: window attention, then grouped cross-attention to what the chunk retrieved."""

from typing import Literal

from mezzo_core.nn.attention import Attention, AttentionConfig, KVCache
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.mlp import MLPConfig
from torch import Tensor, nn

from mezzo_drt.encoder import num_weights
from mezzo_drt.memory.chunks import Memory
from mezzo_drt.ops.grouped_cross_attention import Readers, grouped_cross_attention
from mezzo_drt.places import Places
from mezzo_drt.retrieval import Reads

Residual = Literal["released", "text"]


class UpperLayer(nn.Module):
    """A layer with three norms: window attention, cross-attention, MLP.

    u   = h + SelfAttn(n1(h))
    O   = Wo Σ_j w_j Softmax1(Q(n2(u)) K(C_j)ᵀ / sqrt(D)) V(C_j)
    out = u + FFN(n3(u + O))                    residual "released": O reaches the FFN only
    out = (u + O) + FFN(n3(u + O))              residual "text"
    """

    def __init__(
        self,
        d_model: int,
        attention: AttentionConfig,
        mlp: MLPConfig,
        norm_eps: float,
        residual: Residual,
        softmax1: bool,
    ) -> None:
        super().__init__()
        self.residual = residual
        self.softmax1 = softmax1
        self.attention_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention: Attention = attention.build(d_model)
        self.cross_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.wq = Linear(d_model, d_model, bias=False)
        self.wo = Linear(d_model, d_model, bias=False)
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = mlp.build(d_model)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        weights: Tensor,
        places: Places,
        readers: Readers | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Map (B, P, C) to (B, P, C).

        Each tensor that needs a gradient is an argument of its own: reentrant checkpoints look into
        no named tuples.

        Args:
            x: the residual stream at all places of the call.
            cache: of the window attention, before the call.
            k: the field of `Memory`: the chunks that may be read.
            v: likewise.
            indices: the field of `Reads`: what each of the N chunks of the grid reads.
            weights: likewise.
            places: of the call.
            readers: who reads each chunk, if layers share these lists.
        """
        mixed, cache = self.attention(
            self.attention_norm(x), cache, cu_seqlens=places.cu_seqlens, lengths=places.lengths
        )
        u = x + mixed
        q = places.to_chunks(self.wq(self.cross_norm(u)))
        read = self._read(q, k, v, Reads(indices, weights), readers)
        return self._finish(u, places.from_chunks(read)), cache

    def step(self, x: Tensor, cache: KVCache, memory: Memory, reads: Reads) -> Tensor:
        """Run one place of every row, (B, 1, C), overwriting the cache; `reads` are (B, 1, R)."""
        u = x + self.attention.step(self.attention_norm(x), cache)
        q = self.wq(self.cross_norm(u))[:, None]
        return self._finish(u, self._read(q, memory.k, memory.v, reads)[:, 0])

    def flops(self, num_tokens: int, chunk_size: int, num_retrieved: int) -> float:
        """Return the FLOPs of a sequence, in chunks of L that read up to R chunks each."""
        L, R = chunk_size, num_retrieved
        N, rest = divmod(num_tokens, L)
        places, older = num_tokens + N, max(N - 1, 0)
        few = min(older, R)  # a chunk reads up to R chunks, but not the one just before it
        reads = (L + 1) * (few * (few - 1) // 2 + R * (older - few)) + rest * few
        weights = num_weights([self.wq, self.wo, self.mlp])
        attention = self.attention.flops_per_token(places) * places
        return attention + 2 * weights * places + 4 * self.wq.in_features * L * reads

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, reads: Reads, readers: Readers | None = None
    ) -> Tensor:
        """Attend to the retrieved chunks, (B, N, M, C) to (B, N, M, C)."""
        if k.shape[1] == 0:  # no chunk is complete
            return q.new_zeros(q.shape)
        heads = q.unflatten(-1, (-1, k.shape[-1])).to(k.dtype)
        out = grouped_cross_attention(heads, k, v, *reads, softmax1=self.softmax1, readers=readers)
        return out.flatten(-2).to(q.dtype)

    def _finish(self, u: Tensor, read: Tensor) -> Tensor:
        mixed = u + self.wo(read)
        return (u if self.residual == "released" else mixed) + self.mlp(self.mlp_norm(mixed))
