"""What the parts of the tiled algorithm read and write, and products with the layers' weights.

A *tile* is S tokens in a row of m layers at once, each layer at its own place in the sequence; its
tensors are (m, S, B, C), position first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, LayerWeights


class Matrices(NamedTuple):
    """The weights of some layers in the dtype of the products; q, k and v have one matrix."""

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
        """Apply `change` to each weight that is not None."""
        found: Any = [None if w is None else change(w) for w in self]
        return Matrices(*found)

    @property
    def kv(self) -> Tensor:
        """(m, 2C, C)."""
        return self.qkv[:, self.qkv.shape[2] :]


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x Wᵀ of each layer: (m, ..., K) and (m, N, K) to (m, ..., N)."""
    rows = x.flatten(1, -2)
    if out is None:
        return torch.bmm(rows, weight.mT).unflatten(1, x.shape[1:-1])
    torch.bmm(rows, weight.mT, out=out.flatten(1, -2))
    return out


class Pairs(NamedTuple):
    """Keys and values of tokens, or their gradients."""

    k: Tensor
    v: Tensor


class Keys(NamedTuple):
    """The persistent pairs of the tokens before a tile, and where they are."""

    k: Tensor
    """(m, B, P + Tp, C)."""
    v: Tensor
    seen: Tensor | None
    """(B,) int64: pairs of earlier calls in each row, which come first; None for none."""
    first: int
    """Tokens of this call before the tile in its first layer; S fewer in each next layer."""

    def before(self, S: int) -> Tensor:
        """Return the number of visible slots (m, B): one for each token before the tile."""
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
    """Attention to the tokens before the tile, by `attend_earlier`; then to earlier leaves too."""
    lse: Tensor
    """(m, S, B, H), its log-sum-exp."""


class Later(NamedTuple):
    """The queries of tokens after a tile, with what their gradients need."""

    q: Tensor
    """(m, B, Tp, C): of all tokens of the tile's layers."""
    do: Tensor
    lse: Tensor
    """(m, B, Tp, H)."""
    delta: Tensor
    begin: int
    """The first token after the tile in its first layer; S less in each next layer."""


class ForwardBuffers(NamedTuple):
    """What the steps of a tile read and write, (n, S, B, C) with n layers.

    CUDA graphs need it at a fixed place.
    """

    stream: Tensor
    """(n + 1, S, B, C): layer l reads its inputs from l, and writes its outputs to l + 1.

    Layer l + 1 has already used its inputs at that place, and finds its next ones there.
    """
    attending: Attending

    @classmethod
    def of(cls, x: Tensor, weights: Matrices, S: int, form: Form) -> "ForwardBuffers":
        """Make buffers for inputs like x (B, T, C)."""
        (B, _, C), n = x.shape, weights.o.shape[0]
        acc = accumulation_dtype(weights.o.dtype)
        stream = x.new_empty(n + 1, S, B, C)
        q, kt, vt, k, v = (weights.o.new_empty(n, S, B, C) for _ in range(5))
        o = weights.o.new_empty(n, S, B, C, dtype=acc)
        lse = weights.o.new_empty(n, S, B, form.num_heads, dtype=acc)
        return cls(stream, Attending(q, kt, vt, k, v, o, lse))

    def of_layers(self, first: int, end: int) -> "ForwardBuffers":
        """Return the buffers of layers `first` to `end`."""
        chosen = slice(first, end)
        attending = Attending(*(t[chosen] for t in self.attending))
        return ForwardBuffers(self.stream[first : end + 1], attending)


class BackwardBuffers(NamedTuple):
    """What the steps of a tile read and write in reverse, (n, S, B, C) with n layers.

    Some of it is the memory of the same call's `ForwardBuffers`, which it no longer needs.
    """

    attending: Attending
    z: Tensor
    raw: Tensor
    """The persistent keys before their norm."""
    h: Tensor
    """The residual stream between attention and MLP, float32."""
    u: Tensor
    """(n, S, B, F), before the MLP's activation; then after it."""
    dk: Tensor
    """Float32, of the persistent keys; at first from the tokens after the tile alone."""
    dv: Tensor
    dstream: Tensor
    """(n + 1, S, B, C) float32, the gradient of layer l's inputs at l, of its outputs at l + 1.

    A layer's is written after the steps; the layer below then finds it as that of its outputs.
    """
    do: Tensor
    """Written, as all that follow: of the attention outputs."""
    delta: Tensor
    """(n, S, B, H) float32: do · o of each head."""
    dpair: Tensor
    """(n, S, B, 2C): of the products with Wk and Wv."""
    dnormed: Tensor
    """Of n1(z)."""
    dz_scaled: Tensor
    """r dz."""
    du: Tensor
    dhn: Tensor
    """Of n2(h)."""
    dh: Tensor
    """Float32."""
    dh_scaled: Tensor
    """r dh."""

    @classmethod
    def of(cls, x: Tensor, weights: Matrices, S: int, form: Form) -> "BackwardBuffers":
        """Make buffers for inputs like x (B, T, C)."""
        return cls.in_place_of(ForwardBuffers.of(x, weights, S, form), x, weights, form)

    @classmethod
    def in_place_of(
        cls, forward: ForwardBuffers, x: Tensor, weights: Matrices, form: Form
    ) -> "BackwardBuffers":
        """Make buffers that reuse the memory of a forward's."""
        (stream, (q, kt, vt, k, v, h, lse)), F = forward, weights.up.shape[1]
        n, S, B, C = q.shape
        H, acc = form.num_heads, accumulation_dtype(weights.o.dtype)

        def empty(channels: int = C, dtype: torch.dtype = weights.o.dtype) -> Tensor:
            return x.new_empty(n, S, B, channels, dtype=dtype)

        return cls(
            attending=Attending(q, kt, vt, k, v, empty(), lse),
            z=stream[1:],
            raw=empty(),
            h=h,
            u=empty(F),
            dk=empty(dtype=acc),
            dv=empty(dtype=acc),
            dstream=x.new_empty(n + 1, S, B, C, dtype=acc),
            do=empty(),
            delta=empty(H, acc),
            dpair=empty(2 * C),
            dnormed=empty(),
            dz_scaled=empty(),
            du=empty(F),
            dhn=empty(),
            dh=empty(dtype=acc),
            dh_scaled=empty(),
        )

    def of_layers(self, first: int, end: int) -> "BackwardBuffers":
        """Return the buffers of layers `first` to `end`."""
        chosen = slice(first, end)
        attending, *rest = self
        found: list[Tensor] = [t[chosen] for t in rest]
        return BackwardBuffers(Attending(*[t[chosen] for t in attending]), *found)._replace(
            dstream=self.dstream[first : end + 1]
        )

    def of_step(self, rows: slice) -> "BackwardBuffers":
        """Return the buffers of a step's tokens."""
        attending, *rest = self
        found: list[Tensor] = [t[:, rows] for t in rest]
        return BackwardBuffers(Attending(*[t[:, rows] for t in attending]), *found)
