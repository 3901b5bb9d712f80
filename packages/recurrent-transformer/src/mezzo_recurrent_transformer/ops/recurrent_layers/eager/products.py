"""Products with the weights of each layer, and what follows them.

Inputs are (m, s, B, K), weights (m, N, K).
"""

from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import gelu, gelu_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.products import product


def product_partial(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Return partial sums (P, m, s, B, N) of `product`, whose sum over P is x Wᵀ.

    With `out` (m, s, B, N), a product in one part, as here, is written there, and None returned.
    """
    found = product(x, weight, out)
    return found[None] if out is None else None


def product_gelu(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write `gelu` of `product`."""
    gelu(product(x, weight), out)


def product_gelu_bwd(x: Tensor, weight: Tensor, u: Tensor, du: Tensor) -> None:
    """Write the gradient of u, from `product` as that of u Φ(u); and then u Φ(u) over u."""
    gelu_bwd(u, product(x, weight), du)
