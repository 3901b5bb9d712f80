"""Products with the weights of each layer, and what follows them.

Inputs are (m, s, B, K), weights (m, N, K).
"""

from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import gelu, gelu_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.products import product


def product_rows(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x Wᵀ of each layer, (m, s, B, N)."""
    return product(x, weight, out)


def product_partial(x: Tensor, weight: Tensor) -> Tensor:
    """Return (P, m, s, B, N), whose sum over P is `product_rows`; here P is 1."""
    return product(x, weight)[None]


def product_gelu(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write `gelu` of `product_rows`."""
    gelu(product(x, weight), out)


def product_gelu_bwd(x: Tensor, weight: Tensor, u: Tensor, du: Tensor) -> None:
    """Write the gradient of u, from `product_rows` as that of u Φ(u); and then u Φ(u) over u."""
    gelu_bwd(u, product(x, weight), du)
