"""Attention while decoding, on a GPU: each key and value is read once, and nothing else counts.

A program owns one key and value head of one row, with all the queries that read it, and walks over
its share of the row's slots. Where rows and heads are too few to keep the GPU busy, each row's
tokens are split among several programs, evenly by its real length; a second kernel then combines
their parts. How many there are follows from shapes alone, so a CUDA graph stays right as rows grow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)

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
    """Attend from G queries to one share of a row's slots; the softmax and `lse` are to base 2."""
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
        # Every tile holds a token, so the new maximum is finite.
        b_new = tl.maximum(b_top, tl.max(b_scores, axis=1))
        b_scores = tl.exp2(b_scores - b_new[:, None])
        b_decay = tl.exp2(b_top - b_new)
        b_sum = b_sum * b_decay + tl.sum(b_scores, axis=1)
        b_v = tl.load(p_v, mask=m_s[:, None], other=0.0)
        b_out *= b_decay[:, None]
        b_out += tl.dot(b_scores.to(b_v.dtype), b_v, input_precision="ieee")
        b_top = b_new

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
    """Combine the parts of one query head by their log-sum-exp (to base 2)."""
    i_q = tl.program_id(0).to(tl.int64)
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
    m_n = o_n < NUM_SPLITS
    b_lse = tl.load(lse + i_q * NUM_SPLITS + o_n, mask=m_n, other=float("-inf"))
    b_top = tl.max(b_lse, axis=0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_w = tl.exp2(b_lse - b_top)
    b_sum = tl.sum(b_w, axis=0)
    b_w /= tl.where(b_sum == 0.0, 1.0, b_sum)
    p_parts = parts + (i_q * NUM_SPLITS + o_n[:, None]) * D + o_d[None, :]
    b_parts = tl.load(p_parts, mask=m_n[:, None], other=0.0)
    b_out = tl.sum(b_w[:, None] * b_parts, axis=0)
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
        decode_attention_fwd_kernel[(B * H * N,)](
            q, k, v, lengths.contiguous(), slopes, parts, lse, scale, S,
            *k.stride()[:3], *v.stride()[:3],
            H=H, G=HQ // H, D=D, BG=max(triton.next_power_of_2(HQ // H), 16), BS=BS,
            NUM_SPLITS=N, HAS_SLOPES=slopes is not None, num_warps=4, num_stages=3,
        )  # fmt: skip
        if lse is not None:
            decode_attention_fwd_kernel_combine[(B * HQ,)](
                parts, lse, out, NUM_SPLITS=N, BN=triton.next_power_of_2(N), D=D, num_warps=4
            )
    return out


def num_splits(num_heads: int, num_slots: int, tile: int) -> int:
    """Return how many programs share a row's head: a power of two, none with less than a tile."""
    wanted = min(max(PROGRAMS // num_heads, 1), triton.cdiv(num_slots, tile), MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)
