"""One decoding step of gated linear attention on a GPU: a pass over the state, and a norm.

Nearly all memory traffic is the state: 2 MB a row and layer in the 1.3B model. The state of each
head is cut into tiles of V columns, narrow enough that one row keeps a large GPU busy. A tile has
all K rows, so a query's output needs no second pass.
"""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from mezzo_core.ops.tables import kept
from mezzo_core.positions import RADIANS, rope_steps
from torch import Tensor

from mezzo_gsa.ops.decoding.triton import load_mapped, norm_heads, rows, tile
from mezzo_gsa.ops.gates.triton import log_sigmoid, write_strength
from mezzo_gsa.ops.gla.arguments import LayerForm
from mezzo_gsa.ops.gla.triton.gate import gate_columns

# Numbers of a tile: more would not fit a program's registers.
TILE = 8192
UNIT = tl.constexpr(RADIANS)


@triton.jit
def _load_turned(x, o_k, m_k, b_cos, b_sin, K: tl.constexpr, MAP: tl.constexpr):
    """Return a head's queries or keys, rotated by angles; channel i is paired with i + K/2."""
    b_x = load_mapped(x, o_k, m_k, MAP)
    if b_cos is not None:
        left = o_k < K // 2
        b_pair = load_mapped(x, tl.where(left, o_k + K // 2, o_k - K // 2), m_k, MAP)
        b_x = b_x * b_cos + tl.where(left, -b_pair, b_pair) * b_sin
    return b_x


@triton.jit
def step_state_kernel(
    q, k, v, g, h, out, log_bounds, places, steps, stride_q, stride_k, stride_v, stride_g,
    scale, inverse_damping, bound,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KG: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LOGITS: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Advance V columns of one head's state, and read them with each query of the head."""
    N: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_bh = pid % N, pid // N
    i_h, i_b = i_bh % H, i_bh // H
    o_k, o_v = tl.arange(0, BK), i_n * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m = m_k[:, None] & m_v[None, :]
    p_h = h + i_bh * (K * V) + o_k[:, None] * V + o_v[None, :]
    b_h = tl.load(p_h, mask=m, other=0.0)
    p_g = g + i_b * stride_g + i_h * KG + gate_columns(o_k, KG)
    b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    if LOGITS:
        b_g = log_sigmoid(b_g) * inverse_damping
    b_below, b_rest = bound, 1 - bound
    if log_bounds is not None:
        p_below = log_bounds + i_h * K + o_k
        b_below = tl.exp(tl.load(p_below, mask=m_k, other=0.0))
        b_rest = tl.exp(tl.load(p_below + H * K, mask=m_k, other=0.0))
    b_keep = b_below + b_rest * tl.exp(b_g)
    b_cos, b_sin = None, None
    if steps is not None:
        b_step = tl.load(steps + o_k % (K // 2), mask=m_k, other=0)
        b_angle = (tl.load(places + i_b) * b_step).to(tl.float32) * UNIT  # whole turns are lost
        b_cos, b_sin = tl.cos(b_angle), tl.sin(b_angle)
    if k is None:
        b_k = b_rest * write_strength(b_g)
    else:
        p_k = k + i_b * stride_k + i_h * K
        b_k = _load_turned(p_k, o_k, m_k, b_cos, b_sin, K, MAP)
    b_v = tl.load(v + i_b * stride_v + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_h = b_keep[:, None] * b_h + b_k[:, None] * b_v[None, :]
    tl.store(p_h, b_h, mask=m)
    for j in range(G):
        p_q = q + i_b * stride_q + (i_h * G + j) * K
        b_q = _load_turned(p_q, o_k, m_k, b_cos, b_sin, K, MAP)
        b_o = tl.sum(b_h * b_q[:, None], axis=0) * scale
        tl.store(out + (i_bh * G + j) * V + o_v, b_o.to(out.dtype.element_ty), mask=m_v)


def run_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h: Tensor, form: LayerForm) -> Tensor:
    """Process one token and update the state; arguments and result as in `step_gla_`."""
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    _launch(q, k, v, g, h, out, None, None, form)
    return out


def run_layer_step(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gates: Tensor,
    h: Tensor,
    norm_weight: Tensor,
    z: Tensor | None,
    places: Tensor | None,
    log_bounds: Tensor | None,
    form: LayerForm,
) -> Tensor:
    """Process one token between a layer's projections, as `step_gla_layer_` does."""
    B, C = q.shape[0], q.shape[1] * v.shape[2]
    out = torch.empty((B, C), dtype=torch.float32, device=q.device)
    _launch(q, k, v, gates, h, out, places, log_bounds, form)
    y = torch.empty((B, C), dtype=q.dtype, device=q.device)
    norm_heads(out, norm_weight, z, y, form.norm_eps)
    return y


def _launch(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    h: Tensor,
    out: Tensor,
    places: Tensor | None,
    log_bounds: Tensor | None,
    form: LayerForm,
) -> None:
    """Update the state and write out, (B, HQ, V) or the same flattened."""
    B, H, K, V = h.shape
    BK = next_power_of_2(K)
    BV = min(tile(B * H, V), TILE // BK)
    inputs = [rows(x) for x in (q, k, v, g)]
    strides = [0 if x is None else x.stride(0) for x in inputs]
    steps = None
    if places is not None:
        places = places.contiguous()
    if log_bounds is not None:
        log_bounds = log_bounds.float().contiguous()
    if form.rope_base is not None:
        steps = _steps(K, form.rope_base, form.scaling(), device=q.device)
    with torch.cuda.device_of(q):
        launch(
            step_state_kernel, (B * H * ceil_div(V, BV),),
            *inputs, h, out, log_bounds, places, steps, *strides,
            form.scale, 1 / (form.damping or 1.0), form.lower_bound,
            H=H, G=q.shape[1] // H, K=K, V=V, KG=g.shape[2], BK=BK, BV=BV,
            LOGITS=form.damping is not None, MAP=form.feature_map, num_warps=4,
        )  # fmt: skip


_steps = kept(rope_steps)
