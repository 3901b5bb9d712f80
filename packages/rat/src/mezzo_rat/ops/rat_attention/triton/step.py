"""One decoding step of RAT attention on a GPU, by two kernels.

The first attends to the ends of closed chunks, which is nearly all of the memory traffic. Where
rows and heads are too few to keep the GPU busy, several programs share the ends of a row. Their
number follows from shapes alone, so a captured CUDA graph stays right as rows grow. The second
kernel advances the recurrence by the new token, merges the partial results, applies the output gate
and writes the state.
"""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import next_power_of_2
from mezzo_core.ops.tables import kept
from mezzo_core.positions import rope_angles
from torch import Tensor

from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.chunks import Sizes
from mezzo_rat.ops.rat_attention.state import RATState
from mezzo_rat.ops.rat_attention.triton.elementwise import forget_gates
from mezzo_rat.ops.rat_attention.triton.launches import LOG2_E

# Programs that fill a large GPU, and the bytes of keys that a program reads at a time.
PROGRAMS, TILE = 1024, 16384
WARPS, STAGES = 4, 3


@triton.jit
def _rotated(p_x, i_d, cos, sin, place, D: tl.constexpr, ROPE: tl.constexpr):
    """Load a head's channels i_d, rotated by the angles of a place."""
    b_x = tl.load(p_x + i_d).to(tl.float32)
    if ROPE != "none":
        half: tl.constexpr = D // 2
        b_other = tl.load(p_x + (i_d + half) % D).to(tl.float32)
        b_cos = tl.load(cos + place * half + i_d % half)
        b_sin = tl.load(sin + place * half + i_d % half)
        b_x = b_x * b_cos + tl.where(i_d < half, -b_other, b_other) * b_sin
    return b_x


