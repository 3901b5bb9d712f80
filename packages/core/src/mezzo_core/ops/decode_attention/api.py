"""The public ops `append_token_` and `decode_attention`: argument checks and dispatch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo_core.ops.checks import check_counts, check_number
from mezzo_core.ops.decode_attention import reference
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.precision import accumulation_dtype, without_autocast
from mezzo_core.ops.shapes import Shapes, check_heads, check_one_dtype
from mezzo_core.positions import RopeScaling, scaling_numbers

TRITON_WIDTHS = (32, 64, 128, 256)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_APPENDED = Shapes(
    q="B HQ D",
    k="B H D",
    v="B H D",
    k_cache="B S H D",
    v_cache="B S H D",
    lengths="int: B",
    filled="HQ H S",
)
_DECODED = Shapes(
    q="B HQ D",
    k="B S H D",
    v="B S H D",
    lengths="int: B",
    alibi_slopes="HQ | None",
    filled="H",
)


def append_token_(
    q: Float[Tensor, "B HQ D"],
    k: Float[Tensor, "B H D"],
    v: Float[Tensor, "B H D"],
    k_cache: Float[Tensor, "B S H D"],
    v_cache: Float[Tensor, "B S H D"],
    lengths: Int[Tensor, " B"],
    *,
    rope_base: float | None,
    rope_scaling: RopeScaling | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B HQ D"]:
    """Put the next token of each row into the cache, in place, and return its rotated queries.

    The returned queries and the cache are arguments for `decode_attention`. `reference.py` is the
    definition. There is no backward. The launches depend on shapes only, so a captured CUDA graph
    stays valid while the rows grow. The first call waits for a table that it makes on the GPU, and
    should come before the capture. No other call waits for the GPU.

    Args:
        q: the new token's queries, not rotated. q, k and v may have any strides.
        k: its keys, not rotated.
        v: its values.
        k_cache: overwritten: in a row of n tokens, the new key goes to slot n % S.
        v_cache: overwritten likewise by the new value.
        lengths: n, the number of tokens of each row before this one, int32 or int64; one is added
            in place. The values are checked on the CPU only.
        rope_base: base of RoPE, which rotates q and k to position n
            (`mezzo_core.positions.rope_angles`); None for no rotation.
        rope_scaling: makes some pairs turn more slowly.
        impl: "auto", "reference" or "triton" (float32, bfloat16 or float16; D a power of two from
            32 to 256).

    Returns:
        q, rotated, in the dtype of the cache.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, a length, `rope_base` or `impl` is wrong, an input
            requires gradients, or rows that are overwritten share memory (`expand`).
    """
    op = "append_token_"
    _APPENDED.check(op, q, k, v, k_cache, v_cache, lengths)
    check_counts(op, "lengths", lengths)
    check_one_dtype(op, q=q, k=k, v=v)
    check_one_dtype(op, k_cache=k_cache, v_cache=v_cache)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("lengths", lengths)):
        if x.shape[0] > 1 and x.stride(0) == 0:
            raise ValueError(f"{op}: rows of {name} share memory, and are overwritten: clone it")
    if rope_base is not None:
        check_number(op, "rope_base", rope_base, positive=True)
        if q.shape[-1] % 2:
            raise ValueError(f"{op}: D must be even for RoPE, got {q.shape[-1]}")
    scaling = scaling_numbers(op, rope_scaling)
    tensors = (q, k, v, k_cache, v_cache)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(f"{op} has no backward: call it under torch.no_grad()")
    chosen = resolve_impl(op, impl, q.device, _unsupported(q, k_cache))
    return _append_token_(*tensors, lengths, rope_base, scaling, chosen)


def decode_attention(
    q: Float[Tensor, "B HQ D"],
    k: Float[Tensor, "B S H D"],
    v: Float[Tensor, "B S H D"],
    lengths: Int[Tensor, " B"],
    *,
    alibi_slopes: Float[Tensor, " HQ"] | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B HQ D"]:
    """Attend from the newest token of each row to the tokens in its cache, itself included.

    Query head h reads key and value head h // (HQ/H). `reference.py` is the definition. There is no
    backward. The call never waits for the GPU, and its launches depend on shapes only, so a
    captured CUDA graph stays valid while the rows grow.

    Args:
        q: the newest token's queries.
        k: keys; in a row of n tokens, token p is in slot p % S. Other slots are not used.
        v: values, in the same slots as the keys.
        lengths: n, the number of tokens of each row, int32 or int64. A row with n = 0 gets output
            0. With n > S the cache is a ring that holds the last S tokens. The values are checked
            on the CPU only.
        alibi_slopes: slope of each query head (`mezzo_core.positions.alibi_slopes`).
        scale: factor of the products q·k; None for D^-0.5.
        impl: "auto", "reference" or "triton" (float32, bfloat16 or float16; D a power of two from
            32 to 256).

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, a length, `scale` or `impl` is wrong, or an input requires
            gradients.
    """
    op = "decode_attention"
    _DECODED.check(op, q, k, v, lengths, alibi_slopes)
    check_counts(op, "lengths", lengths)
    check_one_dtype(op, q=q, k=k, v=v)
    check_heads(op, q.shape[1], k.shape[2])
    if scale is not None:
        check_number(op, "scale", scale)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError(f"{op} has no backward: call it under torch.no_grad()")
    chosen = resolve_impl(op, impl, q.device, _unsupported(q, k))
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    if alibi_slopes is not None:
        # In half precision a slope times a long distance would be rounded, or overflow. The kernel
        # needs the slopes contiguous.
        alibi_slopes = alibi_slopes.to(accumulation_dtype(q.dtype)).contiguous()
    return _decode_attention(q, k, v, lengths, alibi_slopes, scale, chosen)


def _unsupported(q: Tensor, k: Tensor) -> str | None:
    for dtype in (q.dtype, k.dtype):
        if dtype not in TRITON_DTYPES:
            return str(dtype)
    if q.shape[-1] not in TRITON_WIDTHS:
        return f"heads of width {q.shape[-1]} (it needs one of {TRITON_WIDTHS})"
    return None


@torch.library.custom_op("mezzo::append_token_", mutates_args=("k_cache", "v_cache", "lengths"))
def _append_token_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    rope_base: float | None,
    rope_scaling: Sequence[float] | None,
    impl: str,
) -> Tensor:
    rope = rope_base, None if rope_scaling is None else RopeScaling(*rope_scaling)
    if impl == "triton":
        from mezzo_core.ops.decode_attention import triton

        return triton.append_token_(q, k, v, k_cache, v_cache, lengths, *rope)
    return reference.append_token_(q, k, v, k_cache, v_cache, lengths, *rope)


@_append_token_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, *rest: Any) -> Tensor:
    return k_cache.new_empty(q.shape)


@torch.library.custom_op("mezzo::decode_attention", mutates_args=())
def _decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    scale: float,
    impl: str,
) -> Tensor:
    q = q.contiguous()
    if impl == "triton":
        from mezzo_core.ops.decode_attention import triton

        return triton.decode_attention_fwd(q, k, v, lengths, slopes, scale)
    with without_autocast(q.device):
        return reference.decode_attention_fwd(q, k, v, lengths, slopes, scale)


@_decode_attention.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)
