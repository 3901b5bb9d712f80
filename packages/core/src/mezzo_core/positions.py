"""Where tokens are, and how attention is told: positions, RoPE and ALiBi, by one convention.

Everything is computed on the device from integers, with no tables and no buffers: there is nothing
to extend, to save, or to round when a model is cast to bfloat16.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mezzo_core.ops.checks import check_floating, check_number, check_size

AlibiFormula = Literal["press", "olmo"]


def rope_angles(
    positions: Tensor, dim: int, base: float = 10_000.0, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that rotate a head of width `dim` at each position.

    Pair i turns by position * base^(-2i/dim) (RoFormer, arXiv:2104.09864, section 3.2.2).

    Args:
        positions: (..., T) integers; tokens, chunks, or anything else that is counted.
        dim: head width D, even.
        base: of the wave lengths; larger for longer contexts.
        dtype: in which they are computed, float32 or float64 (for heads in float64).

    Returns:
        cos and sin, (..., T, D/2) of that dtype.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if `dim` is odd or not positive, `base` is not positive and finite, or `dtype`
            is another.
    """
    _check_integers("rope_angles", "positions", positions)
    _check_pairs("rope_angles", dim, base, dtype)
    return _rope_angles(positions, dim, base, dtype)


# An op of its own: torch.compile would fuse the angles into the rotation, and take a sine and a
# cosine for every channel of every head, which costs far more than the rotation itself.
@torch.library.custom_op("mezzo::rope_angles", mutates_args=())
def _rope_angles(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    frequencies = rope_frequencies(dim, base, device=positions.device, dtype=dtype)
    angles = positions.to(dtype)[..., None] * frequencies
    return angles.cos(), angles.sin()


@_rope_angles.register_fake
def _(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    cos = positions.new_empty((*positions.shape, dim // 2), dtype=dtype)
    return cos, torch.empty_like(cos)


def rope_frequencies(
    dim: int,
    base: float = 10_000.0,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the angles by which the pairs of a head of width `dim` turn from a place to the next.

    Returns:
        (D/2,) of that dtype, float32 or float64. A position times this, in that dtype, is
        `rope_angles`' angle to the bit.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: as `rope_angles`.
    """
    _check_pairs("rope_frequencies", dim, base, dtype)
    pair = torch.arange(0, dim, 2, device=device, dtype=dtype)
    return base ** (-pair / dim)


def _check_pairs(op: str, dim: int, base: float, dtype: torch.dtype) -> None:
    check_size(op, "dim", dim, 2)
    if dim % 2:
        raise ValueError(f"{op}: dim must be even to rotate pairs, got {dim}")
    check_number(op, "base", base, positive=True)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: dtype must be torch.float32 or torch.float64, got {dtype}")


def _check_integers(op: str, name: str, x: Any, *, is_row: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {x.dtype}")
    if is_row and x.ndim != 1:
        raise ValueError(f"{op}: {name} must have one axis, got {tuple(x.shape)}")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other; float32 inside, x's dtype outside.

    A float64 x stays float64 inside; to be as exact, it needs angles of that dtype.

    Half-split pairing, as in GPT-NeoX and LLaMA's checkpoints on the hub: dimension i is paired
    with i + D/2.

    Args:
        x: (B, T, H, D) queries or keys.
        cos: (T, D/2) or (B or 1, T, D/2), from `rope_angles`.
        sin: like `cos`.

    Raises:
        TypeError: if one is no tensor of floating-point numbers.
        ValueError: if the angles do not fit the heads.
    """
    for name, part in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating("apply_rope", name, part)
        if part.device != x.device:
            raise ValueError(f"apply_rope: {name} is on {part.device}, x on {x.device}")
    if x.ndim != 4 or cos.ndim not in (2, 3) or cos.shape != sin.shape:
        raise ValueError(
            "apply_rope: x must be (B, T, H, D), cos and sin alike (T, D/2) or (B or 1, T, D/2); "
            f"got {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if 2 * cos.shape[-1] != x.shape[-1] or cos.shape[-2] != x.shape[1]:
        raise ValueError(
            f"apply_rope: cos and sin must end in ({x.shape[1]}, {x.shape[-1] // 2}) for x "
            f"{tuple(x.shape)}, got {tuple(cos.shape)}"
        )
    cos, sin = cos[..., None, :], sin[..., None, :]
    # float64 stays float64, so that gradients can be checked.
    left, right = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return rotated.to(x.dtype)


def alibi_slopes(
    num_heads: int,
    formula: AlibiFormula = "press",
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the slope of each head: ALiBi adds -slope * distance to the attention scores.

    Two formulas are in use. They agree when the number of heads is a power of two:

    - "olmo": 2^(-8h/n) for h = 1..n, whatever n is (OLMo, and models derived from it);
    - "press": that for the largest power of two c <= n, then every other slope of 2c heads
      (arXiv:2108.12409 and its released code).

    Args:
        num_heads: number of query heads HQ.
        formula: which of the two.
        device: where to compute them.

    Returns:
        (HQ,) float32.

    Raises:
        TypeError: if `num_heads` is no int.
        ValueError: if there is no head, or the formula is neither of the two.
    """
    check_size("alibi_slopes", "num_heads", num_heads)
    if not isinstance(formula, str) or formula not in get_args(AlibiFormula):
        raise ValueError(
            f"alibi_slopes: formula must be one of {get_args(AlibiFormula)}, got {formula!r}"
        )
    if formula == "olmo":
        return _geometric_slopes(num_heads, device)
    power = 1 << (num_heads.bit_length() - 1)
    between = _geometric_slopes(2 * power, device)[0::2][: num_heads - power]
    return torch.cat([_geometric_slopes(power, device), between])


def _geometric_slopes(num_heads: int, device: torch.device | str | None) -> Tensor:
    heads = torch.arange(1, num_heads + 1, device=device, dtype=torch.float32)
    return torch.exp2(-8 * heads / num_heads)


def sequence_ids(num_tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Return which of the packed sequences owns each token.

    Args:
        num_tokens: T, all tokens of the packed row.
        cu_seqlens: (S + 1,) borders: from 0 to T, never decreasing. Sequences of no tokens own
            none, so trailing borders that repeat T are padding that changes nothing.

    Returns:
        (T,) int64, never decreasing.

    Raises:
        TypeError: if `num_tokens` is no int, or the borders are no int32 or int64 tensor.
        ValueError: if `num_tokens` is negative, or the borders are not (S + 1,).
    """
    check_size("sequence_ids", "num_tokens", num_tokens, 0)
    _check_integers("sequence_ids", "cu_seqlens", cu_seqlens, is_row=True)
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(torch.int64), tokens, right=True) - 1


def sequence_positions(
    num_tokens: int,
    cu_seqlens: Tensor | None = None,
    start: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return each token's place in its own sequence.

    Shapes depend on shapes alone: nothing waits for the GPU, and one compiled graph serves all.

    Args:
        num_tokens: T, tokens of a row.
        cu_seqlens: (S + 1,) borders of packed sequences; places count from each border.
        start: (B,) place of each row's first token, for rows that continue.
        device: where to put them; that of `cu_seqlens` or `start` when one is given.

    Returns:
        (1, T) int64, or (B, T) with `start`.

    Raises:
        TypeError: if `num_tokens` is no int, or `cu_seqlens` or `start` no int32 or int64 tensor.
        ValueError: if `num_tokens` is negative, both `cu_seqlens` and `start` are given, or the
            one that is given has not one axis.
    """
    check_size("sequence_positions", "num_tokens", num_tokens, 0)
    if cu_seqlens is not None and start is not None:
        raise ValueError("cu_seqlens and start exclude each other: packed rows do not continue")
    if cu_seqlens is not None:
        _check_integers("sequence_positions", "cu_seqlens", cu_seqlens, is_row=True)
        first = cu_seqlens.to(torch.int64)[sequence_ids(num_tokens, cu_seqlens)]
        return (torch.arange(num_tokens, device=cu_seqlens.device) - first)[None]
    if start is not None:
        _check_integers("sequence_positions", "start", start, is_row=True)
        return start.to(torch.int64)[:, None] + torch.arange(num_tokens, device=start.device)
    return torch.arange(num_tokens, device=device)[None]
