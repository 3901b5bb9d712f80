"""Products with the weights of each layer for few rows, with what follows them.

In a tile's steps a product has as many rows as the batch, and takes as long as reading its weights.
So all of the GPU must read, in few kernels one after another. A program has some rows of the
weights. If that gives too few programs, several share these rows: each sums over its part of K, and
the kernel that reads the result adds their sums.

A norm after a product needs whole rows, which no program has. But RMSNorm only scales a row: the
next product takes the row as it is, and multiplies its sums by 1 / rms.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.ptxas import require_ptxas
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers import operands
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.early import are_few, early, wait
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import (
    add_normed,
    gelu,
    gelu_bwd,
    gelu_bwd_of,
    gelu_of,
    row_offset,
)

require_ptxas()

DTYPES = (torch.bfloat16, torch.float16)
# A row may be rounded to these before its norm; in float16 it could overflow.
WIDE_RANGE = (torch.bfloat16,)
# Programs that fill a large GPU; and the most parts of K, each of which writes a whole result.
PROGRAMS, PARTS = 132, 4


class Settings(NamedTuple):
    """How a product is divided."""

    BM: int
    """Rows of x of a program."""
    BN: int
    """Rows of the weights, or columns of the result."""
    BK: int
    """Part of K that is summed at a time."""
    P: int
    """Programs that share the sum over K."""
    num_warps: int
    num_stages: int


def _few_rows(x: Tensor) -> bool:
    """Return whether a product of x (m, s, B, K) is done here."""
    return are_few(x) and x.dtype in DTYPES


def _settings(m: int, R: int, N: int, K: int, partial: bool) -> Settings:
    """Return settings for m layers with R rows each; `partial` allows for several parts of K."""
    BM, BN, P = min(max(next_power_of_2(R), 16), 64), 64, 1
    BK, stages = (64, 5) if R > 32 and not partial else (128, 4)
    programs, parts = m * ceil_div(R, BM) * ceil_div(N, BN), min(PARTS, ceil_div(K, BK))
    while 3 * programs < 2 * PROGRAMS:
        if partial and parts >= 2 * P:
            P *= 2
        elif not partial and BN > 16:
            BN //= 2
        else:
            break
        programs *= 2
    return Settings(BM, BN, BK, P, num_warps=4, num_stages=stages)


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x Wᵀ, or write it into `out`; see `Parts.product`."""
    if not _few_rows(x):
        return operands.product(x, weight, out)
    if out is None:
        out = x.new_empty(*x.shape[:3], weight.shape[1])
    _launch(x, weight, out[None], None, "nothing")
    return out


