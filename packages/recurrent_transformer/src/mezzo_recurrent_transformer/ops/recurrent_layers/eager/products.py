"""Products with the weights of each layer, and what follows them.

Inputs are (m, s, B, K), weights (m, N, K).
"""

from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import add_normed, gelu, gelu_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import product


def product_partial(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
    """See `Parts.product_partial`."""
    found = product(x, weight, out)
    return found[None] if out is None else None


def product_add(
    x: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: float,
    norm: Tensor | None,
    form: Form,
    h: Tensor,
    out: Tensor,
) -> Tensor | None:
    """See `Parts.product_add`."""
    add_normed(base, product(x, weight)[None], scale, norm, form, h, out)
    return None


def product_gelu(
    x: Tensor, weight: Tensor, out: Tensor, squares: Tensor | None, form: Form
) -> None:
    """See `Parts.product_gelu`."""
    assert squares is None
    gelu(product(x, weight), out)


def product_gelu_bwd(x: Tensor, weight: Tensor, u: Tensor, du: Tensor) -> None:
    """See `Parts.product_gelu_bwd`."""
    gelu_bwd(u, product(x, weight), du)
