"""Operations on single rows on a GPU: norms, residuals, the MLP's activation, head products.

Tensors are (m, S, B, C) with any strides, but for the last axis, whose stride is 1. A program holds
a whole row of C channels in registers; within a tile's steps rows are few, and latency counts.
"""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.early import early, wait

# Channels of a warp: a thread reads 16 bytes of bfloat16 at a time.
WARP = 256
# Elements of a tile that sums over rows.
TILE = 4096
# Programs that fill a large GPU, where each sums over several rows.
PROGRAMS = 512
# Elements that a program of an activation computes.
BLOCK = 1024


@triton.jit
def row_offset(i_m, i_row, B, stride_m, stride_s, stride_b):
    """Return the offsets of rows (S B) of a layer; i_row is int32, which divides fast."""
    i_s, i_b = (i_row // B).to(tl.int64), (i_row % B).to(tl.int64)
    return i_m * stride_m + i_s * stride_s + i_b * stride_b


@triton.jit
def _total(p_y, stride_p, m, P: tl.constexpr):
    """Return the sum of P partial sums, always in one order."""
    b_y = tl.load(p_y, mask=m, other=0.0).to(tl.float32)
    for i in tl.static_range(1, P):
        b_y += tl.load(p_y + i * stride_p, mask=m, other=0.0).to(tl.float32)
    return b_y


@triton.jit
def standardized(b_x, m, eps, C: tl.constexpr, NORM: tl.constexpr):
    """Return normalized rows (0 where masked) without the norm's weight, and 1 / rms or 1 / std."""
    if NORM == "layer":
        b_x = tl.where(m, b_x - tl.sum(b_x, axis=-1, keep_dims=True) / C, 0.0)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=-1, keep_dims=True) / C + eps)
    return b_x * b_rstd, b_rstd


@triton.jit
def norm_bwd(b_g, b_x, m, eps, C: tl.constexpr, NORM: tl.constexpr):
    """Return the gradient of rows before a norm, from that of `standardized` rows, b_g."""
    b_xhat, b_rstd = standardized(b_x, m, eps, C, NORM)
    b_dx = b_g - b_xhat * (tl.sum(b_g * b_xhat, axis=-1, keep_dims=True) / C)
    if NORM == "layer":
        b_dx -= tl.sum(b_g, axis=-1, keep_dims=True) / C
    return b_dx * b_rstd


@triton.jit
def _normed(b_x, weight, o_c, m, eps, C: tl.constexpr, NORM: tl.constexpr):
    """Normalize a row; `weight` points to the weights of its layer."""
    if NORM != "none":
        b_x, _rstd = standardized(b_x, m, eps, C, NORM)
        b_x *= tl.load(weight + o_c, mask=m, other=0.0).to(tl.float32)
    return b_x


