"""The public op `recurrent_layers`: checks its arguments and chooses an implementation."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_counts, check_lengths, check_number, check_size
from mezzo_core.ops.impl import resolve_impl
from mezzo_core.ops.packed import check_borders, check_cu_seqlens
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype, autocast_dtype
from mezzo_core.ops.shapes import Shapes, check_one_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, LayerWeights, Norm, Past
from mezzo_recurrent_transformer.ops.recurrent_layers.op import differentiable_recurrent_layers
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.reference import recurrent_layers_reference

OP = "recurrent_layers"
RecurrentImpl = Literal["auto", "reference", "eager", "triton"]
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INPUT, _SLOPES = Shapes(x="B T C", filled="C"), Shapes(alibi_slopes="H")
_WEIGHTS = Shapes(
    **dict.fromkeys(("wq", "wk", "wv", "wo"), "n C C"),
    up="n F C",
    down="n C F",
    **dict.fromkeys(("n1", "n2", "q_norm", "k_norm"), "n C | None"),
    filled="n",
)
_PAST = Shapes(k="n B S H D", v="n B S H D", lengths="int64: B")


class RecurrentOutput(NamedTuple):
    """What `recurrent_layers` returns."""

    z: Float[Tensor, "B T C"]
    """The output of the last layer, in the dtype of x."""
    past: Past | None
    """With T slots more than the given one; None if none was given."""


def recurrent_layers(
    x: Float[Tensor, "B T C"],
    weights: LayerWeights,
    *,
    num_heads: int,
    residual_scale: float = 1.0,
    norm: Norm = "rms",
    eps: float = 1e-5,
    persistent_norm: bool = True,
    block_size: int = 1,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    past: Past | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    impl: RecurrentImpl = "auto",
) -> RecurrentOutput:
    """Run n layers of a Recurrent Transformer at once, as a wavefront along the sequence.

    `recurrent_layer_reference` is the definition of one layer (section "The Recurrent Transformer
    layer"). Differentiable in x, in all weights, and in the keys and values of `past`, also through
    the `past` that is returned; there is no double backward. For the backward only the inputs and
    outputs of the layers are kept.

    Products are computed in the dtype of the weights, or in autocast's, which leaves float64 alone;
    the residual stream, norms, softmax and sums in float32 (float64 for float64). Repeated runs are
    equal to the bit. On a GPU, CUDA graphs of the steps, and for small batches of whole calls, keep
    the memory that they need.

    Args:
        x: (B, T, C), the input of the first layer.
        weights: of all layers, stacked.
        num_heads: H; heads have width D = C / H, and logits are scaled by D^-1/2.
        residual_scale: r, the factor of attention and MLP in the residual stream.
        norm: "rms", "layer" (with weight, without bias), or "none".
        eps: epsilon of the norms.
        persistent_norm: whether the persistent pair is made from n1(z), or from z itself.
        block_size: b, see `Form.block_size`.
        alibi_slopes: (H,), ALiBi adds -slope * distance to the logits; None for none.
        past: the pairs of earlier tokens; needs `block_size` 1. Its lengths are checked on the CPU
            only.
        cu_seqlens: (S + 1,) borders of sequences packed in one row (B = 1), from 0 to T, never
            decreasing. On a GPU the call waits for it, to run sequences side by side.
        lengths: (B,) int64, the real tokens of each row; the rest is padding on the right, whose
            outputs are meaningless. Needs a past.
        impl: "reference" (one token after another, by autograd), "eager" (tiles, PyTorch),
            "triton" (tiles, kernels; not in float64; heads 16, 32, 64 or 128 wide, or an even
            number of width 8), or "auto".

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, an option, `cu_seqlens`, `lengths` or `impl` is wrong.
    """
    form = _checked_form(x, num_heads, residual_scale, norm, eps, persistent_norm, block_size)
    weights = _checked_weights(weights, x, norm)
    dtype = weights.wq.dtype
    if dtype != torch.float64:  # which autocast leaves as it is
        dtype = autocast_dtype(x.device) or dtype
    slopes = _checked_slopes(alibi_slopes, x, num_heads, accumulation_dtype(dtype))
    _check_past(past, x, weights, form)
    if cu_seqlens is not None:
        if past is not None:
            raise ValueError(f"{OP}: cu_seqlens packs sequences that begin here: past must be None")
        check_cu_seqlens(OP, cu_seqlens, x)
        check_borders(OP, cu_seqlens, x.shape[1])
    if lengths is not None:
        if past is None:
            raise ValueError(f"{OP}: lengths needs a past")
        check_lengths(OP, lengths, x)
        x = without_padding(x, lengths)
    chosen = _resolve(impl, x, dtype, num_heads)
    if chosen == "reference":
        sequences = [x] if cu_seqlens is None else x.split(cu_seqlens.diff().tolist(), 1)
        found = [recurrent_layers_reference(s, weights, form, slopes, past) for s in sequences]
        z, pairs = torch.cat([z for z, _ in found], 1), found[0][1]
    else:
        matrices, none = Matrices.of(weights, dtype), (None, None, None)
        z, _, *pairs = differentiable_recurrent_layers(
            x, *matrices, slopes, *(past or none), cu_seqlens, *form, chosen
        )
    if past is None or pairs is None:
        return RecurrentOutput(z, None)
    added = x.shape[1] if lengths is None else lengths
    return RecurrentOutput(z, Past(*pairs, past.lengths + added))


def _resolve(impl: Any, x: Tensor, dtype: torch.dtype, num_heads: int) -> str:
    """Return the implementation that computes the call."""
    if not isinstance(impl, str) or impl not in get_args(RecurrentImpl):
        raise ValueError(f"{OP}: impl must be one of {get_args(RecurrentImpl)}, got {impl!r}")
    unsupported = None
    if dtype not in TRITON_DTYPES or x.dtype not in TRITON_DTYPES:
        unsupported = "float64; supported: float32, bfloat16, float16"
    elif (D := x.shape[2] // num_heads) not in (16, 32, 64, 128) and (D != 8 or num_heads % 2):
        unsupported = (
            f"{num_heads} heads of width {D}; supported: widths 16, 32, 64 and 128, and 8 if the "
            "number of heads is even"
        )
    if impl == "auto" and torch.onnx.is_in_onnx_export():  # which knows no registered op
        return "reference"
    if impl == "auto":
        return "triton" if x.is_cuda and unsupported is None else "eager"
    return resolve_impl(OP, impl, x.device, unsupported) if impl == "triton" else impl


def _checked_form(
    x: Any, num_heads: Any, scale: Any, norm: Norm, eps: Any, persistent: Any, block_size: Any
) -> Form:
    _INPUT.check(OP, x)
    check_size(OP, "num_heads", num_heads)
    if x.shape[2] % num_heads:
        raise ValueError(f"{OP}: num_heads must divide C = {x.shape[2]}, got {num_heads}")
    check_number(OP, "residual_scale", scale)
    if norm not in get_args(Norm):
        raise ValueError(f"{OP}: norm must be one of {get_args(Norm)}, got {norm!r}")
    check_number(OP, "eps", eps, positive=True)
    if not isinstance(persistent, bool):
        raise TypeError(f"{OP}: persistent_norm must be a bool, got {type(persistent).__name__}")
    check_size(OP, "block_size", block_size)
    return Form(num_heads, float(scale), norm, float(eps), persistent, block_size)


def _checked_weights(weights: Any, x: Tensor, norm: Norm) -> LayerWeights:
    """Check all weights; those of norms must be None if there are no norms."""
    if not isinstance(weights, LayerWeights):
        raise TypeError(f"{OP}: weights must be LayerWeights, got {type(weights).__name__}")
    _WEIGHTS.check(OP, *weights, of="weights.", device=x.device, C=x.shape[2])
    for name in ("n1", "n2", "q_norm", "k_norm"):
        if (getattr(weights, name) is None) != (norm == "none"):
            must = "must" if norm == "none" else "must not"
            raise ValueError(f'{OP}: weights.{name} {must} be None with norm "{norm}"')
    wq, wk, wv, wo, up, down, *_ = weights
    check_one_dtype(OP, wq=wq, wk=wk, wv=wv, wo=wo, up=up, down=down)
    return weights


def _checked_slopes(slopes: Any, x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    if slopes is None:
        return torch.zeros(num_heads, dtype=dtype, device=x.device)
    _SLOPES.check(OP, slopes, device=x.device, H=num_heads)
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{OP}: alibi_slopes has no gradient: detach it")
    return slopes.to(dtype)


def _check_past(past: Any, x: Tensor, weights: LayerWeights, form: Form) -> None:
    if past is None:
        return
    if not isinstance(past, Past):
        raise TypeError(f"{OP}: past must be a Past, got {type(past).__name__}")
    if form.block_size != 1:
        raise ValueError(f"{OP}: a past needs block_size 1, got {form.block_size}")
    (B, _, C), H = x.shape, form.num_heads
    sizes = {"n": len(weights.wq), "B": B, "H": H, "D": C // H}
    _PAST.check(OP, *past, of="past.", device=x.device, **sizes)
    check_counts(OP, "past.lengths", past.lengths, "S", past.k.shape[2])
