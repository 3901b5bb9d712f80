"""The memory in which a tile's steps run, and the parts that they consist of.

A tile has hundreds of small launches, for which the host would be too slow one by one. They depend
neither on the length of the sequence nor on the place of the tile. So on a GPU they are captured
once, and replayed for every tile. A graph reads and writes fixed memory: a workspace's buffers and
its copy of the weights. Such workspaces are kept, by what they were made for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from mezzo_core.ops.precision import product_settings
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, Past
from mezzo_recurrent_transformer.ops.recurrent_layers.graphs import Graphs, Latest
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    BackwardBuffers,
    ForwardBuffers,
    Keys,
    Later,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile

Buffers = TypeVar("Buffers", ForwardBuffers, BackwardBuffers)


class Call(NamedTuple):
    """What a call computes with, besides its inputs."""

    weights: Matrices
    slopes: Tensor
    """(H,) of ALiBi."""
    past: Past | None
    form: Form
    parts: "Parts"

    def in_blocks_of(self, T: int) -> "Call":
        """Return the call with blocks of T tokens at most."""
        return self._replace(form=self.form._replace(block_size=min(self.form.block_size, T)))


@dataclass(frozen=True)
class Workspace(Generic[Buffers]):
    """Buffers for a tile of some layers, and what its steps compute with."""

    buffers: Buffers
    w: Matrices
    slopes: Tensor
    """(H,) of ALiBi."""
    form: Form
    parts: "Parts"
    graphs: Graphs | None = None
    """Of the steps, by their layers; None if the steps run without graphs."""

    def of_layers(self, first: int, end: int) -> "Workspace[Buffers]":
        """Return the workspace of layers `first` to `end`."""
        buffers, w = self.buffers.of_layers(first, end), self.w.of_layers(first, end)
        return replace(self, buffers=buffers, w=w)

    def run(self, steps: Callable[["Workspace[Buffers]"], None], tile: Tile) -> None:
        """Run all steps of a tile, in the workspace of its layers."""
        layers = tile.first, tile.end
        if self.graphs is None:
            steps(self.of_layers(*layers))
        else:
            self.graphs.run(layers, lambda: steps(self.of_layers(*layers)))


ForwardWork = Workspace[ForwardBuffers]
BackwardWork = Workspace[BackwardBuffers]

_kept = Latest()


def workspace_for(kind: type[Buffers], x: Tensor, S: int, call: Call) -> Workspace[Buffers]:
    """Return a workspace with a kind of buffers for inputs like x (B, T, C), in tiles of S tokens.

    It is a new one on a CPU, and while the caller captures a graph of its own.
    """
    form, parts = call.form, call.parts
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        buffers = kind.of(x, call.weights, S, form)
        return Workspace(buffers, call.weights, call.slopes, form, parts)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    shapes = tuple((w.shape, w.dtype) for w in call.weights if w is not None)
    given = x.shape[0], x.dtype, x.device, call.slopes.dtype, shapes
    key = (given, stream, S, form, parts, product_settings())
    work: Any = _kept.take((ForwardBuffers, key), lambda: forward_workspace(x, S, call))
    if kind is BackwardBuffers:
        of_forward: ForwardWork = work
        work = _kept.take((kind, key), lambda: backward_workspace(x, of_forward))
    for own, new in zip((*work.w, work.slopes), (*call.weights, call.slopes), strict=True):
        if own is not None and new is not None:
            own.copy_(new)
    return work


def forward_workspace(x: Tensor, S: int, call: Call) -> ForwardWork:
    """Return a workspace for later calls too, with memory for weights."""
    # Calls outside of inference mode could not overwrite tensors made in it.
    with torch.inference_mode(False):
        weights, slopes = call.weights.map(torch.empty_like), torch.empty_like(call.slopes)
        buffers = ForwardBuffers.of(x, weights, S, call.form)
        return Workspace(buffers, weights, slopes, call.form, call.parts, Graphs())


def backward_workspace(x: Tensor, forward: ForwardWork) -> BackwardWork:
    """Return a workspace that reuses the memory of a forward's, which is done by then."""
    with torch.inference_mode(False):
        buffers = BackwardBuffers.in_place_of(forward.buffers, x, forward.w, forward.form)
        w, slopes, form, parts = forward.w, forward.slopes, forward.form, forward.parts
        return Workspace(buffers, w, slopes, form, parts, Graphs())


