"""Decoding steps of GSA on a GPU: two kernels that pass once over the state, and a norm.

Nearly all memory traffic is the state, which is small for one row: 0.5 MB for each of K~ and V~ in
the 1.3B model. So each head's memory is cut into tiles along its channels, narrow enough to keep a
large GPU busy. There are two kernels because the softmax over slots needs all tiles of K~; the
second kernel updates V~. Gates and swish are computed while their inputs are loaded.

Several tokens are as many steps, between which the state stays on chip.
"""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_gsa.ops.decoding.triton import load_mapped, norm_heads, rows, tile
from mezzo_gsa.ops.gates.triton import log_sigmoid, swish, write_strength
from mezzo_gsa.ops.gsa.arguments import GSAState, Parts, StepForm
from mezzo_gsa.ops.gsa.triton.slots import weights_of


@triton.jit
def _gates(g, s, o_g, o_s, m, inverse_damping, LOGITS: tl.constexpr):
    """Return the shares that slots keep and write, from log gates or logits, and s if given."""
    if g is not None:
        b_g = tl.load(g + o_g, mask=m, other=0.0).to(tl.float32)
        if LOGITS:
            b_g = log_sigmoid(b_g) * inverse_damping
        b_keep = tl.exp(b_g)
    else:
        b_keep = tl.where(m, 1.0, 0.0)
    b_write = write_strength(b_g) if s is None else tl.load(s + o_s, mask=m, other=0.0)
    return b_keep, b_write


@triton.jit
def _counts(lengths, certain, i_b, T):
    """Return how many tokens of a row are real, and how many of these the new state has read.

    Nobody has checked the counts on a GPU: below zero they stand for none, as in the other forms.
    """
    num_tokens = T
    if lengths is not None:
        num_tokens = tl.maximum(tl.minimum(tl.load(lengths + i_b), T), 0)
    num_certain = num_tokens
    if certain is not None:
        num_certain = tl.maximum(tl.minimum(tl.load(certain + i_b), num_tokens), 0)
    return num_tokens, num_certain


