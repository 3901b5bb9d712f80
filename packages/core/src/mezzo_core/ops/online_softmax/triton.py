"""The merge of two partial softmaxes on a GPU: one pass over memory forward, one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tile, about; a program merges as many rows as fit.
TILE = 2048


@triton.jit
def _load(out, lse, i_r, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, R):
    """Load a tile of rows, and their lse as a column; rows without keys count as zeros."""
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m = (o_r < R)[:, None] & (o_d < D)[None, :]
    b_lse = tl.load(lse + o_r, mask=o_r < R, other=float("-inf"))[:, None]
    b_out = tl.load(out + o_r[:, None] * D + o_d[None, :], mask=m, other=0.0).to(b_lse.dtype)
    return tl.where(b_lse == float("-inf"), 0.0, b_out), b_lse


@triton.jit
def _weights(b_lse_a, b_lse_b):
    """Return both weights and the merged lse; the weights are 0 where both parts are empty."""
    b_max = tl.maximum(b_lse_a, b_lse_b)
    empty = b_max == float("-inf")
    b_max = tl.where(empty, 0.0, b_max)
    b_a, b_b = tl.exp(b_lse_a - b_max), tl.exp(b_lse_b - b_max)
    b_sum = tl.where(empty, 1.0, b_a + b_b)
    return b_a / b_sum, b_b / b_sum, tl.where(empty, float("-inf"), b_max + tl.log(b_sum))


@triton.jit(do_not_specialize=["R"])
def merge_softmax_fwd_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, R,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merge BR rows."""
    i_r = tl.program_id(0)
    b_out_a, b_lse_a = _load(out_a, lse_a, i_r, D, BR, BD, R)
    b_out_b, b_lse_b = _load(out_b, lse_b, i_r, D, BR, BD, R)
    w_a, w_b, b_lse = _weights(b_lse_a, b_lse_b)
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    b_out = w_a * b_out_a + w_b * b_out_b
    tl.store(out + o_r * D + o_d, b_out.to(out.dtype.element_ty), mask=(o_r < R) & (o_d < D))
    tl.store(lse + o_r, b_lse, mask=o_r < R)


@triton.jit(do_not_specialize=["R"])
def merge_softmax_bwd_kernel(
    dout, dlse, out_a, lse_a, out_b, lse_b, dout_a, dlse_a, dout_b, dlse_b, R,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Pull the gradients of BR rows back."""
    i_r = tl.program_id(0)
    b_out_a, b_lse_a = _load(out_a, lse_a, i_r, D, BR, BD, R)
    b_out_b, b_lse_b = _load(out_b, lse_b, i_r, D, BR, BD, R)
    w_a, w_b, _ = _weights(b_lse_a, b_lse_b)
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m_r, m = o_r < R, (o_r < R) & (o_d < D)
    b_dout = tl.load(dout + o_r * D + o_d, mask=m, other=0.0).to(b_lse_a.dtype)
    b_dlse = tl.load(dlse + o_r, mask=m_r, other=0.0)
    b_pull = w_a * w_b * tl.sum(b_dout * (b_out_a - b_out_b), axis=1)[:, None]
    tl.store(dout_a + o_r * D + o_d, (w_a * b_dout).to(dout_a.dtype.element_ty), mask=m)
    tl.store(dout_b + o_r * D + o_d, (w_b * b_dout).to(dout_b.dtype.element_ty), mask=m)
    tl.store(dlse_a + o_r, w_a * b_dlse + b_pull, mask=m_r)
    tl.store(dlse_b + o_r, w_b * b_dlse - b_pull, mask=m_r)


def merge_softmax_fwd(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge contiguous tensors; arguments and results as in `reference.merge_softmax_fwd`."""
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if out.numel():
        grid, settings = _launch(out)
        with torch.cuda.device_of(out):
            merge_softmax_fwd_kernel[grid](out_a, lse_a, out_b, lse_b, out, lse, **settings)
    return out, lse


def merge_softmax_bwd(
    dout: Tensor, dlse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pull gradients of contiguous tensors back, as `reference.merge_softmax_bwd` does."""
    dout_a, dlse_a = torch.empty_like(out_a), torch.empty_like(lse_a)
    dout_b, dlse_b = torch.empty_like(out_b), torch.empty_like(lse_b)
    if dout.numel():
        grid, settings = _launch(dout)
        with torch.cuda.device_of(dout):
            merge_softmax_bwd_kernel[grid](
                dout, dlse, out_a, lse_a, out_b, lse_b, dout_a, dlse_a, dout_b, dlse_b, **settings
            )
    return dout_a, dlse_a, dout_b, dlse_b


def _launch(out: Tensor) -> tuple[tuple[int], dict[str, int]]:
    D = out.shape[-1]
    R, BD = out.numel() // D, triton.next_power_of_2(D)
    BR = max(TILE // BD, 1)
    return (triton.cdiv(R, BR),), {"R": R, "D": D, "BR": BR, "BD": BD, "num_warps": 4}
