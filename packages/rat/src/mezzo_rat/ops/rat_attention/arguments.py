"""The arguments of RAT attention and of its ops: types, checks, and the limits of the kernels."""

from typing import Any, Literal, NamedTuple

import torch
from mezzo_core.ops.checks import check_floating, check_lengths, check_number, check_size
from mezzo_core.ops.packed import check_cu_seqlens
from mezzo_core.ops.shapes import Shapes, check_one_dtype
from mezzo_core.positions import rotate
from torch import Tensor

from mezzo_rat.ops.rat_attention.state import RATState, check_slots

HEAD_DIMS = (32, 64, 128, 256)
"""Head dimensions that the Triton kernels support."""

LONGEST = 2**31 - 1
"""The longest chunk that kernels can count in 32 bits; no row has more tokens."""

_SHAPES = Shapes(
    v="B T H D",
    q="B T G D",
    k="B T G D",
    g="B T H D",
    z="B T H D | None",
    gate_bias="H D | None",
    filled="H G D",
)
_STATE = Shapes(k="B H D", v="B H D", k_ends="B N H D", v_ends="B N H D", lengths="int64: B")


class Form(NamedTuple):
    """What to compute, apart from the tensors: the last arguments of the registered ops."""

    num_heads: int
    """H."""
    num_groups: int
    """G: head h reads the queries and keys of group h % G."""
    has_z: bool
    """Whether there is an output gate."""
    chunk_size: int
    """L."""
    rope: Literal["chunk", "token"] | None
    rope_base: float
    scale: float
    """Multiplies the logits."""

    def head_dim(self, width: int) -> int:
        """Return D for a projection of `width` channels."""
        return width // ((2 + self.has_z) * self.num_heads + 2 * self.num_groups)

    def rotate(self, x: Tensor, chunk: Tensor, position: Tensor) -> Tensor:
        """Apply RoPE to x (B, T, H, D) at chunk indices or token positions (1 or B, T)."""
        if self.rope is None:
            return x
        at = chunk if self.rope == "chunk" else position
        return rotate(x, at, self.rope_base)


class Saved(NamedTuple):
    """The tensors that the backward needs, in the order of its op's arguments."""

    x: Tensor
    """(B, T, W): the projection."""
    gate_bias: Tensor | None
    """(H, D)."""
    cu_seqlens: Tensor | None
    """(S + 1,): borders of packed sequences."""
    y: Tensor
    """(B, T, H, D): the output."""
    lse: Tensor
    """(B, H, T) float32: log2 of the sum of the exponentials of each query's logits."""
    k_ends: Tensor
    """(B, N, H, D): k~ at the end of each chunk, rotated."""
    v_ends: Tensor
    """(B, N, H, D): v~ at the end of each chunk."""


class SavedContinued(NamedTuple):
    """The same for rows that continue a state."""

    x: Tensor
    gate_bias: Tensor | None
    k: Tensor
    """(B, H, D) float32: k~ of the open chunk before these tokens."""
    v: Tensor
    """(B, H, D) float32: v~ of the open chunk before these tokens."""
    lengths: Tensor
    """(B,) int64: the tokens that each row had seen."""
    added: Tensor
    """(B,) int64: the real tokens of each row."""
    y: Tensor
    lse: Tensor
    k_ends: Tensor
    """(B, N + 1, H, D): k~ at the end of each chunk, rotated; the last slot is unused."""
    v_ends: Tensor
    """(B, N + 1, H, D): v~ at the end of each chunk."""


class Pulled(NamedTuple):
    """The gradients of a continued state's results except lse; None for the ends means zeros."""

    dy: Tensor
    """(B, T, H, D)."""
    dk: Tensor
    """(B, H, D) float32."""
    dv: Tensor
    """(B, H, D) float32."""
    dk_ends: Tensor | None
    """(B, N + 1, H, D)."""
    dv_ends: Tensor | None
    """(B, N + 1, H, D)."""


class Parts(NamedTuple):
    """The parts of a projection, in the order in which it holds them."""

    z: Tensor | None
    """(B, T, H, D) logits of the output gate."""
    v: Tensor
    """(B, T, H, D) values."""
    g: Tensor
    """(B, T, H, D) logits of the forget gate."""
    q: Tensor
    """(B, T, G, D) queries."""
    k: Tensor
    """(B, T, G, D) keys."""


class Request(NamedTuple):
    """The checked arguments of one call; a default scale is filled in."""

    parts: Parts
    gate_bias: Tensor | None
    form: Form
    initial_state: RATState | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None


