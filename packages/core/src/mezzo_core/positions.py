"""Positions of tokens, and their encodings in attention: RoPE and ALiBi.

Everything is computed on the device from integers: there are no tables to extend or save, and
nothing loses precision when a model is cast to bfloat16.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.shapes import Shapes

AlibiFormula = Literal["press", "olmo"]
RADIANS = 2 * math.pi / 2**64
"""The unit of `rope_steps` in radians."""
_POSITIONS, _BORDERS, _START = (
    Shapes(positions="int: ..."),
    Shapes(cu_seqlens="int: borders"),
    Shapes(start="int: B"),
)
_ROTATED = Shapes(x="B T H D", cos="... T D/2", sin="... T D/2")


@dataclass(frozen=True)
class RopeScaling:
    """RoPE for contexts longer than a model was first trained for, as in Llama 3.1.

    A pair that turns n times in the original context turns `factor` times more slowly if n is at
    most `low_freq_factor`, as before if n is at least `high_freq_factor`, and in between its speed
    is linear in n. An original context of 0 slows all pairs: linear scaling (arXiv:2306.15595).

    Attributes:
        factor: 1 or more.
        low_freq_factor: in turns, 0 or more.
        high_freq_factor: in turns, above `low_freq_factor`.
        original_context: in tokens, 0 or more.

    Raises:
        TypeError: if one is not a number.
        ValueError: if one is out of its range.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("RopeScaling", name, value)
            if value < (least := float(name == "factor")):
                raise ValueError(f"RopeScaling: {name} must be {least:g} or more, got {value}")
        if self.high_freq_factor <= (low := self.low_freq_factor):
            raise ValueError(f"RopeScaling: high_freq_factor must be above low_freq_factor = {low}")


