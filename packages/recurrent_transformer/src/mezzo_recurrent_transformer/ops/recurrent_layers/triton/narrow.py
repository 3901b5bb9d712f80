"""A whole leaf of layers with few channels in one kernel.

There the launches of a step take longer than its work. Rows of a batch never meet, so a program
takes some of them through all steps of a leaf, or back. In each step it reads all weights of its
layer, which should be in the L2 cache, and the pairs that it has written in the steps before.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import products
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import (
    gelu_bwd_of,
    gelu_of,
    norm_bwd,
    standardized,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import BackwardWork, ForwardWork

# Chosen by what a program can hold, and by one program for each of a large GPU's processors.
CHANNELS = 128
"""Most channels of a layer: a program holds rows of them, and a square of weights at a time."""
ROWS = 16
"""Rows of a program: the fewest of a matrix product."""


def is_narrow(x: Tensor, form: Form) -> bool:
    """Return whether to run leaves of tensors like x (m, S, B, C) here: all programs at once."""
    m, _, B, C = x.shape
    programs = m * ceil_div(B, ROWS)
    is_small = C <= CHANNELS and programs <= products.PROGRAMS
    return is_small and form.block_size == 1 and x.dtype in products.DTYPES


def _launch_settings(x: Tensor, w: Matrices, form: Form) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants for a leaf of tensors like x (m, S, B, C)."""
    m, _, B, C = x.shape
    F = w.up.shape[1]
    settings = {
        "C": C, "F": F, "D": C // form.num_heads, "BC": max(next_power_of_2(C), 16),
        "BF": min(max(next_power_of_2(F), 16), CHANNELS), "BM": ROWS, "NORM": form.norm,
        "PAIRS": form.of_pairs().norm, "PRECISION": products.precision(x), "num_warps": 8,
        "num_stages": 2,
    }  # fmt: skip
    return (ceil_div(B, ROWS), m), settings


@triton.jit
def _weights(p_w, o_k, o_n, stride_k, stride_n, K: tl.constexpr, N: tl.constexpr):
    """Return a part (K, N) of a matrix, 0 beyond its ends."""
    m = (o_k < K)[:, None] & (o_n < N)[None, :]
    return tl.load(p_w + o_k[:, None] * stride_k + o_n[None, :] * stride_n, mask=m, other=0.0)


@triton.jit
def _scales(weight, o_c, C: tl.constexpr):
    """Return a norm's weights (1, C)."""
    return tl.load(weight + o_c, mask=o_c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _by_head(b_x, D: tl.constexpr):
    """Return the sums (rows, heads) over the channels of each head."""
    H: tl.constexpr = b_x.shape[1] // D
    return tl.sum(tl.reshape(b_x, [b_x.shape[0], H, D]), 2)


@triton.jit
def _to_channels(b_x, D: tl.constexpr):
    """Return a head's number at each of its channels."""
    rows: tl.constexpr = b_x.shape[0]
    H: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.broadcast_to(b_x[:, :, None], [rows, H, D]), [rows, H * D])