def product_partial(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Return partial sums of x Wᵀ in float32, or write it; see `Parts.product_partial`."""
    m, s, B, K = x.shape
    N = weight.shape[1]
    # With many rows and a short sum cuBLAS is as fast.
    if not _few_rows(x) or (s * B > 64 and K < 2 * N):
        found = operands.product(x, weight, out)
        return found[None] if out is None else None
    settings = _settings(m, s * B, N, K, partial=True)
    sums = x.new_empty(settings.P, m, s, B, N, dtype=torch.float32)
    _launch(x, weight, sums, None, "nothing", settings)
    return sums


def product_add(
    x: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: float,
    norm: Tensor | None,
    form: Form,
    h: Tensor,
    out: Tensor,
) -> Tensor | None:
    """Write h = base + scale * x Wᵀ and its norm; see `Parts.product_add`."""
    if not _few_rows(x) or x.dtype not in WIDE_RANGE or form.norm == "layer":
        sums = product_partial(x, weight)
        assert sums is not None
        add_normed(base, sums, scale, norm, form, h, out)
        return None
    m, s, B, K = x.shape
    R, N = s * B, weight.shape[1]
    BM, BN, BK, _, warps, stages = _settings(m, R, N, K, partial=False)
    parts, is_normed = ceil_div(N, BN), form.norm != "none"
    squares = x.new_empty(m, R, parts, dtype=torch.float32) if is_normed else None
    launch(
        product_add_kernel, (ceil_div(R, BM) * parts, m),
        x, weight, base, norm if is_normed else None, h, out, squares, B, R, scale,
        *x.stride()[:3], *weight.stride(), *base.stride()[:3],
        0 if norm is None else norm.stride(0), *h.stride()[:3], *out.stride()[:3],
        N=N, K=K, BM=BM, BN=BN, BK=BK, PRECISION=precision(x),
        num_warps=warps, num_stages=stages, **early(x),
    )  # fmt: skip
    return squares


def product_gelu(
    x: Tensor, weight: Tensor, out: Tensor, squares: Tensor | None, form: Form
) -> None:
    """Write u Φ(u) of u = x Wᵀ, x from `product_add`; see `Parts.product_gelu`."""
    if _few_rows(x):
        _launch(x, weight, out[None], None, "gelu", squares=squares, eps=form.eps)
    else:
        gelu(operands.product(x, weight), out)


def product_gelu_bwd(x: Tensor, weight: Tensor, u: Tensor, du: Tensor) -> None:
    """Write the gradient of u from x Wᵀ, and u Φ(u) over u; see `Parts.product_gelu_bwd`."""
    if _few_rows(x):
        _launch(x, weight, du[None], u, "gelu_bwd")
    else:
        gelu_bwd(u, operands.product(x, weight), du)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    u: Tensor | None,
    after: str,
    settings: Settings | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Launch a product of x (m, s, B, K) and weights (m, N, K) to `out` (P, m, s, B, N).

    With `squares` (m, s B, S), rows are divided by their norm, which `product_add` left out.
    """
    m, s, B, K = x.shape
    R, N = s * B, weight.shape[1]
    BM, BN, BK, P, warps, stages = settings or _settings(m, R, N, K, partial=False)
    share = ceil_div(ceil_div(K, BK), P)
    parts = 1 if squares is None else squares.shape[2]
    launch(
        product_kernel, (ceil_div(R, BM) * ceil_div(N, BN), P, m),
        x, weight, u, squares, out, B, R, share, *x.stride()[:3], *weight.stride(),
        *((0, 0, 0) if u is None else u.stride()[:3]), *out.stride()[:4], eps,
        N=N, K=K, S=parts, BS=next_power_of_2(parts), BM=BM, BN=BN, BK=BK, AFTER=after,
        PRECISION=precision(x), num_warps=warps, num_stages=stages, **early(x),
    )  # fmt: skip


def precision(x: Tensor) -> str:
    """Return the precision of products, as Triton names it."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _product(
    x, weight, o_r, o_n, begin, end, i_m, B, R,
    stride_xm, stride_xs, stride_xb, stride_wm, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the products of rows of the weights and rows of x over K from `begin` to `end`.

    The weights are the left factor, which tensor cores want to be the longer.
    """
    o_k = begin + tl.arange(0, BK)
    # Indices beyond the end read the last row again, so that only a ragged K needs masks.
    o_x = row_offset(i_m, tl.minimum(o_r, R - 1), B, stride_xm, stride_xs, stride_xb)
    o_w = o_n
    if N % BN != 0:
        o_w = tl.minimum(o_n, N - 1)
    p_x = x + o_x[None, :] + o_k[:, None]
    p_w = weight + i_m * stride_wm + o_w.to(tl.int64)[:, None] * stride_wn
    p_w += o_k[None, :] * stride_wk
    b_acc = tl.zeros([BN, BM], tl.float32)
    for first in range(begin, end, BK):
        if K % BK == 0:
            b_w, b_x = tl.load(p_w), tl.load(p_x)
        else:
            m_k = first + tl.arange(0, BK) < K
            b_w = tl.load(p_w, mask=m_k[None, :], other=0.0)
            b_x = tl.load(p_x, mask=m_k[:, None], other=0.0)
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision=PRECISION)
        p_w += BK * stride_wk
        p_x += BK
    return b_acc


