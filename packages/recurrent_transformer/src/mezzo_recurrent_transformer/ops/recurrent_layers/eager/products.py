"""Products with the weights of each layer, and what follows them.

Inputs are (m, s, B, K), weights (m, N, K).
"""

from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import (
    add_normed,
    gelu,
    gelu_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.products import product


def is_narrow(x: Tensor, form: Form) -> bool:
    """Return False: only as kernels there is another form of a leaf, for few channels."""
    return False


def product_partial(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Return partial sums (P, m, s, B, N) of `product`, whose sum over P is x Wᵀ.

    With `out` (m, s, B, N), a product in one part, as here, is written there, and None returned.
    """
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
    """Write h = base + scale * `product`, and h as it was rounded, normalized, into `out`.

    A norm needs whole rows, and a kernel's program has a part of one. So a kernel may write h times
    the norm's weights into `out`, and leave it to `product_gelu` to multiply each row by
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
        None: `out` is normalized, as always here. Or sums of squares (m, s B, P) in float32.
    """
    add_normed(base, product(x, weight)[None], scale, norm, form, h, out)
    return None


def product_gelu(
    x: Tensor, weight: Tensor, out: Tensor, squares: Tensor | None, form: Form
) -> None:
    """Write `gelu` of `product`, whose x and `squares` are from `product_add`."""
    assert squares is None
    gelu(product(x, weight), out)


def product_gelu_bwd(x: Tensor, weight: Tensor, u: Tensor, du: Tensor) -> None:
    """Write the gradient of u, from `product` as that of u Φ(u); and then u Φ(u) over u."""
    gelu_bwd(u, product(x, weight), du)