def rope_angles(
    positions: Tensor,
    dim: int,
    base: float = 10_000.0,
    scaling: RopeScaling | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that rotate a head of width `dim` at each position.

    Pair i is rotated by position * base^(-2i/dim) (RoFormer, arXiv:2104.09864, section 3.2.2),
    as exactly at any position as at the first.

    Args:
        positions: (..., T) integers, counting tokens, chunks, or any other unit.
        dim: head width D, even.
        base: base of the wave lengths; larger for longer contexts.
        scaling: makes some pairs turn more slowly.
        dtype: dtype of the computation, float32, or float64 for heads in float64.

    Returns:
        cos and sin, (..., T, D/2) of dtype `dtype`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `dim` is odd or not positive, `base` is not positive and finite, or `dtype`
            is neither float32 nor float64.
    """
    _POSITIONS.check("rope_angles", positions)
    _check_pairs("rope_angles", dim, base)
    _check_dtype("rope_angles", dtype)
    numbers = scaling_numbers("rope_angles", scaling)
    if torch.onnx.is_in_onnx_export():  # which knows no registered op
        return _angles(positions, dim, base, dtype, numbers)
    return _rope_angles(positions, dim, base, dtype, numbers)


def _angles(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype = torch.float32,
    scaling: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    told = None if scaling is None else RopeScaling(*scaling)
    steps = rope_steps(dim, base, told, device=positions.device)
    # A product keeps the order of axes in memory, and torch.compile is told of the usual one.
    places = positions.to(torch.int64).contiguous()
    angles = (places[..., None] * steps).to(dtype) * RADIANS
    return angles.cos(), angles.sin()


# A registered op, because torch.compile would otherwise fuse the angles into the rotation. It would
# then compute a sine and a cosine for every channel of every head, which costs far more than the
# rotation itself.
_rope_angles = torch.library.custom_op("mezzo::rope_angles", _angles, mutates_args=())


@_rope_angles.register_fake
def _(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype = torch.float32, *_: Any
) -> tuple[Tensor, Tensor]:
    cos = positions.new_empty((*positions.shape, dim // 2), dtype=dtype)
    return cos, torch.empty_like(cos)


def rope_steps(
    dim: int,
    base: float = 10_000.0,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return how far each pair of a head of width `dim` turns from one position to the next.

    A position times this is the exact angle: int64 wraps around, which only drops whole turns. In
    floating point the angles of far positions would lose digits.

    Returns:
        (D/2,) int64, in turns / 2^64; times `RADIANS`, in radians.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: as in `rope_angles`.
    """
    _check_pairs("rope_steps", dim, base)
    pair = torch.arange(0, -dim, -2, device=device, dtype=torch.float64)
    turns = base ** (pair / dim) / (2 * math.pi)
    if numbers := scaling_numbers("rope_steps", scaling):
        factor, low, high, context = numbers
        kept = ((context * turns - low) / (high - low)).clamp(0, 1)
        turns = turns * (kept + (1 - kept) / factor)
    return ((turns - turns.round()) * 2.0**64).to(torch.int64)


def scaling_numbers(op: str, scaling: Any) -> tuple[float, ...] | None:
    """Return the fields as a tuple for registered ops; a TypeError if it is no `RopeScaling`."""
    if scaling is None or isinstance(scaling, RopeScaling):
        return None if scaling is None else astuple(scaling)
    raise TypeError(f"{op}: rope_scaling must be a RopeScaling, got {type(scaling).__name__}")


def _check_pairs(op: str, dim: int, base: float) -> None:
    check_size(op, "dim", dim, 2)
    if dim % 2:
        raise ValueError(f"{op}: dim must be even to rotate pairs, got {dim}")
    check_number(op, "base", base, positive=True)


def _check_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: dtype must be torch.float32 or torch.float64, got {dtype}")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by RoPE's angles; computed in float32, returned in x's dtype.

    A float64 x is rotated in float64; then the angles should be float64 too. Dimension i is paired
    with dimension i + D/2, as in GPT-NeoX and LLaMA's checkpoints on the hub.

    Args:
        x: (B, T, H, D) queries or keys.
        cos: (T, D/2) or (B or 1, T, D/2), from `rope_angles`.
        sin: like `cos`.

    Raises:
        TypeError: if an argument is not a floating-point tensor.
        ValueError: if the shapes of the angles do not fit x.
    """
    sizes = _ROTATED.check("apply_rope", x, cos, sin)
    if cos.ndim not in (2, 3) or 2 * sizes["D/2"] != sizes["D"]:
        raise ValueError(
            "apply_rope: cos and sin must be (T, D/2) or (B or 1, T, D/2) for x "
            f"{tuple(x.shape)}, got {tuple(cos.shape)}"
        )
    cos, sin = cos[..., None, :], sin[..., None, :]
    # float64 is not rounded, so gradients can be checked in it.
    left, right = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return rotated.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Apply RoPE to x (B, T, H, D) at positions (T,) or (B or 1, T), as `apply_rope` does."""
    dtype = accumulation_dtype(x.dtype)
    return apply_rope(x, *rope_angles(positions, x.shape[-1], base, scaling, dtype=dtype))


def alibi_slopes(
    num_heads: int,
    formula: AlibiFormula = "press",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the slope of each head: ALiBi adds -slope * distance to the attention scores.

    Two formulas are in use for n heads. They agree if n is a power of two:

    - "olmo": 2^(-8h/n) for h = 1..n, for any n (OLMo, and models derived from it);
    - "press": the slopes of c heads by this formula, where c is the largest power of two with
      c <= n, followed by every other slope of 2c heads (arXiv:2108.12409 and its released code).

    Args:
        num_heads: number of query heads HQ.
        formula: "olmo" or "press".
        device: device of the result.
        dtype: of the result, float32, or float64 for heads in float64.

    Returns:
        (HQ,) of dtype `dtype`.

    Raises:
        TypeError: if `num_heads` is not an int.
        ValueError: if `num_heads` is below 1, the formula is unknown, or `dtype` is neither
            float32 nor float64.
    """
    check_size("alibi_slopes", "num_heads", num_heads)
    if not isinstance(formula, str) or formula not in get_args(AlibiFormula):
        raise ValueError(
            f"alibi_slopes: formula must be one of {get_args(AlibiFormula)}, got {formula!r}"
        )
    _check_dtype("alibi_slopes", dtype)
    if formula == "olmo":
        return _geometric_slopes(num_heads, device, dtype)
    power = 1 << (num_heads.bit_length() - 1)
    between = _geometric_slopes(2 * power, device, dtype)[0::2][: num_heads - power]
    return torch.cat([_geometric_slopes(power, device, dtype), between])


def _geometric_slopes(
    num_heads: int, device: torch.device | str | None, dtype: torch.dtype
) -> Tensor:
    heads = torch.arange(1, num_heads + 1, device=device, dtype=dtype)
    return torch.exp2(-8 * heads / num_heads)


def ring_positions(lengths: Tensor, num_slots: int) -> Tensor:
    """Return (B, S): the position of the token in each slot of a ring, negative if it is empty.

    Token p is in slot p % S; `lengths` (B,) counts the tokens of each row so far.
    """
    newest = lengths[:, None] - 1
    return newest - (newest - torch.arange(num_slots, device=lengths.device)) % num_slots


def sequence_ids(num_tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Return for each token the index of the packed sequence that it belongs to.

    Args:
        num_tokens: T, all tokens of the packed row.
        cu_seqlens: (S + 1,) borders, from 0 to T, never decreasing. Sequences may be empty, so
            the borders may be padded with further entries of T.

    Returns:
        (T,) int64, never decreasing.

    Raises:
        TypeError: if `num_tokens` is not an int, or the borders are not an int32 or int64 tensor.
        ValueError: if `num_tokens` is negative, or the borders are not (S + 1,).
    """
    check_size("sequence_ids", "num_tokens", num_tokens, 0)
    _BORDERS.check("sequence_ids", cu_seqlens)
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(torch.int64), tokens, right=True) - 1


def sequence_positions(
    num_tokens: int,
    cu_seqlens: Tensor | None = None,
    start: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return each token's position in its own sequence.

    The result's shape depends on no tensor's values. So the call never waits for the GPU, and one
    compiled graph works for all borders.

    Args:
        num_tokens: T, the tokens of a row.
        cu_seqlens: (S + 1,) borders of packed sequences; positions start at 0 at each border.
        start: (B,) position of each row's first token, for rows that continue a sequence.
        device: device of the result; with `cu_seqlens` or `start`, theirs is used.

    Returns:
        (1, T) int64, or (B, T) with `start`.

    Raises:
        TypeError: if `num_tokens` is not an int, or `cu_seqlens` or `start` is not an int32 or
            int64 tensor.
        ValueError: if `num_tokens` is negative, both `cu_seqlens` and `start` are given, or the
            given one does not have exactly one axis.
    """
    check_size("sequence_positions", "num_tokens", num_tokens, 0)
    if cu_seqlens is not None and start is not None:
        raise ValueError("cu_seqlens and start exclude each other: packed rows do not continue")
    if cu_seqlens is not None:
        _BORDERS.check("sequence_positions", cu_seqlens)
        first = cu_seqlens.to(torch.int64)[sequence_ids(num_tokens, cu_seqlens)]
        return (torch.arange(num_tokens, device=cu_seqlens.device) - first)[None]
    if start is not None:
        _START.check("sequence_positions", start)
        return start.to(torch.int64)[:, None] + torch.arange(num_tokens, device=start.device)
    return torch.arange(num_tokens, device=device)[None]