@triton.jit(do_not_specialize=["N"])
def step_past_kernel(
    x, k_ends, v_ends, lengths, cos, sin, parts, tops, sums, seen,
    N, stride_b, stride_eb, scale2,
    OQ: tl.constexpr, L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Attend from one head of one row to this program's share of the closed chunks' ends.

    A matrix product needs at least 16 queries, so all 16 rows of the tile are the same query.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_s, i_h, i_b = pid % SPLITS, pid // SPLITS % H, pid // SPLITS // H
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
    n = tl.load(lengths + i_b)
    if (i_h == 0) & (i_s == 0):
        tl.store(seen + i_b, n)
    closed = tl.minimum(n // L, N)
    share = tl.cdiv(closed, SPLITS * BN) * BN
    begin = i_s * share
    end = tl.minimum(begin + share, closed)
    # Beyond the room, the table has no angles for the token's place: take the last ones.
    place = tl.minimum(n, N * L) if ROPE == "token" else closed
    b_q = _rotated(x + i_b * stride_b + OQ + (i_h % G) * D, o_d, cos, sin, place, D, ROPE)
    b_q = tl.broadcast_to(b_q[None, :], [16, D]).to(k_ends.dtype.element_ty)
    b_top = tl.full([16], float("-inf"), tl.float32)
    b_sum = tl.zeros([16], tl.float32)
    b_acc = tl.zeros([16, D], tl.float32)
    o_end = i_b * stride_eb + i_h * D + o_d[None, :]
    for j in range(begin, end, BN):
        m = j + o_n < end
        o_j = o_end + (j + o_n)[:, None] * (H * D)
        b_k = tl.load(k_ends + o_j, mask=m[:, None], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale2
        b_s = tl.where(m[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))  # finite, as every tile holds an end
        b_p, b_shrink = tl.exp2(b_s - b_new[:, None]), tl.exp2(b_top - b_new)
        b_v = tl.load(v_ends + o_j, mask=m[:, None], other=0.0)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_top = b_new
    one = tl.arange(0, 16) == 0
    tl.store(parts + pid * D + o_d, tl.sum(tl.where(one[:, None], b_acc, 0.0), axis=0))
    tl.store(sums + pid, tl.sum(tl.where(one, b_sum, 0.0), axis=0))
    tl.store(tops + pid, tl.max(b_top, axis=0))


@triton.jit(do_not_specialize=["N"])
def step_new_kernel(
    x, bias, k, v, k_ends, v_ends, lengths, cos, sin, parts, tops, sums, seen, y,
    N, stride_b, stride_eb, scale2,
    OV: tl.constexpr, OG: tl.constexpr, OQ: tl.constexpr, OK: tl.constexpr,
    L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, ROPE: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Advance one head of one row by its new token, and merge it with the attention to ends."""
    pid = tl.program_id(0).to(tl.int64)
    i_h, i_b = pid % H, pid // H
    o_d = tl.arange(0, D)
    o_other = (o_d + D // 2) % D
    n = tl.load(seen + i_b)
    opens = n % L == 0
    p_x = x + i_b * stride_b + i_h * D
    p_g = x + i_b * stride_b + (i_h % G) * D
    p_k, p_v = k + pid * D, v + pid * D
    b_q = tl.load(p_g + OQ + o_d).to(tl.float32)
    b_v = tl.load(p_x + OV + o_d).to(tl.float32)
    b_bias, b_bias_other = 0.0, 0.0
    if bias is not None:
        b_bias = tl.load(bias + i_h * D + o_d).to(tl.float32)
        b_bias_other = tl.load(bias + i_h * D + o_other).to(tl.float32)
    keep, write = forget_gates(tl.load(p_x + OG + o_d), b_bias)
    b_k = write * tl.load(p_g + OK + o_d).to(tl.float32)
    b_k += tl.where(opens, 0.0, keep * tl.load(p_k + o_d))
    b_v = write * b_v + tl.where(opens, 0.0, keep * tl.load(p_v + o_d))
    # Compute the other half of k~ again: the rotation of a chunk's end pairs channels that two
    # threads hold.
    keep, write = forget_gates(tl.load(p_x + OG + o_other), b_bias_other)
    b_other = write * tl.load(p_g + OK + o_other).to(tl.float32)
    b_other += tl.where(opens, 0.0, keep * tl.load(p_k + o_other))
    tl.debug_barrier()  # all threads have read the state before one overwrites it
    tl.store(p_k + o_d, b_k)
    tl.store(p_v + o_d, b_v)
    closes = ((n + 1) % L == 0) & (n // L < N)
    b_end = b_k
    if ROPE != "none":
        half: tl.constexpr = D // 2
        place = n if ROPE == "token" else n // L
        b_cos = tl.load(cos + place * half + o_d % half, mask=(o_d >= 0) & closes, other=0.0)
        b_sin = tl.load(sin + place * half + o_d % half, mask=(o_d >= 0) & closes, other=0.0)
        b_end = b_k * b_cos + tl.where(o_d < half, -b_other, b_other) * b_sin
    o_end = i_b * stride_eb + (n // L) * (H * D) + i_h * D + o_d
    m_end = (o_d >= 0) & closes
    tl.store(k_ends + o_end, b_end.to(k_ends.dtype.element_ty), mask=m_end)
    tl.store(v_ends + o_end, b_v.to(v_ends.dtype.element_ty), mask=m_end)

    own = tl.sum(b_k * b_q, axis=0) * scale2
    o_s = tl.arange(0, SPLITS)
    b_top = tl.load(tops + pid * SPLITS + o_s)
    top = tl.maximum(tl.max(b_top, axis=0), own)
    b_w = tl.exp2(b_top - top)
    w_own = tl.exp2(own - top)
    b_parts = tl.load(parts + (pid * SPLITS + o_s)[:, None] * D + o_d[None, :])
    b_y = tl.sum(b_w[:, None] * b_parts, axis=0) + w_own * b_v
    b_y /= tl.sum(b_w * tl.load(sums + pid * SPLITS + o_s), axis=0) + w_own
    if HAS_Z:
        b_y *= tl.sigmoid(tl.load(p_x + o_d).to(tl.float32))
    tl.store(y + pid * D + o_d, b_y.to(y.dtype.element_ty))
    if i_h == 0:
        tl.store(lengths + i_b, n + 1)


def step(x: Tensor, bias: Tensor | None, state: RATState, form: Form) -> Tensor:
    """Decode one token of every row, and update the state.

    Args:
        x: (B, 1, W) projection.
        bias: (H, D), or None.
        state: overwritten; contiguous, except that rows of the ends may have any distance.
        form: what to compute.

    Returns:
        y (B, 1, H, D).
    """
    sizes = Sizes.of(x, form)
    B, H, G, D = sizes.B, sizes.H, sizes.G, sizes.D
    N = state.k_ends.shape[1]
    BN = max(TILE // (D * x.element_size()), 16)
    splits = num_splits(B * H, N, BN)
    parts = torch.empty((B * H, splits, D), dtype=torch.float32, device=x.device)
    tops, sums = torch.empty((2, B * H, splits), dtype=torch.float32, device=x.device)
    seen = torch.empty_like(state.lengths)
    y = torch.empty((B, 1, H, D), dtype=x.dtype, device=x.device)
    angles: tuple[Tensor | None, Tensor | None] = (None, None)
    if form.rope is not None:
        places = N if form.rope == "chunk" else N * form.chunk_size
        angles = _angles(next_power_of_2(places) + 1, D, form.rope_base, device=x.device)
    scale2, rope = form.scale * LOG2_E, form.rope or "none"
    strides = x.stride(0), state.k_ends.stride(0)
    settings = {"L": form.chunk_size, "G": G, "H": H, "D": D, "SPLITS": splits, "ROPE": rope}
    with torch.cuda.device_of(x):
        launch(
            step_past_kernel, (B * H * splits,),
            x, state.k_ends, state.v_ends, state.lengths, *angles, parts, tops, sums, seen,
            N, *strides, scale2, OQ=sizes.offsets["OQ"], BN=BN, num_warps=WARPS, num_stages=STAGES,
            **settings,
        )  # fmt: skip
        launch(
            step_new_kernel, (B * H,),
            x, bias, state.k, state.v, state.k_ends, state.v_ends, state.lengths, *angles,
            parts, tops, sums, seen, y, N, *strides, scale2,
            HAS_Z=sizes.has_z, num_warps=1, **settings, **sizes.offsets,
        )  # fmt: skip
    return y


def num_splits(num_heads: int, num_slots: int, tile: int) -> int:
    """Return how many programs share a head of a row: a power of two, each with a tile or more."""
    wanted = min(max(PROGRAMS // num_heads, 1), max(num_slots // tile, 1))
    return 1 << (wanted.bit_length() - 1)


@kept
def _angles(
    num_places: int, dim: int, base: float, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a table of angles."""
    return rope_angles(torch.arange(num_places, device=device), dim, base)
