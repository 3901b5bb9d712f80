"""The arguments of a stack of recurrent layers: its options, its weights, and its past."""

from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

Norm = Literal["rms", "layer", "none"]


class LayerWeights(NamedTuple):
    """The weights of n layers of one size, stacked. Norm weights are None if `Form.norm` is "none".

    C is the model width, F the MLP's hidden width.
    """

    wq: Tensor
    """(n, C, C)."""
    wk: Tensor
    """(n, C, C)."""
    wv: Tensor
    """(n, C, C)."""
    wo: Tensor
    """(n, C, C)."""
    up: Tensor
    """(n, F, C)."""
    down: Tensor
    """(n, C, F)."""
    n1: Tensor | None = None
    """(n, C): norm before attention, and before the persistent pair."""
    n2: Tensor | None = None
    """(n, C): norm before the MLP."""
    q_norm: Tensor | None = None
    """(n, C): norm of all heads' queries together."""
    k_norm: Tensor | None = None
    """(n, C): norm of all heads' keys together, temporary and persistent."""

    def of_layer(self, i: int) -> "LayerWeights":
        """Return the weights of one layer, without the axis n."""
        found: Any = [None if w is None else w[i] for w in self]
        return LayerWeights(*found)


class Past(NamedTuple):
    """The persistent pairs of the tokens so far: what later tokens attend to.

    Inside the op the heads lie side by side, (n, B, S, C).
    """

    k: Float[Tensor, "n B S H D"]
    """Keys. Token p of a row is in slot p; slots beyond a row's newest token hold anything."""
    v: Float[Tensor, "n B S H D"]
    """Values, in the same slots."""
    lengths: Int[Tensor, " B"]
    """int64, the number of tokens that each row has had."""


class Form(NamedTuple):
    """The options of the layers."""

    num_heads: int
    """H; heads have width D = C / H."""
    residual_scale: float
    """r: attention and MLP are multiplied by it before they are added to the residual stream."""
    norm: Norm
    """Kind of all four norms. "none" leaves all of them out."""
    eps: float
    """Epsilon of the norms."""
    persistent_norm: bool
    """Whether n1 is applied to z before the persistent pair; False is the paper's ablation."""
    block_size: int
    """b: tokens of one block attend to each other's temporary pairs; 1 is the paper's model."""

    def of_pairs(self) -> "Form":
        """Return the form for the norm before the persistent pair."""
        return self if self.persistent_norm else self._replace(norm="none")
