"""The MLP's activation on a GPU, GELU, and its gradient: alone, and as functions of kernels."""

import triton
import triton.language as tl
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import WARP, row_offset

# Elements of a program.
BLOCK = 1024


@triton.jit
def _share_below(b_u, DTYPE: tl.constexpr):
    """Return Φ(u), the share of a normal distribution that is below u.

    In 16 bits the precision of erf is lost. There it is 2 to the power of a polynomial, which takes
    fewer instructions, and is right to 6e-6 from -6 to 6.
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
    """Return u Φ(u), which is to be stored in a dtype."""
    return b_u * _share_below(b_u, DTYPE)


@triton.jit
def gelu_bwd_of(b_u, b_dg, DTYPE: tl.constexpr):
    """Return the gradient of u, and u Φ(u), which are to be stored in a dtype."""
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
    gelu_kernel[(S * B * ceil_div(F, BLOCK), m)](
        u, out, B, *u.stride()[:3], *out.stride()[:3], F=F, BF=BLOCK, num_warps=BLOCK // WARP
    )


@triton.jit(do_not_specialize=["B"])
def gelu_bwd_kernel(
    u, dg, out, B, stride_um, stride_us, stride_ub, stride_gm, stride_gs, stride_gb,
    stride_om, stride_os, stride_ob, F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BF channels of a row of u, dg (Φ(u) + u Φ'(u)); put u Φ(u) there."""
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
    gelu_bwd_kernel[(S * B * ceil_div(F, BLOCK), m)](
        u, dg, out, B, *u.stride()[:3], *dg.stride()[:3], *out.stride()[:3],
        F=F, BF=BLOCK, num_warps=BLOCK // WARP,
    )  # fmt: skip
