"""Gates and RoPE on a GPU: the forget gate, the backward of the output gate, and rotations."""

import triton
import triton.language as tl


@triton.jit
def forget_gates(b_g, b_bias):
    """Return f and 1 - f, each with full relative precision."""
    b_x = b_g.to(tl.float32) + b_bias
    b_e = tl.exp(-tl.abs(b_x))
    b_r = tl.rsqrt(1.0 + b_e)  # squared below: a division takes several more instructions
    large = b_r * b_r
    small = b_e * large
    return tl.where(b_x < 0, small, large), tl.where(b_x < 0, large, small)


@triton.jit(do_not_specialize=["rows", "T"])
def output_gate_bwd_kernel(
    dy, y, z, dz, do, delta, rows, T, stride_zb, stride_zt,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Compute dz, and do before the output gate, and delta = do · o = dy · y.

    The output o before the gate is not needed: with s = sigmoid(z), dz = dy o s (1 - s) =
    dy y (1 - s).
    """
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, D)
    i_b, i_t, i_h = o_m // H // T, o_m // H % T, o_m % H
    m = (o_m < rows)[:, None]
    o_row = o_m[:, None] * D + o_d[None, :]
    b_dy = tl.load(dy + o_row, mask=m, other=0.0).to(tl.float32)
    b_dyy = b_dy * tl.load(y + o_row, mask=m, other=0.0).to(tl.float32)
    tl.store(delta + (i_b * H + i_h) * T + i_t, tl.sum(b_dyy, 1), mask=o_m < rows)
    if HAS_Z:
        p_z = z + (i_b * stride_zb + i_t * stride_zt + i_h * D)[:, None] + o_d[None, :]
        b_z = tl.load(p_z, mask=m, other=0.0).to(tl.float32)
        p_dz = dz + ((i_b * T + i_t) * W + i_h * D)[:, None] + o_d[None, :]
        tl.store(p_dz, (b_dyy * tl.sigmoid(-b_z)).to(dz.dtype.element_ty), mask=m)
        tl.store(do + o_row, (b_dy * tl.sigmoid(b_z)).to(do.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows", "T", "stride_p"])
def rotate_kernel(
    x, y, places, cos, sin, rows, T, stride_b, stride_t, stride_p,
    H: tl.constexpr, D: tl.constexpr, INVERSE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rotate BM heads of tokens."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    o_d = tl.arange(0, D)[None, :]
    m = o_m < rows
    i_b, i_t, i_h = o_m // H // T, o_m // H % T, o_m % H
    p_x = x + i_b * stride_b + i_t * stride_t + i_h * D
    place = tl.load(places + i_b * stride_p + i_t, mask=m, other=0).to(tl.int64)
    half: tl.constexpr = D // 2
    b_x = tl.load(p_x + o_d, mask=m, other=0.0).to(tl.float32)
    b_other = tl.load(p_x + (o_d + half) % D, mask=m, other=0.0).to(tl.float32)
    b_cos = tl.load(cos + place * half + o_d % half, mask=m, other=0.0)
    b_sin = tl.load(sin + place * half + o_d % half, mask=m, other=0.0)
    # The left half gets minus the right half. For the inverse rotation the right gets minus the
    # left.
    minus = (o_d >= half) if INVERSE else (o_d < half)
    b_y = b_x * b_cos + tl.where(minus, -b_other, b_other) * b_sin
    tl.store(y + o_m * D + o_d, b_y.to(y.dtype.element_ty), mask=m)