@triton.jit(do_not_specialize=["B"])
def normed_kernel(
    x, weight, out, B, stride_xm, stride_xs, stride_xb, stride_om, stride_os, stride_ob,
    eps, C: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalize a row."""
    i_row, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, BC)
    m = o_c < C
    p_x = x + row_offset(i_m, i_row, B, stride_xm, stride_xs, stride_xb) + o_c
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    if NORM != "none":
        weight += i_m * C
    b_y = _normed(b_x, weight, o_c, m, eps, C, NORM)
    p_out = out + row_offset(i_m, i_row, B, stride_om, stride_os, stride_ob) + o_c
    tl.store(p_out, b_y.to(out.dtype.element_ty), mask=m)


def normed(x: Tensor, weight: Tensor | None, form: Form, out: Tensor) -> None:
    """Normalize rows (m, S, B, C) by weights (m, C)."""
    m, S, B, C = x.shape
    launch(
        normed_kernel, (S * B, m),
        x, weight, out, B, *x.stride()[:3], *out.stride()[:3], form.eps,
        NORM=form.norm, **_row(C),
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def normed_bwd_kernel(
    dy, x, weight, base, dx, scaled, partial, B,
    stride_ym, stride_ys, stride_yb, stride_xm, stride_xs, stride_xb,
    stride_bm, stride_bs, stride_bb, stride_dm, stride_ds, stride_db,
    stride_sm, stride_ss, stride_sb, stride_pp, stride_pm, stride_ps, stride_pb, eps, scale,
    P: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a row before its norm, from the normalized row's."""
    i_row, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, BC)
    m = o_c < C
    if NORM != "none":
        p_x = x + row_offset(i_m, i_row, B, stride_xm, stride_xs, stride_xb) + o_c
        b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
        b_weight = tl.load(weight + i_m * C + o_c, mask=m, other=0.0).to(tl.float32)
    if base is not None:
        p_base = base + row_offset(i_m, i_row, B, stride_bm, stride_bs, stride_bb) + o_c
        b_base = tl.load(p_base, mask=m, other=0.0).to(tl.float32)
    wait(EARLY)
    p_dy = dy + row_offset(i_m, i_row, B, stride_ym, stride_ys, stride_yb) + o_c
    if partial is not None:
        p_partial = partial + row_offset(i_m, i_row, B, stride_pm, stride_ps, stride_pb) + o_c
        b_dy = _total(p_partial, stride_pp, m, P).to(dy.dtype.element_ty)
        tl.store(p_dy, b_dy, mask=m)
    else:
        b_dy = tl.load(p_dy, mask=m, other=0.0)
    b_dx = b_dy.to(tl.float32)
    if NORM != "none":
        b_dx = norm_bwd(b_dx * b_weight, b_x, m, eps, C, NORM)
    if base is not None:
        b_dx += b_base
    if dx is not None:
        p_dx = dx + row_offset(i_m, i_row, B, stride_dm, stride_ds, stride_db) + o_c
        tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m)
    if scaled is not None:
        p_scaled = scaled + row_offset(i_m, i_row, B, stride_sm, stride_ss, stride_sb) + o_c
        tl.store(p_scaled, (scale * b_dx).to(scaled.dtype.element_ty), mask=m)


def normed_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    form: Form,
    base: Tensor | None,
    scale: float,
    dx: Tensor | None,
    scaled: Tensor | None,
    partial: Tensor | None = None,
) -> None:
    """Write dx = base + the gradient of a norm's input, and scale * dx; see `Parts.normed_bwd`."""
    m, S, B, C = x.shape
    launch(
        normed_bwd_kernel, (S * B, m),
        dy, x, weight, base, dx, scaled, partial, B,
        *dy.stride()[:3], *x.stride()[:3],
        *_strides(base), *_strides(dx), *_strides(scaled),
        *((0, 0, 0, 0) if partial is None else partial.stride()[:4]), form.eps, scale,
        P=1 if partial is None else partial.shape[0], NORM=form.norm, **_row(C), **early(x),
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "rows", "share"])
def norm_weight_grad_kernel(
    dy, x, partial, B, rows, share,
    stride_ym, stride_ys, stride_yb, stride_xm, stride_xs, stride_xb, eps,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a norm's weight over `share` rows of a layer, BR at a time."""
    i_g, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, BC)
    begin = i_g * share
    end = tl.minimum(begin + share, rows)
    b_acc = tl.zeros([BR, BC], tl.float32)
    for first in range(begin, end, BR):
        o_row = first + tl.arange(0, BR)
        m = (o_row < end)[:, None] & (o_c < C)[None, :]
        o_y = row_offset(i_m, o_row, B, stride_ym, stride_ys, stride_yb)
        o_x = row_offset(i_m, o_row, B, stride_xm, stride_xs, stride_xb)
        b_dy = tl.load(dy + o_y[:, None] + o_c[None, :], mask=m, other=0.0).to(tl.float32)
        b_x = tl.load(x + o_x[:, None] + o_c[None, :], mask=m, other=0.0).to(tl.float32)
        b_xhat, _rstd = standardized(b_x, m, eps, C, NORM)
        b_acc += b_dy * b_xhat
    p_partial = partial + (i_m * tl.num_programs(0) + i_g) * C + o_c
    tl.store(p_partial, tl.sum(b_acc, axis=0), mask=o_c < C)