class Parts(Protocol):
    """The parts of the tiled algorithm: `eager` and `triton` have a function for each.

    There are m layers, and rows (m, s, B, C) of s tokens. Weights of products are (m, N, K), those
    of norms (m, C). Tensors of a workspace are as `ForwardBuffers` and `BackwardBuffers` say.
    """

    # Rows alone.

    def normed(self, x: Tensor, weight: Tensor | None, form: Form, out: Tensor) -> None:
        """Normalize rows."""

    def normed_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        form: Form,
        base: Tensor | None,
        scale: float,
        dx: Tensor | None,
        scaled: Tensor | None,
        partial: Tensor | None = None,
    ) -> None:
        """Write dx = base + the gradient of a norm's input, and `scaled` = scale * dx.

        Args:
            dy: (m, s, B, C), the gradient of the norm's output; written first, if `partial` is
                given.
            x: likewise, its input.
            weight: (m, C).
            form: the options.
            base: likewise, what is added; None for nothing.
            scale: of `scaled`.
            dx: written, if given.
            scaled: written, if given; may be dy.
            partial: (P, m, s, B, C), of `product_partial`: their sum is dy.
        """

    def add_norm_weight_grad(self, dy: Tensor, x: Tensor, form: Form, total: Tensor) -> None:
        """Add the gradient of a norm's weight, summed over all rows, to `total` (m, C)."""

    def add_normed(
        self,
        x: Tensor,
        y: Tensor,
        scale: float,
        weight: Tensor | None,
        form: Form,
        h: Tensor,
        out: Tensor,
    ) -> None:
        """Write h = x + scale * (the sum of y), and h as it was rounded, normalized, into `out`.

        y is (P, m, s, B, C), of `product_partial`.
        """

    def split_pair(
        self, kv: Tensor, weight: Tensor | None, form: Form, k: Tensor, v: Tensor
    ) -> None:
        """Split Wk n and Wv n (m, s, B, 2C) into normalized keys and values."""

    def head_products(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write the sum of a * b (m, s, B, C) over each head, (m, s, B, H) in float32."""

    # Products, with what follows them.

    def product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x Wᵀ of a step's tokens (m, s, B, K), (m, s, B, N), or write it into `out`."""

    def product_partial(
        self, x: Tensor, weight: Tensor, out: Tensor | None = None
    ) -> Tensor | None:
        """Return partial sums (P, m, s, B, N) of `product`, whose sum over P is x Wᵀ.

        With `out` (m, s, B, N), a product in one part is written there, and None returned.
        """

    def product_add(
        self,
        x: Tensor,
        weight: Tensor,
        base: Tensor,
        scale: float,
        norm: Tensor | None,
        form: Form,
        h: Tensor,
        out: Tensor,
    ) -> Tensor | None:
        """Write h = base + scale * `product`, and h as it was rounded, normalized, into `out`.

        A norm needs whole rows, and a kernel's program has a part of one. So a kernel may write h
        times the norm's weights into `out`, and leave it to `product_gelu` to multiply each row by
        1 / sqrt(its mean square + eps). Then it returns the sums of squares of the rows' P parts.

        Args:
            x: (m, s, B, K).
            weight: (m, C, K).
            base: (m, s, B, C), as all that follow: what the product is added to.
            scale: of the product.
            norm: the norm's weights (m, C).
            form: the options.
            h: written.
            out: written.

        Returns:
            None: `out` is normalized. Or sums of squares (m, s B, P) in float32.
        """

    def product_gelu(
        self, x: Tensor, weight: Tensor, out: Tensor, squares: Tensor | None, form: Form
    ) -> None:
        """Write u Φ(u) of u = `product`, whose x and `squares` are from `product_add`."""

    def product_gelu_bwd(self, x: Tensor, weight: Tensor, u: Tensor, du: Tensor) -> None:
        """Write du from `product`, the gradient of u Φ(u); then write u Φ(u) over u."""

    # The attention of a tile's steps.

    def attend_step(self, work: ForwardWork, kv: Tensor | None, step: int, out: Tensor) -> None:
        """Write the attention output (m, b, B, C) of one step's tokens, [step b, (step + 1) b).

        Before that, the persistent pairs of the step before are stored in the tile: they are the
        products kv (m, b, B, 2C), whose keys are still to be normalized. None in a leaf's first
        step.
        """

    def attend_leaves(self, work: ForwardWork, begin: int, size: int) -> None:
        """Attend from `size` tokens from `begin` on to the persistent pairs of as many before them.

        It overwrites `o` and `lse`, their attention so far.
        """

    def pairs_step_bwd(self, work: BackwardWork, step: int) -> None:
        """Finish the gradients of one step's persistent pairs, and go back through the keys' norm.

        It reads `do` of the tile's later steps and `delta` of those after the next one; `delta` of
        the next step, if that is in the same leaf, it writes. `dk` and `dv` hold the gradients from
        tokens after the leaf. Those from the leaf's later steps are added to `dk`; `dv` stays, as
        nobody reads it again. `dpair` is written.
        """

    def leaves_bwd(self, work: BackwardWork, begin: int, size: int) -> None:
        """Add what the `size` tokens from `begin` on give to dk and dv of as many before them."""

    def narrow_leaf(self, work: ForwardWork, leaf: range) -> bool:
        """Run all steps of a leaf at once, where that is possible; return whether it was."""

    def narrow_leaf_bwd(self, work: BackwardWork, leaf: range) -> bool:
        """Run all steps of a leaf backwards at once, likewise."""

    # The attention of a whole tile.

    def attend_earlier(self, work: ForwardWork, keys: Keys) -> None:
        """Attend from a tile's queries to all tokens before the tile; write `o` and `lse`.

        With nothing to see they are 0 and -inf.
        """

    def attend_tile(self, work: BackwardWork, keys: Keys) -> None:
        """Write the attention output `o` of a whole tile, and `lse`.

        The persistent pairs of the tile are all known: this is for the backward.
        """

    def attend_tile_bwd(self, work: BackwardWork, keys: Keys, dqkv: Tensor) -> None:
        """Write the gradients (m, S, B, 3C) of a tile's queries and temporary pairs.

        `attend_tile` came before; `do` and `delta` are known.
        """

    def pairs_bwd(self, work: BackwardWork, later: Later) -> None:
        """Write what the tokens after a tile give to `dk` and `dv` of its persistent pairs.

        They are 0 if no tokens come after the tile.
        """
