"""What the parts of the tiled algorithm read and write.

A *tile* is S tokens in a row of m layers at once, each layer at its own place in the sequence; its
tensors are (m, S, B, C), position first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import LayerWeights


class Matrices(NamedTuple):
    """The weights of some layers in the dtype of the products; those of one input side by side."""

    qkv: Tensor
    """(n, 3C, C)."""
    o: Tensor
    """(n, C, C)."""
    up: Tensor
    """(n, F, C)."""
    down: Tensor
    """(n, C, F)."""
    n1: Tensor | None
    n2: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None

    @classmethod
    def of(cls, w: LayerWeights, dtype: torch.dtype) -> "Matrices":
        """Return copies of the weights, laid out for the products."""
        qkv = torch.cat([x.to(dtype) for x in (w.wq, w.wk, w.wv)], 1)
        o, up, down = (x.to(dtype).contiguous() for x in (w.wo, w.up, w.down))
        norms = (None if x is None else x.contiguous() for x in (w.n1, w.n2, w.q_norm, w.k_norm))
        return cls(qkv, o, up, down, *norms)

    def of_layers(self, first: int, end: int) -> "Matrices":
        """Return the weights of layers `first` to `end`."""
        return self.map(lambda w: w[first:end])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Matrices":
        """Return `change` of each weight that there is."""
        found: Any = [None if w is None else change(w) for w in self]
        return Matrices(*found)

    @property
    def kv(self) -> Tensor:
        """(m, 2C, C)."""
        return self.qkv[:, self.qkv.shape[2] :]


class Keys(NamedTuple):
    """The persistent pairs of the tokens before a tile, and where they are."""

    k: Tensor
    """(m, B, P + Tp, C)."""
    v: Tensor
    seen: Tensor | None
    """(B,) int64: pairs of earlier calls in each row, which come first; None for none."""
    first: int
    """Tokens of this call before the tile of the tile's first layer; S fewer for each next one."""

    def before(self, S: int) -> Tensor:
        """Return (m, B), the number of visible slots: those of all tokens before the tile."""
        m, B = self.k.shape[:2]
        own = self.first - S * torch.arange(m, device=self.k.device)
        return own[:, None].expand(m, B) + (0 if self.seen is None else self.seen)


class Attending(NamedTuple):
    """What the attention of a tile's steps reads and writes, all (m, S, B, C)."""

    q: Tensor
    kt: Tensor
    """Temporary keys; a token sees those of its own step up to itself."""
    vt: Tensor
    k: Tensor
    """Persistent keys, written step by step."""
    v: Tensor
    o: Tensor
    """Attention to the tokens before the tile, by `attend_earlier`; then also to leaves in it."""
    lse: Tensor
    """(m, S, B, H), its log-sum-exp."""


class Later(NamedTuple):
    """The queries of the tokens after a tile, with what their gradients need."""

    q: Tensor
    """(m, B, Tp, C): of all tokens, from the tile's first layer on."""
    do: Tensor
    lse: Tensor
    """(m, B, Tp, H)."""
    delta: Tensor
    begin: int
    """The first token after the tile of the tile's first layer; S fewer for each next layer."""
