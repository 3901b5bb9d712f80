"""What the parts of the tiled algorithm read and write.

A *tile* is S tokens in a row of m layers at once, each layer at its own place in the sequence; its
tensors are (m, S, B, C), position first.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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


class StepGradients(NamedTuple):
    """What the backward of one step's tokens reads and writes, besides attention; (m, b, B, C)."""

    dpair: Tensor
    """(m, b, B, 2C): of Wk n and Wv n."""
    above: Tensor
    """Float32: of the outputs, from the layer above."""
    z: Tensor
    """The outputs."""
    h: Tensor
    """Float32: the residual stream between attention and MLP."""
    u: Tensor
    """(m, b, B, F): before the MLP's activation; then after it."""
    dnormed: Tensor
    """Written, as all that follow: of n1(z)."""
    dz_scaled: Tensor
    """r dz."""
    du: Tensor
    """(m, b, B, F)."""
    dhn: Tensor
    """Of n2(h)."""
    dh: Tensor
    """Float32."""
    dh_scaled: Tensor
    """r dh."""
    do: Tensor
    """Of the attention outputs."""