@triton.jit(do_not_specialize_on_alignment=["T"])
def step_keys_kernel(
    q, k, g, s, slots, after, parts, lengths, certain, T, stride_q, stride_k, stride_g, stride_s,
    inverse_damping,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, LOGITS: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Update a tile of one head's K~, and write its parts of K~ q for each query of the head."""
    N: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_bh = pid % N, pid // N
    i_h, i_b = i_bh % H, i_bh // H
    o_m, o_k = tl.arange(0, BM), i_n * BK + tl.arange(0, BK)
    m_m, m_k = o_m < M, o_k < K
    m = m_m[:, None] & m_k[None, :]
    o = i_bh * (M * K) + o_m[:, None] * K + o_k[None, :]
    b_slots = tl.load(slots + o, mask=m, other=0.0)
    num_tokens, num_certain = _counts(lengths, certain, i_b, T)
    for t in range(num_tokens):
        if t == num_certain:
            tl.store(after + o, b_slots, mask=m)
        row = i_b * T + t
        o_g, o_s = row * stride_g + i_h * M + o_m, row * stride_s + i_h * M + o_m
        b_keep, b_write = _gates(g, s, o_g, o_s, m_m, inverse_damping, LOGITS)
        b_k = load_mapped(k, row * stride_k + i_h * K + o_k, m_k, MAP)
        b_slots = b_keep[:, None] * b_slots + b_write[:, None] * b_k[None, :]
        for j in range(G):
            i_q = i_h * G + j
            b_q = load_mapped(q, row * stride_q + i_q * K + o_k, m_k, MAP)
            b_part = tl.sum(b_slots * b_q[None, :], axis=1)
            tl.store(parts + ((row * (H * G) + i_q) * N + i_n) * M + o_m, b_part, mask=m_m)
    if num_certain >= num_tokens:
        tl.store(after + o, b_slots, mask=m)


@triton.jit(do_not_specialize_on_alignment=["T"])
def step_values_kernel(
    v, g, s, slots, after, parts, out, lengths, certain, T, stride_v, stride_g, stride_s,
    inverse_damping, scale,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    NK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
    LOGITS: tl.constexpr, MAP: tl.constexpr, BETWEEN: tl.constexpr, SWISH_OUT: tl.constexpr,
):  # fmt: skip
    """Update a tile of one head's V~, and read it with the slot weights of each query.

    The outputs of padding are zero.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_bh = pid % NV, pid // NV
    i_h, i_b = i_bh % H, i_bh // H
    o_m, o_v, o_n = tl.arange(0, BM), i_n * BV + tl.arange(0, BV), tl.arange(0, BN)
    m_m, m_v = o_m < M, o_v < V
    m = m_m[:, None] & m_v[None, :]
    o = i_bh * (M * V) + o_m[:, None] * V + o_v[None, :]
    b_slots = tl.load(slots + o, mask=m, other=0.0)
    num_tokens, num_certain = _counts(lengths, certain, i_b, T)
    for t in range(num_tokens):
        if t == num_certain:
            tl.store(after + o, b_slots, mask=m)
        row = i_b * T + t
        o_g, o_s = row * stride_g + i_h * M + o_m, row * stride_s + i_h * M + o_m
        b_keep, b_write = _gates(g, s, o_g, o_s, m_m, inverse_damping, LOGITS)
        b_v = load_mapped(v, row * stride_v + i_h * V + o_v, m_v, MAP)
        b_slots = b_keep[:, None] * b_slots + b_write[:, None] * b_v[None, :]
        for j in range(G):
            i_q = row * (H * G) + i_h * G + j
            p_parts = parts + (i_q * NK + o_n[:, None]) * M + o_m[None, :]
            b_parts = tl.load(p_parts, mask=(o_n < NK)[:, None] & m_m[None, :], other=0.0)
            b_p = weights_of((tl.sum(b_parts, axis=0) * scale)[None, :], m_m, BETWEEN)
            b_o = tl.sum(b_slots * tl.trans(b_p), axis=0)
            if SWISH_OUT:
                b_o = swish(b_o)
            tl.store(out + i_q * V + o_v, b_o.to(out.dtype.element_ty), mask=m_v)
    if num_certain >= num_tokens:
        tl.store(after + o, b_slots, mask=m)
    if lengths is not None:
        b_zero = tl.zeros([BV], out.dtype.element_ty)
        for t in range(num_tokens, T):
            for j in range(G):
                i_q = (i_b * T + t) * (H * G) + i_h * G + j
                tl.store(out + i_q * V + o_v, b_zero, mask=m_v)


def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    state: GSAState,
    form: StepForm,
) -> Tensor:
    """Process one token and update the state; arguments and result as in `step_gsa_`."""
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    _launch(q, k, v, g, s, state, state, None, None, out, form, swish_out=False)
    return out


def run_layer_steps(
    parts: Parts,
    norm_weight: Tensor | None,
    state: GSAState,
    after: GSAState,
    lengths: Tensor | None,
    certain: Tensor | None,
    form: StepForm,
) -> Tensor:
    """Process the tokens of a projection, T of each row, as `recurrent_gsa_projected` does.

    Args:
        parts: q (B·T, HQ, K), k (B·T, H, K), v (B·T, H, V) and the gates' logits (B·T, H, M).
        norm_weight: (HQ·V,), or None.
        state: before the first token, of B rows.
        after: is written; may be `state`.
        lengths: (B,), how many tokens of each row are real; None: all.
        certain: (B,), how many of them `after` is to have read; None: all.
        form: the layer's options.

    Returns:
        y (B·T, HQ·V).
    """
    q, k, v, logits = parts
    C = q.shape[1] * v.shape[2]
    y = torch.empty((len(q), C), dtype=form.out_dtype or q.dtype, device=q.device)
    out = y if norm_weight is None else torch.empty_like(y, dtype=torch.float32)
    _launch(q, k, v, logits, None, state, after, lengths, certain, out, form, swish_out=True)
    if norm_weight is not None:
        norm_heads(out, norm_weight, None, y, form.norm_eps)
    return y


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    state: GSAState,
    after: GSAState,
    lengths: Tensor | None,
    certain: Tensor | None,
    out: Tensor,
    form: StepForm,
    *,
    swish_out: bool,
) -> None:
    """Write by both kernels the state after the certain tokens, and out, (B·T, HQ, V) or flat."""
    B, H, M, K = state.k.shape
    T = len(q) // max(1, B)
    G, V = q.shape[1] // H, state.v.shape[3]
    BK, BV = tile(B * H, K), tile(B * H, V)
    NK = ceil_div(K, BK)
    inputs = [rows(x) for x in (q, k, v, g, s)]
    strides = [0 if x is None else x.stride(0) for x in inputs]
    (x_q, x_k, x_v, x_g, x_s), (stride_q, stride_k, stride_v, *stride_gs) = inputs, strides
    parts = torch.empty((B, T, H, G, NK, M), dtype=torch.float32, device=q.device)
    lengths, certain = (None if n is None else n.contiguous() for n in (lengths, certain))
    inverse_damping = 1.0 if form.damping is None else 1 / form.damping
    sizes = {
        "H": H, "G": G, "M": M, "BM": next_power_of_2(M), "num_warps": 4,
        "LOGITS": form.damping is not None, "MAP": "swish" if form.swish else None,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        launch(
            step_keys_kernel, (B * H * NK,),
            x_q, x_k, x_g, x_s, state.k, after.k, parts, lengths, certain, T,
            stride_q, stride_k, *stride_gs, inverse_damping,
            K=K, BK=BK, **sizes,
        )  # fmt: skip
        launch(
            step_values_kernel, (B * H * ceil_div(V, BV),),
            x_v, x_g, x_s, state.v, after.v, parts, out, lengths, certain, T,
            stride_v, *stride_gs, inverse_damping, form.scale,
            V=V, NK=NK, BN=next_power_of_2(NK), BV=BV, BETWEEN=form.between,
            SWISH_OUT=swish_out, **sizes,
        )  # fmt: skip
