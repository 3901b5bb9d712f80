"""All products of a step in one kernel, for layers with few channels.

There the work of a launch is little beside the launch itself. So a program takes some rows through
the whole MLP, from the attention's outputs to the products for the persistent pairs, or back. Each
program reads all weights, which should be in the L2 cache.
"""

from typing import Any

import triton
import triton.language as tl
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.buffers import BackwardBuffers
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import products
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.activation import (
    gelu_bwd_of,
    gelu_of,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import (
    between,
    norm_bwd,
    standardized,
)

# Chosen by what a program can hold, and by one program for each of a large GPU's processors: not
# timed.
CHANNELS = 128
"""Of a layer, at most: a program holds rows of them, and a square of weights at a time."""
ROWS = 16
"""Of a program: the fewest of a matrix product."""


def is_narrow(x: Tensor) -> bool:
    """Return whether a step of tensors like x (m, b, B, C) is done here: programs run at once."""
    m, b, B, C = x.shape
    programs = m * ceil_div(b * B, ROWS)
    return C <= CHANNELS and programs <= products.PROGRAMS and x.dtype in products.DTYPES


def _launch(x: Tensor, w: Matrices, form: Form) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants for a step of tensors like x (m, b, B, C)."""
    m, b, B, C = x.shape
    F = w.up.shape[1]
    settings = {
        "C": C, "F": F, "BC": max(next_power_of_2(C), 16),
        "BF": min(max(next_power_of_2(F), 16), CHANNELS), "BM": ROWS, "NORM": form.norm,
        "PAIRS": form.of_pairs().norm, "PRECISION": products.precision(x), "num_warps": 4,
        "num_stages": 2,
    }  # fmt: skip
    return (ceil_div(b * B, ROWS), m), settings


@triton.jit
def _weights(p_w, o_k, o_n, stride_k, stride_n, K: tl.constexpr, N: tl.constexpr):
    """Return a part (K, N) of a matrix, 0 beyond its ends."""
    m = (o_k < K)[:, None] & (o_n < N)[None, :]
    return tl.load(p_w + o_k[:, None] * stride_k + o_n[None, :] * stride_n, mask=m, other=0.0)


@triton.jit
def _scales(weight, o_c, C: tl.constexpr):
    """Return a norm's weights (1, C)."""
    return tl.load(weight + o_c, mask=o_c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["R"])
def narrow_mlp_step_kernel(
    a, x, o, up, down, kv, n1, n2, z, pairs, R, stride_xm, stride_zm, stride_wm,
    stride_n1, stride_n2, eps, scale,
    C: tl.constexpr, F: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr,
    NORM: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take BM of the R rows of a layer from the attention's outputs to its outputs."""
    i_r, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_r, o_c = i_r * BM + tl.arange(0, BM), tl.arange(0, BC)
    m = (o_r < R)[:, None] & (o_c < C)[None, :]
    o_row = o_r[:, None] * C + o_c[None, :]
    o += i_m * C * C
    up += i_m * F * C
    down += i_m * C * F
    kv += i_m * stride_wm
    dtype: tl.constexpr = a.dtype.element_ty

    b_a = tl.load(a + i_m * R * C + o_row, mask=m, other=0.0)
    b_o = _weights(o, o_c, o_c, 1, C, C, C)
    b_h = tl.load(x + i_m * stride_xm + o_row, mask=m, other=0.0).to(tl.float32)
    b_h += scale * tl.dot(b_a, b_o, input_precision=PRECISION)
    b_n = b_h
    if NORM != "none":
        b_n, _rstd = standardized(b_h, m, eps, C, NORM)
        b_n *= _scales(n2 + i_m * stride_n2, o_c, C)
    b_n = b_n.to(dtype)
    b_y = tl.zeros([BM, BC], tl.float32)
    for first in range(0, F, BF):
        o_f = first + tl.arange(0, BF)
        b_u = tl.dot(b_n, _weights(up, o_c, o_f, 1, C, C, F), input_precision=PRECISION)
        b_g = gelu_of(b_u.to(dtype).to(tl.float32), dtype).to(dtype)
        b_y = tl.dot(b_g, _weights(down, o_f, o_c, 1, F, F, C), b_y, input_precision=PRECISION)
    b_z = (b_h + scale * b_y).to(z.dtype.element_ty)
    tl.store(z + i_m * stride_zm + o_row, b_z, mask=m)
    b_n = b_z.to(tl.float32)  # as the backward has it
    if PAIRS != "none":
        b_n, _rstd = standardized(b_n, m, eps, C, PAIRS)
        b_n *= _scales(n1 + i_m * stride_n1, o_c, C)
    b_n = b_n.to(dtype)
    for half in tl.static_range(2):
        b_pair = tl.dot(b_n, _weights(kv, o_c, o_c, 1, C, C, C), input_precision=PRECISION)
        p_pair = pairs + i_m * R * 2 * C + o_r[:, None] * (2 * C) + half * C + o_c[None, :]
        tl.store(p_pair, b_pair.to(dtype), mask=m)
        kv += C * C


def narrow_mlp_step(a: Tensor, x: Tensor, w: Matrices, form: Form, z: Tensor) -> Tensor:
    """Write the outputs of a step's tokens, and return Wk n and Wv n; see `mlp.mlp_step`."""
    m, b, B, C = a.shape
    kv, pairs = w.kv, a.new_empty(m, b, B, 2 * C)
    # One layer's outputs may be where the next one's inputs are, which are to be read first.
    out = z if m == 1 else z.new_empty(z.shape)
    assert a.is_contiguous()
    assert all(t[0].is_contiguous() for t in (x, z, kv))  # and so are all other weights
    grid, settings = _launch(a, w, form)
    narrow_mlp_step_kernel[grid](
        a, x, w.o, w.up, w.down, kv, w.n1, w.n2, out, pairs, b * B, x.stride(0), out.stride(0),
        kv.stride(0), between(w.n1), between(w.n2), form.eps, form.residual_scale, **settings,
    )  # fmt: skip
    if m > 1:
        z.copy_(out)
    return pairs


@triton.jit(do_not_specialize=["R", "stride_m"])
def narrow_mlp_step_bwd_kernel(
    dpair, above, z, h, u, o, up, down, kv, n1, n2,
    dnormed, dz_scaled, du, dhn, dh, dh_scaled, do, R, stride_m, stride_wm,
    stride_n1, stride_n2, eps, scale,
    C: tl.constexpr, F: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr,
    NORM: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take BM of the R rows of a layer back from the pairs and the outputs to the attention."""
    i_r, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_r, o_c = i_r * BM + tl.arange(0, BM), tl.arange(0, BC)
    m = (o_r < R)[:, None] & (o_c < C)[None, :]
    row = (i_m * stride_m + o_r)[:, None]
    o_row = row * C + o_c[None, :]
    o += i_m * C * C
    up += i_m * F * C
    down += i_m * C * F
    kv += i_m * stride_wm
    dtype: tl.constexpr = do.dtype.element_ty

    # The pairs' norm, and what comes from above.
    b_dn = tl.zeros([BM, BC], tl.float32)
    for half in tl.static_range(2):
        b_dpair = tl.load(dpair + row * (2 * C) + half * C + o_c[None, :], mask=m, other=0.0)
        b_kv = _weights(kv, o_c, o_c, C, 1, C, C)
        b_dn = tl.dot(b_dpair, b_kv, b_dn, input_precision=PRECISION)
        kv += C * C
    b_dn = b_dn.to(dtype)
    tl.store(dnormed + o_row, b_dn, mask=m)
    b_dz = b_dn.to(tl.float32)
    if PAIRS != "none":
        b_z = tl.load(z + o_row, mask=m, other=0.0).to(tl.float32)
        b_dz = norm_bwd(b_dz * _scales(n1 + i_m * stride_n1, o_c, C), b_z, m, eps, C, PAIRS)
    b_dz += tl.load(above + o_row, mask=m, other=0.0)
    b_scaled = (scale * b_dz).to(dtype)
    tl.store(dz_scaled + o_row, b_scaled, mask=m)

    # The MLP.
    b_dhn = tl.zeros([BM, BC], tl.float32)
    for first in range(0, F, BF):
        o_f = first + tl.arange(0, BF)
        b_dg = tl.dot(b_scaled, _weights(down, o_c, o_f, F, 1, C, F), input_precision=PRECISION)
        o_u, m_u = row * F + o_f[None, :], (o_r < R)[:, None] & (o_f < F)[None, :]
        b_u = tl.load(u + o_u, mask=m_u, other=0.0).to(tl.float32)
        b_du, b_g = gelu_bwd_of(b_u, b_dg.to(dtype).to(tl.float32), dtype)
        b_du = b_du.to(dtype)
        tl.store(u + o_u, b_g.to(dtype), mask=m_u)
        tl.store(du + o_u, b_du, mask=m_u)
        b_dhn = tl.dot(b_du, _weights(up, o_f, o_c, C, 1, F, C), b_dhn, input_precision=PRECISION)
    b_dhn = b_dhn.to(dtype)
    tl.store(dhn + o_row, b_dhn, mask=m)
    b_dh = b_dhn.to(tl.float32)
    if NORM != "none":
        b_h = tl.load(h + o_row, mask=m, other=0.0)
        b_dh = norm_bwd(b_dh * _scales(n2 + i_m * stride_n2, o_c, C), b_h, m, eps, C, NORM)
    b_dh += b_dz
    tl.store(dh + o_row, b_dh, mask=m)
    b_scaled = (scale * b_dh).to(dtype)
    tl.store(dh_scaled + o_row, b_scaled, mask=m)
    b_do = tl.dot(b_scaled, _weights(o, o_c, o_c, C, 1, C, C), input_precision=PRECISION)
    tl.store(do + o_row, b_do.to(dtype), mask=m)


def narrow_mlp_step_bwd(t: BackwardBuffers, w: Matrices, form: Form) -> None:
    """Go back from a step's pairs and outputs to its attention outputs; see `mlp.mlp_step_bwd`."""
    _, b, B, C = t.do.shape
    kv, rows = w.kv, t.do.stride(0) // C
    above = t.dstream[1:]
    read = (t.dpair, above, t.z, t.h, t.u)
    written = (t.dnormed, t.dz_scaled, t.du, t.dhn, t.dh, t.dh_scaled, t.do)
    assert all(x[0].is_contiguous() for x in (*read, *written))
    assert all(x.stride(0) == rows * x.shape[3] for x in (*read, *written))
    grid, settings = _launch(t.do, w, form)
    narrow_mlp_step_bwd_kernel[grid](
        *read, w.o, w.up, w.down, kv, w.n1, w.n2, *written, b * B, rows, kv.stride(0),
        between(w.n1), between(w.n2), form.eps, form.residual_scale, **settings,
    )  # fmt: skip