def split_projection(op: str, zvgqk: Tensor, num_heads: int, num_groups: int) -> Parts:
    """Check a projection, and return its parts z, v, g, q, k as views."""
    check_floating(op, "zvgqk", zvgqk)
    check_size(op, "num_heads", num_heads)
    check_size(op, "num_groups", num_groups)
    H, G = num_heads, num_groups
    if H % G:
        raise ValueError(f"{op}: num_groups must divide the {H} heads, got {G}")
    if zvgqk.ndim != 3 or zvgqk.shape[2] < 1 or zvgqk.shape[2] % (3 * H + 2 * G):
        raise ValueError(
            f"{op}: zvgqk must be (B, T, W) with W a multiple of 3 H + 2 G = {3 * H + 2 * G}, "
            f"got {tuple(zvgqk.shape)}"
        )
    heads = zvgqk.unflatten(2, (3 * H + 2 * G, -1))
    return Parts(*heads.split([H, H, H, G, G], dim=2))


def check_request(
    op: str,
    parts: Parts,
    gate_bias: Tensor | None,
    chunk_size: int,
    rope: Literal["chunk", "token"] | None,
    rope_base: float,
    scale: float | None,
    initial_state: RATState | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Request:
    """Check the arguments of a call, and return them with the default scale filled in."""
    z, v, g, q, k = parts
    sizes = _SHAPES.check(op, v, q, k, g, z, gate_bias)
    H, G, D = sizes["H"], sizes["G"], sizes["D"]
    if H % G:
        raise ValueError(f"{op}: the groups of q must divide the {H} heads of v, got {G}")
    check_one_dtype(op, q=q, k=k, v=v)
    check_numbers(op, chunk_size, rope, rope_base)
    if rope is not None and D % 2:
        raise ValueError(f"{op}: rope needs an even head dimension D, got {D}")
    if scale is not None:
        check_number(op, "scale", scale)
    scale = D**-0.5 if scale is None else scale
    form = Form(H, G, z is not None, min(chunk_size, LONGEST), rope, rope_base, scale)
    if initial_state is not None:
        check_state(op, "initial_state", initial_state, v, form)
    if lengths is not None:
        if initial_state is None:
            raise ValueError(f"{op}: lengths needs an initial_state: start from init_state")
        check_lengths(op, lengths, v)
    if cu_seqlens is not None:
        if initial_state is not None:
            raise ValueError(
                f"{op}: cu_seqlens and initial_state exclude each other: "
                "packed rows do not continue"
            )
        check_cu_seqlens(op, cu_seqlens, v)
    return Request(parts, gate_bias, form, initial_state, lengths, cu_seqlens)


def check_numbers(op: str, chunk_size: Any, rope: Any, rope_base: Any) -> None:
    """Check the chunk size and the options of RoPE; the mixer uses this check too."""
    check_size(op, "chunk_size", chunk_size)
    if rope not in ("chunk", "token", None):
        raise ValueError(f'{op}: rope must be "chunk", "token" or None, got {rope!r}')
    check_number(op, "rope_base", rope_base, positive=True)


def check_state(op: str, argument: str, state: RATState, v: Tensor, form: Form) -> None:
    """Check a state against the rows of v that continue it; messages use the argument's name."""
    if not isinstance(state, RATState):
        raise TypeError(f"{op}: {argument} must be a RATState, got {type(state).__name__}")
    B, _, H, D = v.shape
    _STATE.check(op, *state, of=f"{argument}.", device=v.device, B=B, H=H, D=D)
    check_slots(op, argument, state, form.chunk_size)


def unsupported(r: Request) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    parts = [part for part in r.parts if part is not None]
    dtypes, dim = {part.dtype for part in parts}, r.parts.v.shape[-1]
    if len(dtypes) > 1:
        return "gates of another dtype than v"
    if dtypes - {torch.float16, torch.bfloat16, torch.float32}:
        return f"{parts[0].dtype}; supported: float16, bfloat16, float32"
    if dim not in HEAD_DIMS:
        return f"a head dimension of {dim}; supported: {', '.join(map(str, HEAD_DIMS))}"
    if r.parts.v.numel() == 0:
        return "empty tensors"
    if not r.form.scale > 0:
        return f"a scale of {r.form.scale}; supported: positive ones"
    return None


def unsupported_step(r: Request, state: RATState) -> str | None:
    """Return why the kernels do not support this decoding step, or None if they do."""
    return unsupported(r) or scattered(state)


def scattered(state: RATState) -> str | None:
    """Return why the kernels of a step cannot overwrite this state, or None if they can.

    They find its numbers by their places in memory. Only the rows of the ends may have gaps between
    them, which must be the same in both.
    """
    k, v, k_ends, v_ends, lengths = state
    whole = all(x.is_contiguous() for x in (k, v, k_ends[:1], v_ends[:1], lengths))
    apart = k_ends.stride(0) == v_ends.stride(0) >= k_ends.shape[1:].numel()
    return None if whole and (apart or k.shape[0] == 1) else "a state that is not contiguous"
