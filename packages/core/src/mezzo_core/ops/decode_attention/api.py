"""The public ops `append_token_` and `decode_attention`: argument checks and dispatch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo_core.ops.checks import check_counts, check_floating, check_number
from mezzo_core.ops.decode_attention import reference
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.precision import accumulation_dtype, without_autocast
from mezzo_core.positions import RopeScaling, scaling_numbers

TRITON_WIDTHS = (32, 64, 128, 256)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    definition. There is no backward. The call never waits for the GPU, and its launches depend on
    shapes only, so a captured CUDA graph stays valid while the rows grow. The first call makes a
    table, and must come before the capture.

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
        TypeError: if a dtype is not as above.
        ValueError: if shapes or devices disagree, there is no slot, a length is negative, D is odd,
            `rope_base` is not positive, an input requires gradients, or `impl` cannot do the
            request.
    """
    _check_append(q, k, v, k_cache, v_cache, lengths)
    if rope_base is not None:
        check_number("append_token_", "rope_base", rope_base, positive=True)
        if q.shape[-1] % 2:
            raise ValueError(f"append_token_: D must be even for RoPE, got {q.shape[-1]}")
    scaling = scaling_numbers("append_token_", rope_scaling)
    tensors = (q, k, v, k_cache, v_cache)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("append_token_ has no backward: call it under torch.no_grad()")
    chosen = resolve_impl("append_token_", impl, q.device, _unsupported(q, k_cache))
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
        TypeError: if a dtype is not as above.
        ValueError: if shapes or devices disagree, a length is negative, an input requires
            gradients, or `impl` cannot do the request.
    """
    _check_dtypes(q, k, v, lengths, alibi_slopes)
    if scale is not None:
        check_number("decode_attention", "scale", scale)
    _check_shapes(q, k, v, lengths, alibi_slopes)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("decode_attention has no backward: call it under torch.no_grad()")
    chosen = resolve_impl("decode_attention", impl, q.device, _unsupported(q, k))
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    if alibi_slopes is not None:
        # In half precision a slope times a long distance would be rounded, or overflow; and the
        # kernel reads neighbours in memory.
        alibi_slopes = alibi_slopes.to(accumulation_dtype(q.dtype)).contiguous()
    return _decode_attention(q, k, v, lengths, alibi_slopes, scale, chosen)


def _unsupported(q: Tensor, k: Tensor) -> str | None:
    for dtype in (q.dtype, k.dtype):
        if dtype not in TRITON_DTYPES:
            return str(dtype)
    if q.shape[-1] not in TRITON_WIDTHS:
        return f"heads of width {q.shape[-1]} (it needs one of {TRITON_WIDTHS})"
    return None


def _check_dtypes(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, alibi_slopes: Tensor | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("alibi_slopes", alibi_slopes)):
        if name != "alibi_slopes" or x is not None:
            check_floating("decode_attention", name, x)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            "decode_attention: q, k and v must have one floating dtype, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    _check_lengths("decode_attention", lengths)


def _check_lengths(op: str, lengths: Any) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{op}: lengths must be a tensor, got {type(lengths).__name__}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: lengths must be int32 or int64, got {lengths.dtype}")
    check_counts(op, "lengths", lengths)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, alibi_slopes: Tensor | None
) -> None:
    if q.ndim != 3 or k.ndim != 4 or k.shape[::3] != q.shape[::2] or v.shape != k.shape:
        raise ValueError(
            "decode_attention: q must be (B, HQ, D), k and v (B, S, H, D), "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[2] == 0 or q.shape[1] % k.shape[2]:
        raise ValueError(
            "decode_attention: the heads of q must be a multiple of those of k and v, "
            f"got {q.shape[1]} and {k.shape[2]}"
        )
    if lengths.shape != q.shape[:1]:
        raise ValueError(
            f"decode_attention: lengths must be ({q.shape[0]},), got {tuple(lengths.shape)}"
        )
    if alibi_slopes is not None and alibi_slopes.shape != (q.shape[1],):
        raise ValueError(
            f"decode_attention: alibi_slopes must be ({q.shape[1]},), one for each query head; "
            f"got {tuple(alibi_slopes.shape)}"
        )
    for name, x in (("k", k), ("v", v), ("lengths", lengths), ("alibi_slopes", alibi_slopes)):
        if x is not None and x.device != q.device:
            raise ValueError(f"decode_attention: {name} is on {x.device}, q on {q.device}")


def _check_append(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor
) -> None:
    tensors = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in tensors.items():
        check_floating("append_token_", name, x)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            "append_token_: q, k and v must have one floating dtype, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(
            "append_token_: k_cache and v_cache must have one floating dtype, "
            f"got {k_cache.dtype} and {v_cache.dtype}"
        )
    _check_lengths("append_token_", lengths)
    if q.ndim != 3 or k.ndim != 3 or k.shape[::2] != q.shape[::2] or v.shape != k.shape:
        raise ValueError(
            "append_token_: q must be (B, HQ, D), k and v (B, H, D), "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    B, H, D = k.shape
    if H == 0 or q.shape[1] == 0:
        raise ValueError(f"append_token_: q and k must have heads, got {q.shape[1]} and {H}")
    S = k_cache.shape[1] if k_cache.ndim == 4 else 0
    if S == 0 or k_cache.shape != (B, S, H, D) or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"append_token_: k_cache and v_cache must be ({B}, S, {H}, {D}) with S at least 1, "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if lengths.shape != (B,):
        raise ValueError(f"append_token_: lengths must be ({B},), got {tuple(lengths.shape)}")
    for name, x in {**tensors, "lengths": lengths}.items():
        if x.device != q.device:
            raise ValueError(f"append_token_: {name} is on {x.device}, q on {q.device}")


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