@triton.jit(do_not_specialize=["B", "R"])
def product_add_kernel(
    x, weight, base, norm, h, out, squares, B, R, scale,
    stride_xm, stride_xs, stride_xb, stride_wm, stride_wn, stride_wk,
    stride_bm, stride_bs, stride_bb, stride_nm, stride_hm, stride_hs, stride_hb,
    stride_om, stride_os, stride_ob,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add products to BN channels of BM rows, and sum their squares for the norm of whole rows."""
    tiles, parts = tl.cdiv(R, BM), tl.cdiv(N, BN)
    i_r, i_n, i_m = tl.program_id(0) % tiles, tl.program_id(0) // tiles, tl.program_id(1)
    i_m = i_m.to(tl.int64)
    o_r, o_n = i_r * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    m_n, m_r = o_n < N, o_r < R
    m = m_n[:, None] & m_r[None, :]
    o_base = row_offset(i_m, o_r, B, stride_bm, stride_bs, stride_bb)[None, :] + o_n[:, None]
    o_h = row_offset(i_m, o_r, B, stride_hm, stride_hs, stride_hb)[None, :] + o_n[:, None]
    o_out = row_offset(i_m, o_r, B, stride_om, stride_os, stride_ob)[None, :] + o_n[:, None]
    wait(EARLY)
    # Read before the product, which hides the wait for it.
    b_base = tl.load(base + o_base, mask=m, other=0.0).to(tl.float32)
    if squares is not None:
        b_norm = tl.load(norm + i_m * stride_nm + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_acc = _product(
        x, weight, o_r, o_n, 0, K, i_m, B, R,
        stride_xm, stride_xs, stride_xb, stride_wm, stride_wn, stride_wk,
        N, K, BM, BN, BK, PRECISION,
    )  # fmt: skip
    b_h = (b_base + scale * b_acc).to(h.dtype.element_ty)
    tl.store(h + o_h, b_h, mask=m)
    b_h = b_h.to(tl.float32)  # as the backward has it
    if squares is not None:
        b_squares = tl.sum(tl.where(m, b_h * b_h, 0.0), 0)
        tl.store(squares + (i_m * R + o_r) * parts + i_n, b_squares, mask=m_r)
        b_h *= b_norm[:, None]
    tl.store(out + o_out, b_h.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["B", "R", "share"])
def product_kernel(
    x, weight, u, squares, out, B, R, share,
    stride_xm, stride_xs, stride_xb, stride_wm, stride_wn, stride_wk,
    stride_um, stride_us, stride_ub, stride_op, stride_om, stride_os, stride_ob, eps,
    N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AFTER: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum the products of BM rows of x and BN rows of the weights over `share` times BK of K."""
    tiles = tl.cdiv(R, BM)
    i_r, i_n, i_p = tl.program_id(0) % tiles, tl.program_id(0) // tiles, tl.program_id(1)
    i_m = tl.program_id(2).to(tl.int64)
    o_r, o_n = i_r * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    wait(EARLY)
    if squares is not None:
        # Read before the product, which hides the wait for them.
        o_s = tl.arange(0, BS)
        p_squares = squares + (i_m * R + o_r)[:, None] * S + o_s[None, :]
        b_squares = tl.load(p_squares, mask=(o_r < R)[:, None] & (o_s < S)[None, :], other=0.0)
    begin = i_p * share * BK  # which is known to be aligned
    b_acc = _product(
        x, weight, o_r, o_n, begin, tl.minimum(begin + share * BK, K), i_m, B, R,
        stride_xm, stride_xs, stride_xb, stride_wm, stride_wn, stride_wk,
        N, K, BM, BN, BK, PRECISION,
    )  # fmt: skip
    if squares is not None:
        b_acc *= tl.rsqrt(tl.sum(b_squares, 1) / K + eps)[None, :]
    m = (o_n < N)[:, None] & (o_r < R)[None, :]
    # Round as if the product had been stored and loaded again.
    b_out = b_acc.to(out.dtype.element_ty)
    if AFTER == "gelu":
        b_out = gelu_of(b_out.to(tl.float32), out.dtype.element_ty)
    elif AFTER == "gelu_bwd":
        p_u = u + row_offset(i_m, o_r, B, stride_um, stride_us, stride_ub)[None, :] + o_n[:, None]
        b_u = tl.load(p_u, mask=m, other=0.0).to(tl.float32)
        b_out, b_g = gelu_bwd_of(b_u, b_out.to(tl.float32), out.dtype.element_ty)
        tl.store(p_u, b_g.to(u.dtype.element_ty), mask=m)
    o_out = i_p.to(tl.int64) * stride_op
    o_out += row_offset(i_m, o_r, B, stride_om, stride_os, stride_ob)
    p_out = out + o_out[None, :] + o_n[:, None]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m)