def add_norm_weight_grad(dy: Tensor, x: Tensor, form: Form, total: Tensor) -> None:
    """Add the gradient of a norm's weight, summed over all rows, to `total` (m, C)."""
    m, S, B, C = x.shape
    sizes = _row(C)
    BR = max(TILE // sizes["BC"], 1)
    tiles = ceil_div(S * B, BR)
    per_program = ceil_div(tiles, max(PROGRAMS // m, 1))
    programs = ceil_div(tiles, per_program)
    # Partial sums, always added in one order: atomics would make runs differ.
    partial = torch.empty((m, programs, C), dtype=torch.float32, device=x.device)
    launch(
        norm_weight_grad_kernel, (programs, m),
        dy, x, partial, B, S * B, per_program * BR, *dy.stride()[:3], *x.stride()[:3], form.eps,
        BR=BR, NORM=form.norm, **sizes,
    )  # fmt: skip
    total.add_(partial.sum(1))


@triton.jit(do_not_specialize=["B"])
def add_normed_kernel(
    x, y, weight, h, out, B,
    stride_xm, stride_xs, stride_xb, stride_yp, stride_ym, stride_ys, stride_yb,
    stride_hm, stride_hs, stride_hb, stride_om, stride_os, stride_ob, scale, eps,
    P: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the sum of y to a row of the residual stream, and normalize the sum."""
    i_row, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, BC)
    m = o_c < C
    p_x = x + row_offset(i_m, i_row, B, stride_xm, stride_xs, stride_xb) + o_c
    p_y = y + row_offset(i_m, i_row, B, stride_ym, stride_ys, stride_yb) + o_c
    b_h = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    wait(EARLY)
    b_h += scale * _total(p_y, stride_yp, m, P)
    b_h = b_h.to(h.dtype.element_ty)
    p_h = h + row_offset(i_m, i_row, B, stride_hm, stride_hs, stride_hb) + o_c
    tl.store(p_h, b_h, mask=m)
    if NORM != "none":
        weight += i_m * C
    # From the rounded h, which the backward reads.
    b_n = _normed(b_h.to(tl.float32), weight, o_c, m, eps, C, NORM)
    p_out = out + row_offset(i_m, i_row, B, stride_om, stride_os, stride_ob) + o_c
    tl.store(p_out, b_n.to(out.dtype.element_ty), mask=m)


def add_normed(
    x: Tensor, y: Tensor, scale: float, weight: Tensor | None, form: Form, h: Tensor, out: Tensor
) -> None:
    """Write h = x + scale * (the sum of y), and its norm into `out`; see `Parts.add_normed`."""
    m, S, B, C = x.shape
    launch(
        add_normed_kernel, (S * B, m),
        x, y, weight, h, out, B, *x.stride()[:3], *y.stride()[:4],
        *h.stride()[:3], *out.stride()[:3], scale, form.eps,
        P=y.shape[0], NORM=form.norm, **_row(C), **early(x),
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def split_pair_kernel(
    kv, weight, k, v, B, stride_pm, stride_ps, stride_pb,
    stride_km, stride_ks, stride_kb, stride_vm, stride_vs, stride_vb,
    eps, C: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalize a row's key, and copy its value; one that is not finite becomes 0, its key NaN."""
    i_row, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, BC)
    m = o_c < C
    p_pair = kv + row_offset(i_m, i_row, B, stride_pm, stride_ps, stride_pb) + o_c
    b_k = tl.load(p_pair, mask=m, other=0.0).to(tl.float32)
    b_v = tl.load(p_pair + C, mask=m, other=0.0)
    if NORM != "none":
        weight += i_m * C
    b_k = _normed(b_k, weight, o_c, m, eps, C, NORM)
    m_finite = tl.abs(b_v.to(tl.float32)) < float("inf")
    b_k, b_v = tl.where(m_finite, b_k, float("nan")), tl.where(m_finite, b_v, 0.0)
    p_k = k + row_offset(i_m, i_row, B, stride_km, stride_ks, stride_kb) + o_c
    p_v = v + row_offset(i_m, i_row, B, stride_vm, stride_vs, stride_vb) + o_c
    tl.store(p_k, b_k.to(k.dtype.element_ty), mask=m)
    tl.store(p_v, b_v.to(v.dtype.element_ty), mask=m)


def split_pair(kv: Tensor, weight: Tensor | None, form: Form, k: Tensor, v: Tensor) -> None:
    """Split Wk n and Wv n (m, S, B, 2C) into normalized keys and values (m, S, B, C)."""
    m, S, B, C = k.shape
    launch(
        split_pair_kernel, (S * B, m),
        kv, weight, k, v, B, *kv.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        form.eps, NORM=form.norm, **_row(C),
    )  # fmt: skip


@triton.jit
def _share_below(b_u, DTYPE: tl.constexpr):
    """Return Φ(u), the share of a normal distribution that is below u.

    16 bits would lose the precision of erf. For them Φ is 2 to the power of a polynomial, which
    takes fewer instructions, and is right to 6e-6 from -6 to 6.
    """
    if DTYPE.is_fp32():
        return 0.5 + 0.5 * tl.erf(b_u * 0.7071067811865476)
    b_a = tl.abs(b_u)
    b_log = 6.07260322e-05 - 1.7937727e-06 * b_a
    b_log = -0.000923184951 + b_a * b_log
    b_log = 0.00847684515 + b_a * b_log
    b_log = -0.0538909358 + b_a * b_log
    b_log = -0.458541585 + b_a * b_log
    b_log = -1.15121437 + b_a * b_log
    b_tail = tl.exp2(b_a * b_log - 1.0)
    return tl.where(b_u < 0.0, b_tail, 1.0 - b_tail)


@triton.jit
def gelu_of(b_u, DTYPE: tl.constexpr):
    """Return u Φ(u), precise enough for a dtype."""
    return b_u * _share_below(b_u, DTYPE)


@triton.jit
def gelu_bwd_of(b_u, b_dg, DTYPE: tl.constexpr):
    """Return the gradient of u, and u Φ(u), precise enough for a dtype."""
    b_density = tl.exp2(b_u * b_u * -0.7213475204444817) * 0.3989422804014327
    b_below = _share_below(b_u, DTYPE)
    return b_dg * (b_below + b_u * b_density), b_u * b_below


@triton.jit(do_not_specialize=["B"])
def gelu_kernel(
    u, out, B, stride_um, stride_us, stride_ub, stride_om, stride_os, stride_ob,
    F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Compute u Φ(u) of BF channels of a row."""
    pid, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row, o_f = pid // tl.cdiv(F, BF), pid % tl.cdiv(F, BF) * BF + tl.arange(0, BF)
    p_u = u + row_offset(i_m, i_row, B, stride_um, stride_us, stride_ub) + o_f
    p_out = out + row_offset(i_m, i_row, B, stride_om, stride_os, stride_ob) + o_f
    b_u = tl.load(p_u, mask=o_f < F, other=0.0).to(tl.float32)
    b_g = gelu_of(b_u, out.dtype.element_ty)
    tl.store(p_out, b_g.to(out.dtype.element_ty), mask=o_f < F)


def gelu(u: Tensor, out: Tensor) -> None:
    """Write u Φ(u); (m, S, B, F)."""
    m, S, B, F = u.shape
    launch(
        gelu_kernel, (S * B * ceil_div(F, BLOCK), m),
        u, out, B, *u.stride()[:3], *out.stride()[:3],
        F=F, BF=BLOCK, num_warps=BLOCK // WARP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def gelu_bwd_kernel(
    u, dg, out, B, stride_um, stride_us, stride_ub, stride_gm, stride_gs, stride_gb,
    stride_om, stride_os, stride_ob, F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Compute du = dg (Φ(u) + u Φ'(u)) for BF channels of a row, and write u Φ(u) over u."""
    pid, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row, o_f = pid // tl.cdiv(F, BF), pid % tl.cdiv(F, BF) * BF + tl.arange(0, BF)
    p_u = u + row_offset(i_m, i_row, B, stride_um, stride_us, stride_ub) + o_f
    p_dg = dg + row_offset(i_m, i_row, B, stride_gm, stride_gs, stride_gb) + o_f
    p_out = out + row_offset(i_m, i_row, B, stride_om, stride_os, stride_ob) + o_f
    b_u = tl.load(p_u, mask=o_f < F, other=0.0).to(tl.float32)
    b_dg = tl.load(p_dg, mask=o_f < F, other=0.0).to(tl.float32)
    b_du, b_g = gelu_bwd_of(b_u, b_dg, out.dtype.element_ty)
    tl.store(p_out, b_du.to(out.dtype.element_ty), mask=o_f < F)
    tl.store(p_u, b_g.to(u.dtype.element_ty), mask=o_f < F)


def gelu_bwd(u: Tensor, dg: Tensor, out: Tensor) -> None:
    """Write the gradient of u, and then u Φ(u) over u; (m, S, B, F)."""
    m, S, B, F = u.shape
    launch(
        gelu_bwd_kernel, (S * B * ceil_div(F, BLOCK), m),
        u, dg, out, B, *u.stride()[:3], *dg.stride()[:3], *out.stride()[:3],
        F=F, BF=BLOCK, num_warps=BLOCK // WARP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def head_products_kernel(
    a, b, out, B, stride_am, stride_as, stride_ab, stride_bm, stride_bs, stride_bb,
    stride_om, stride_os, stride_ob,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum the products of two rows over each head."""
    i_row, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_h, o_d = tl.arange(0, BH), tl.arange(0, BD)
    m = (o_h < H)[:, None] & (o_d < D)[None, :]
    o_c = o_h[:, None] * D + o_d[None, :]
    p_a = a + row_offset(i_m, i_row, B, stride_am, stride_as, stride_ab) + o_c
    p_b = b + row_offset(i_m, i_row, B, stride_bm, stride_bs, stride_bb) + o_c
    b_a = tl.load(p_a, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(p_b, mask=m, other=0.0).to(tl.float32)
    p_out = out + row_offset(i_m, i_row, B, stride_om, stride_os, stride_ob) + o_h
    tl.store(p_out, tl.sum(b_a * b_b, axis=1), mask=o_h < H)


def head_products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the sum of a * b (m, S, B, C) over each head, (m, S, B, H) in float32."""
    m, S, B, C = a.shape
    H = out.shape[-1]
    BH, BD = next_power_of_2(H), next_power_of_2(C // H)
    launch(
        head_products_kernel, (S * B, m),
        a, b, out, B, *a.stride()[:3], *b.stride()[:3], *out.stride()[:3],
        H=H, D=C // H, BH=BH, BD=BD, num_warps=_warps(BH * BD),
    )  # fmt: skip


def _row(C: int) -> dict[str, int]:
    """Return the sizes and the warps of a program that holds a row of C channels."""
    BC = next_power_of_2(C)
    return {"C": C, "BC": BC, "num_warps": _warps(BC)}


def _warps(channels: int) -> int:
    """Return the warps for so many channels, a power of two."""
    return min(max(channels // WARP, 1), 8)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of all axes but the last."""
    return (0, 0, 0) if x is None else x.stride()[:3]
