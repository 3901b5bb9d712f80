"""Attention while decoding, on a GPU. Most of its time is spent reading keys and values once.

A program handles one key and value head of one row, for all queries that read it, and loops over
its share of the row's slots. If rows and heads are too few to keep the GPU busy, each row's tokens
are split evenly among several programs, and a second kernel combines their partial results. The
number of programs depends on shapes only, so a CUDA graph stays valid while the rows grow.

`append_token_` puts the new tokens into the cache before, in one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_core.ops.launch import launch
from mezzo_core.ops.online_softmax.triton import add_scores, merge
from mezzo_core.ops.ptxas import require_ptxas
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from mezzo_core.ops.tables import kept
from mezzo_core.positions import RADIANS, RopeScaling, rope_steps

require_ptxas()

LOG2_E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(RADIANS)

# Programs that keep a large GPU busy: about four for each of 132 multiprocessors.
PROGRAMS = 512
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["S"])
def decode_attention_fwd_kernel(
    q, k, v, lengths, slopes, out, lse, scale, S,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Attend from G queries to one share of a row's slots; softmax and `lse` use base 2."""
    pid = tl.program_id(0).to(tl.int64)
    i_split, i_h, i_b = pid % NUM_SPLITS, pid // NUM_SPLITS % H, pid // NUM_SPLITS // H
    o_g, o_d, o_s = tl.arange(0, BG), tl.arange(0, D), tl.arange(0, BS)
    o_q = (i_b * H + i_h) * G + o_g
    m_g = (o_g < G)[:, None]
    n = tl.load(lengths + i_b).to(tl.int64)
    valid = tl.minimum(n, S)
    span = tl.cdiv(valid, NUM_SPLITS * BS) * BS
    start = tl.minimum(i_split * span, valid)
    end = tl.minimum(start + span, valid)

    b_q = tl.load(q + o_q[:, None] * D + o_d[None, :], mask=m_g, other=0.0)
    if HAS_SLOPES:
        b_slopes = tl.load(slopes + i_h * G + o_g, mask=o_g < G, other=0.0)[:, None] * LOG2_E
        newest = (n + S - 1) % S
    b_top = tl.full([BG], float("-inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    b_out = tl.zeros([BG, D], tl.float32)
    for i_s in range(tl.cdiv(end - start, BS)):
        o_slot = start + i_s * BS + o_s
        m_s = o_slot < end
        p_k = k + i_b * stride_kb + o_slot[:, None] * stride_ks + i_h * stride_kh + o_d[None, :]
        p_v = v + i_b * stride_vb + o_slot[:, None] * stride_vs + i_h * stride_vh + o_d[None, :]
        b_k = tl.load(p_k, mask=m_s[:, None], other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scale * LOG2_E)
        if HAS_SLOPES:
            distance = newest - o_slot
            distance += tl.where(distance < 0, S, 0)
            b_scores -= b_slopes * distance[None, :].to(tl.float32)
        b_scores = tl.where(m_s[None, :], b_scores, float("-inf"))
        # Every tile has at least one token, so the maximum is finite.
        b_p, b_out, b_top, b_sum = add_scores(b_out, b_top, b_sum, b_scores, 1.0)
        b_v = tl.load(p_v, mask=m_s[:, None], other=0.0)
        b_out += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")

    empty = b_sum == 0.0
    b_sum = tl.where(empty, 1.0, b_sum)
    b_out /= b_sum[:, None]
    o_out = o_q * NUM_SPLITS + i_split
    p_out = out + o_out[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_g)
    if NUM_SPLITS > 1:
        b_lse = tl.where(empty, float("-inf"), b_top + tl.log2(b_sum))
        tl.store(lse + o_out, b_lse, mask=o_g < G)


@triton.jit
def decode_attention_fwd_kernel_combine(
    parts, lse, out, NUM_SPLITS: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):
    """Combine the partial results of one query head by their log-sum-exp (base 2)."""
    i_q = tl.program_id(0).to(tl.int64)
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
    m_n = o_n < NUM_SPLITS
    b_lse = tl.load(lse + i_q * NUM_SPLITS + o_n, mask=m_n, other=float("-inf"))
    p_parts = parts + (i_q * NUM_SPLITS + o_n[:, None]) * D + o_d[None, :]
    b_parts = tl.load(p_parts, mask=m_n[:, None], other=0.0)
    b_out, _ = merge(b_parts, b_lse)
    tl.store(out + i_q * D + o_d, b_out.to(out.dtype.element_ty))


def decode_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slopes: Tensor | None, scale: float
) -> Tensor:
    """Attend; arguments and result as in `reference.decode_attention_fwd`, q contiguous."""
    B, HQ, D = q.shape
    S, H = k.shape[1:3]
    if q.numel() == 0 or S == 0:
        return torch.zeros_like(q)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    BS = 16384 // (D * q.element_size())  # 16 KB of keys a tile
    BS = min(max(BS, 16), 128)
    N = num_splits(B * H, S, BS)
    out = torch.empty_like(q)
    parts, lse = out, None
    if N > 1:
        parts = torch.empty((B, HQ, N, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((B, HQ, N), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        launch(
            decode_attention_fwd_kernel, (B * H * N,),
            q, k, v, lengths.contiguous(), slopes, parts, lse, scale, S,
            *k.stride()[:3], *v.stride()[:3],
            H=H, G=HQ // H, D=D, BG=max(next_power_of_2(HQ // H), 16), BS=BS,
            NUM_SPLITS=N, HAS_SLOPES=slopes is not None, num_warps=4, num_stages=3,
        )  # fmt: skip
        if lse is not None:
            launch(
                decode_attention_fwd_kernel_combine, (B * HQ,),
                parts, lse, out, NUM_SPLITS=N, BN=next_power_of_2(N), D=D, num_warps=4,
            )  # fmt: skip
    return out


def num_splits(num_heads: int, num_slots: int, tile: int) -> int:
    """Return how many programs share a head of a row: a power of two, each with a tile or more."""
    wanted = min(max(PROGRAMS // num_heads, 1), ceil_div(num_slots, tile), MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def _load_halves(p_x, stride_h, stride_d, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr):
    """Return the left and the right halves of a token's heads, (BH, D/2) float32 each."""
    o_h, o_d = tl.arange(0, BH)[:, None], tl.arange(0, D // 2)[None, :]
    p_left = p_x + o_h * stride_h + o_d * stride_d
    b_left = tl.load(p_left, mask=o_h < H, other=0.0).to(tl.float32)
    b_right = tl.load(p_left + D // 2 * stride_d, mask=o_h < H, other=0.0).to(tl.float32)
    return b_left, b_right


@triton.jit
def _store_halves(
    p_x, stride_h, stride_d, b_left, b_right, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr
):
    o_h, o_d = tl.arange(0, BH)[:, None], tl.arange(0, D // 2)[None, :]
    p_left = p_x + o_h * stride_h + o_d * stride_d
    tl.store(p_left, b_left.to(p_x.dtype.element_ty), mask=o_h < H)
    tl.store(p_left + D // 2 * stride_d, b_right.to(p_x.dtype.element_ty), mask=o_h < H)


@triton.jit(do_not_specialize=["S"])
def append_token_kernel(
    q, k, v, k_cache, v_cache, lengths, steps, out, S,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kd,
    stride_vb, stride_vh, stride_vd, stride_kcb, stride_kcs, stride_kch, stride_kcd,
    stride_vcb, stride_vcs, stride_vch, stride_vcd, stride_n,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):  # fmt: skip
    """Append one row's token, all of its heads: no other program reads the row's length."""
    i_b = tl.program_id(0).to(tl.int64)
    p_n = lengths + i_b * stride_n
    # All loads come first, so that they are in flight together.
    n = tl.load(p_n).to(tl.int64)
    b_q, b_q2 = _load_halves(q + i_b * stride_qb, stride_qh, stride_qd, HQ, BQ, D)
    b_k, b_k2 = _load_halves(k + i_b * stride_kb, stride_kh, stride_kd, H, BH, D)
    b_v, b_v2 = _load_halves(v + i_b * stride_vb, stride_vh, stride_vd, H, BH, D)
    if HAS_ROPE:
        b_turned = n * tl.load(steps + tl.arange(0, D // 2))  # whole turns are lost
        b_angle = b_turned.to(tl.float32) * UNIT
        b_cos, b_sin = tl.cos(b_angle)[None, :], tl.sin(b_angle)[None, :]
        b_q, b_q2 = b_q * b_cos - b_q2 * b_sin, b_q2 * b_cos + b_q * b_sin
        b_k, b_k2 = b_k * b_cos - b_k2 * b_sin, b_k2 * b_cos + b_k * b_sin
    slot = n % S
    p_k = k_cache + i_b * stride_kcb + slot * stride_kcs
    p_v = v_cache + i_b * stride_vcb + slot * stride_vcs
    _store_halves(out + i_b * HQ * D, D, 1, b_q, b_q2, HQ, BQ, D)
    _store_halves(p_k, stride_kch, stride_kcd, b_k, b_k2, H, BH, D)
    _store_halves(p_v, stride_vch, stride_vcd, b_v, b_v2, H, BH, D)
    tl.debug_barrier()  # all threads must read the length before one overwrites it
    tl.store(p_n, (n + 1).to(lengths.dtype.element_ty))


def append_token_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    rope_base: float | None,
    rope_scaling: RopeScaling | None,
) -> Tensor:
    """Append; arguments and result as in `reference.append_token_`."""
    B, HQ, D = q.shape
    S, H = k_cache.shape[1:3]
    out = torch.empty((B, HQ, D), dtype=k_cache.dtype, device=q.device)
    steps = None if rope_base is None else _rope_steps(D, rope_base, rope_scaling, device=q.device)
    BQ, BH = next_power_of_2(HQ), next_power_of_2(H)
    if B:
        strides = (*q.stride(), *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride())
        with torch.cuda.device_of(q):
            launch(
                append_token_kernel, (B,),
                q, k, v, k_cache, v_cache, lengths, steps, out, S,
                *strides, lengths.stride(0), HQ=HQ, H=H, D=D, BQ=BQ, BH=BH,
                HAS_ROPE=steps is not None, num_warps=min(max(BQ * D // 512, 1), 16),
            )  # fmt: skip
    return out


_rope_steps = kept(rope_steps)