@triton.jit(do_not_specialize=["S", "B", "first", "end"])
def narrow_leaf_kernel(
    q, kt, vt, k, v, o, lse, x, z, wo, up, down, kv, n1, n2, k_norm, slopes, S, B, first, end,
    stride_wm, eps, scale, score_scale,
    C: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
    BM: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take BM rows of a layer through the steps from `first` to `end`."""
    i_b, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_b, o_c, o_h = i_b * BM + tl.arange(0, BM), tl.arange(0, BC), tl.arange(0, BC // D)
    m_b, m_h = (o_b < B)[:, None], (o_h < C // D)[None, :]
    m = m_b & (o_c < C)[None, :]
    wo += i_m * C * C
    up += i_m * F * C
    down += i_m * C * F
    kv += i_m * stride_wm
    dtype: tl.constexpr = q.dtype.element_ty
    b_slope = tl.load(slopes + o_h, mask=o_h < C // D, other=0.0).to(tl.float32)[None, :]

    for step in range(first, end):
        row = ((i_m * S + step) * B + o_b)[:, None]
        o_row = row * C + o_c[None, :]
        # The token itself, by its temporary pair, and what comes before its leaf.
        b_q = tl.load(q + o_row, mask=m, other=0.0).to(tl.float32) * score_scale
        b_key = tl.load(kt + o_row, mask=m, other=0.0).to(tl.float32)
        b_value = tl.load(vt + o_row, mask=m, other=0.0).to(tl.float32)
        own = _by_head(b_q * b_key, D)
        o_head = row * (C // D) + o_h[None, :]
        earlier = tl.load(lse + o_head, mask=m_b & m_h, other=0.0)
        top = tl.maximum(own, earlier)
        weight, before = tl.exp(own - top), tl.exp(earlier - top)
        total = weight + before
        b_a = _to_channels(weight, D) * b_value
        b_a += _to_channels(before, D) * tl.load(o + o_row, mask=m, other=0.0)
        # The earlier tokens of the leaf.
        for j in range(first, step):
            o_j = ((i_m * S + j) * B + o_b)[:, None] * C + o_c[None, :]
            b_key = tl.load(k + o_j, mask=m, other=0.0).to(tl.float32)
            b_value = tl.load(v + o_j, mask=m, other=0.0).to(tl.float32)
            b_s = _by_head(b_q * b_key, D) - b_slope * (step - j)
            new = tl.maximum(top, b_s)
            shrink, weight = tl.exp(top - new), tl.exp(b_s - new)
            total = total * shrink + weight
            b_a = b_a * _to_channels(shrink, D) + _to_channels(weight, D) * b_value
            top = new
        b_a = (b_a / _to_channels(total, D)).to(dtype)

        # The residuals and the MLP.
        b_w = _weights(wo, o_c, o_c, 1, C, C, C)
        b_h = tl.load(x + o_row, mask=m, other=0.0).to(tl.float32)
        b_h += scale * tl.dot(b_a, b_w, input_precision=PRECISION)
        b_n = b_h
        if NORM != "none":
            b_n, _rstd = standardized(b_h, m, eps, C, NORM)
            b_n *= _scales(n2 + i_m * C, o_c, C)
        b_n = b_n.to(dtype)
        b_y = tl.zeros([BM, BC], tl.float32)
        for i_f in range(0, F, BF):
            o_f = i_f + tl.arange(0, BF)
            b_u = tl.dot(b_n, _weights(up, o_c, o_f, 1, C, C, F), input_precision=PRECISION)
            b_g = gelu_of(b_u.to(dtype).to(tl.float32), dtype).to(dtype)
            b_down = _weights(down, o_f, o_c, 1, F, F, C)
            b_y = tl.dot(b_g, b_down, b_y, input_precision=PRECISION)
        b_z = (b_h + scale * b_y).to(z.dtype.element_ty)
        tl.store(z + o_row, b_z, mask=m)

        # The persistent pair.
        b_n = b_z.to(tl.float32)  # as the backward has it
        if PAIRS != "none":
            b_n, _rstd = standardized(b_n, m, eps, C, PAIRS)
            b_n *= _scales(n1 + i_m * C, o_c, C)
        b_n = b_n.to(dtype)
        b_w = _weights(kv, o_c, o_c, 1, C, C, C)
        b_key = tl.dot(b_n, b_w, input_precision=PRECISION).to(dtype).to(tl.float32)
        if NORM != "none":
            b_key, _rstd = standardized(b_key, m, eps, C, NORM)
            b_key *= _scales(k_norm + i_m * C, o_c, C)
        tl.store(k + o_row, b_key.to(dtype), mask=m)
        b_w = _weights(kv + C * C, o_c, o_c, 1, C, C, C)
        b_value = tl.dot(b_n, b_w, input_precision=PRECISION)
        tl.store(v + o_row, b_value.to(dtype), mask=m)
        tl.debug_barrier()  # from here on threads read what other threads have written


def narrow_leaf(work: ForwardWork, leaf: range) -> bool:
    """Run the steps of a leaf in one kernel, if it is narrow; see `Parts.narrow_leaf`."""
    (stream, at), w, form = work.buffers, work.w, work.form
    if not is_narrow(at.q, form):
        return False
    m, S, B, _ = at.q.shape
    x, z, kv = stream[:-1], stream[1:], w.kv
    # A layer's outputs overwrite the next one's inputs, and programs run in any order.
    out = z if m == 1 else torch.empty_like(z)
    assert all(t.is_contiguous() for t in (*at, x, z))
    assert kv[0].is_contiguous()  # and so are all other weights
    grid, settings = _launch_settings(at.q, w, form)
    launch(
        narrow_leaf_kernel, grid,
        *at, x, out, w.o, w.up, w.down, kv, w.n1, w.n2, w.k_norm, work.slopes, S, B,
        leaf.start, leaf.stop, kv.stride(0), form.eps, form.residual_scale,
        settings["D"] ** -0.5, **settings,
    )  # fmt: skip
    if m > 1:
        rows = slice(leaf.start, leaf.stop)
        z[:, rows].copy_(out[:, rows])
    return True


@triton.jit(do_not_specialize=["S", "B", "first", "end"])
def narrow_leaf_bwd_kernel(
    q, k, v, o, lse, raw, above, z, h, u, wo, up, down, kv, n1, n2, k_norm, slopes,
    dk, dv, dpair, dnormed, dz_scaled, du, dhn, dh, dh_scaled, do, delta, S, B, first, end,
    stride_wm, eps, scale, score_scale,
    C: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
    BM: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take BM rows of a layer back through the steps from `first` to `end`."""
    i_b, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_b, o_c, o_h = i_b * BM + tl.arange(0, BM), tl.arange(0, BC), tl.arange(0, BC // D)
    m_b, m_h = (o_b < B)[:, None], (o_h < C // D)[None, :]
    m = m_b & (o_c < C)[None, :]
    wo += i_m * C * C
    up += i_m * F * C
    down += i_m * C * F
    kv += i_m * stride_wm
    dtype: tl.constexpr = do.dtype.element_ty
    b_slope = tl.load(slopes + o_h, mask=o_h < C // D, other=0.0).to(tl.float32)[None, :]

    for i in range(0, end - first):
        step = end - 1 - i
        row = ((i_m * S + step) * B + o_b)[:, None]
        o_row = row * C + o_c[None, :]
        # The pair: what later tokens of its leaf give, after what comes from beyond the leaf.
        b_key = tl.load(k + o_row, mask=m, other=0.0).to(tl.float32)
        b_value = tl.load(v + o_row, mask=m, other=0.0).to(tl.float32)
        b_dk = tl.load(dk + o_row, mask=m, other=0.0)
        b_dv = tl.load(dv + o_row, mask=m, other=0.0)
        for j in range(step + 1, end):
            after = ((i_m * S + j) * B + o_b)[:, None]
            o_j = after * C + o_c[None, :]
            b_q = tl.load(q + o_j, mask=m, other=0.0).to(tl.float32) * score_scale
            b_do = tl.load(do + o_j, mask=m, other=0.0).to(tl.float32)
            o_head = after * (C // D) + o_h[None, :]
            b_lse = tl.load(lse + o_head, mask=m_b & m_h, other=0.0)
            b_delta = tl.load(delta + o_head, mask=m_b & m_h, other=0.0)
            b_p = tl.exp(_by_head(b_q * b_key, D) - b_slope * (j - step) - b_lse)
            b_ds = b_p * (_by_head(b_do * b_value, D) - b_delta)
            b_dv += _to_channels(b_p, D) * b_do
            b_dk += _to_channels(b_ds, D) * b_q
        tl.store(dk + o_row, b_dk, mask=m)  # for the gradient of the norm's weight
        if NORM != "none":
            b_raw = tl.load(raw + o_row, mask=m, other=0.0).to(tl.float32)
            b_dk *= _scales(k_norm + i_m * C, o_c, C)
            b_dk = norm_bwd(b_dk, b_raw, m, eps, C, NORM)
        b_dkey, b_dvalue = b_dk.to(dtype), b_dv.to(dtype)
        p_pair = dpair + row * (2 * C) + o_c[None, :]
        tl.store(p_pair, b_dkey, mask=m)
        tl.store(p_pair + C, b_dvalue, mask=m)

        # The pairs' norm, and what comes from above.
        b_dn = tl.dot(b_dkey, _weights(kv, o_c, o_c, C, 1, C, C), input_precision=PRECISION)
        b_w = _weights(kv + C * C, o_c, o_c, C, 1, C, C)
        b_dn = tl.dot(b_dvalue, b_w, b_dn, input_precision=PRECISION).to(dtype)
        tl.store(dnormed + o_row, b_dn, mask=m)
        b_dz = b_dn.to(tl.float32)
        if PAIRS != "none":
            b_z = tl.load(z + o_row, mask=m, other=0.0).to(tl.float32)
            b_dz = norm_bwd(b_dz * _scales(n1 + i_m * C, o_c, C), b_z, m, eps, C, PAIRS)
        b_dz += tl.load(above + o_row, mask=m, other=0.0)
        b_scaled = (scale * b_dz).to(dtype)
        tl.store(dz_scaled + o_row, b_scaled, mask=m)

        # The MLP.
        b_dhn = tl.zeros([BM, BC], tl.float32)
        for i_f in range(0, F, BF):
            o_f = i_f + tl.arange(0, BF)
            b_down = _weights(down, o_c, o_f, F, 1, C, F)
            b_dg = tl.dot(b_scaled, b_down, input_precision=PRECISION)
            o_u, m_u = row * F + o_f[None, :], m_b & (o_f < F)[None, :]
            b_u = tl.load(u + o_u, mask=m_u, other=0.0).to(tl.float32)
            b_du, b_g = gelu_bwd_of(b_u, b_dg.to(dtype).to(tl.float32), dtype)
            b_du = b_du.to(dtype)
            tl.store(u + o_u, b_g.to(dtype), mask=m_u)
            tl.store(du + o_u, b_du, mask=m_u)
            b_up = _weights(up, o_f, o_c, C, 1, F, C)
            b_dhn = tl.dot(b_du, b_up, b_dhn, input_precision=PRECISION)
        b_dhn = b_dhn.to(dtype)
        tl.store(dhn + o_row, b_dhn, mask=m)
        b_dh = b_dhn.to(tl.float32)
        if NORM != "none":
            b_h = tl.load(h + o_row, mask=m, other=0.0)
            b_dh = norm_bwd(b_dh * _scales(n2 + i_m * C, o_c, C), b_h, m, eps, C, NORM)
        b_dh += b_dz
        tl.store(dh + o_row, b_dh, mask=m)
        b_scaled = (scale * b_dh).to(dtype)
        tl.store(dh_scaled + o_row, b_scaled, mask=m)

        # The attention's outputs.
        b_w = _weights(wo, o_c, o_c, C, 1, C, C)
        b_do = tl.dot(b_scaled, b_w, input_precision=PRECISION).to(dtype)
        tl.store(do + o_row, b_do, mask=m)
        b_o = tl.load(o + o_row, mask=m, other=0.0).to(tl.float32)
        b_delta = _by_head(b_do.to(tl.float32) * b_o, D)
        tl.store(delta + row * (C // D) + o_h[None, :], b_delta, mask=m_b & m_h)
        tl.debug_barrier()  # from here on threads read what other threads have written


def narrow_leaf_bwd(work: BackwardWork, leaf: range) -> bool:
    """Run the steps of a leaf backwards in one kernel, if it is narrow."""
    t, at, w, form = work.buffers, work.buffers.attending, work.w, work.form
    if not is_narrow(at.q, form):
        return False
    _, S, B, _ = t.do.shape
    kv = w.kv
    read = (at.q, at.k, at.v, at.o, at.lse, t.raw, t.dstream[1:], t.z, t.h, t.u)
    written = (
        *(t.dk, t.dv, t.dpair, t.dnormed, t.dz_scaled, t.du),
        *(t.dhn, t.dh, t.dh_scaled, t.do, t.delta),
    )
    assert all(x.is_contiguous() for x in (*read, *written))
    grid, settings = _launch_settings(t.do, w, form)
    launch(
        narrow_leaf_bwd_kernel, grid,
        *read, w.o, w.up, w.down, kv, w.n1, w.n2, w.k_norm, work.slopes, *written, S, B,
        leaf.start, leaf.stop, kv.stride(0), form.eps, form.residual_scale,
        settings["D"] ** -0.5, **settings,
    )  # fmt: skip
    return True
