"""What the steps of a tile read and write: fixed memory, which CUDA graphs need."""

from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending, Matrices


class ForwardBuffers(NamedTuple):
    """What the steps of a tile read and write, (n, S, B, C) with n layers."""

    stream: Tensor
    """(n + 1, S, B, C): layer l reads its inputs from l, and writes its outputs to l + 1.

    There the layer above has just used up the inputs at the same place of the tile, and finds its
    next ones.
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
    """What the steps of a tile read and write in reverse, (n, S, B, C) with n layers."""

    attending: Attending
    z: Tensor
    raw: Tensor
    """The persistent keys before their norm."""
    h: Tensor
    """The residual stream between attention and MLP, float32."""
    u: Tensor
    """(n, S, B, F), before the MLP's activation; then after it."""
    dk: Tensor
    """Float32, of the persistent keys; at first what comes from the tokens after the tile."""
    dv: Tensor
    dstream: Tensor
    """(n + 1, S, B, C) float32, the gradient of layer l's inputs at l, of its outputs at l + 1.

    The inputs are written after the steps: then the layer below finds them as its outputs'.
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
        (B, _, C), n, F = x.shape, weights.o.shape[0], weights.up.shape[1]
        H, acc = form.num_heads, accumulation_dtype(weights.o.dtype)

        def empty(channels: int = C, dtype: torch.dtype = weights.o.dtype) -> Tensor:
            return x.new_empty(n, S, B, channels, dtype=dtype)

        q, kt, vt, k, v, o = (empty() for _ in range(6))
        return cls(
            attending=Attending(q, kt, vt, k, v, o, empty(H, acc)),
            z=empty(dtype=x.dtype),
            raw=empty(),
            h=empty(dtype=acc),
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
