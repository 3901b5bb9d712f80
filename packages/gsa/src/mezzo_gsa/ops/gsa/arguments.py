"""The arguments of gated slot attention: their types, their checks, and the kernels' limits."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from mezzo_core.ops.checks import check_floating, check_number, check_size
from mezzo_core.ops.packed import count_sequences
from torch import Tensor

from mezzo_gsa.ops.decoding import checks

Between = Literal["softmax", "none", "swish", "relu", "relu_squared"]
"""The function between GSA's two passes: softmax, or another one in the ablation of Table 2."""

Keep = Literal["nothing", "weights", "states"]
"""What a forward saves for the backward: "nothing" (there will be no backward), "weights" (the
weights of the slots), or "states" (also the memories at the chunks' borders, which the backward
otherwise computes again)."""

_SHAPES = checks.head_shapes(g="H M | None", s="H M | None")


class GSAState(NamedTuple):
    """K~ and V~ of each sequence: M slots a head, float32 (float64 for float64 inputs)."""

    k: Float[Tensor, "S H M K"]
    v: Float[Tensor, "S H M V"]


class GSAOutput(NamedTuple):
    """What `chunk_gsa` and `recurrent_gsa` return."""

    out: Float[Tensor, "B T HQ V"]
    final_state: GSAState


class Parts(NamedTuple):
    """q (B, T, HQ, K), k (B, T, H, K), v (B, T, H, V), g (B, T, H, M); without T in a step."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class Form(NamedTuple):
    """What the op by chunks computes, apart from its tensors."""

    scale: float
    between: Between
    keep: Keep
    damping: float | None = None
    """τ: the gates are given as logits x, and g = logsigmoid(x) / τ. None: they are given as g."""
    swish: bool = False
    """Whether swish is applied to q, k and v first; with a projection only."""
    num_heads: int = 0
    """HQ of a projection. This and the next two are 0 if the tensors are separate."""
    num_kv_heads: int = 0
    num_slots: int = 0

    def split(self, x: Tensor) -> Parts:
        """Return q, k, v and the gates' logits as views of a projection x (B, T, W).

        Each head of q, k and v has D = (W - H M) / (HQ + 2 H) channels.
        """
        HQ, H, M = self.num_heads, self.num_kv_heads, self.num_slots
        D = (x.shape[2] - H * M) // (HQ + 2 * H)
        q, k, v, g = x.split([HQ * D, H * D, H * D, H * M], dim=2)
        q, k, v = (part.unflatten(2, (-1, D)) for part in (q, k, v))
        return Parts(q, k, v, g.unflatten(2, (-1, M)))


class StepForm(NamedTuple):
    """What a decoding step computes, apart from its tensors."""

    scale: float
    between: Between
    damping: float | None = None
    """See `Form`."""
    swish: bool = False
    """See `Form`."""
    norm_eps: float = 1e-5
    out_dtype: torch.dtype | None = None


def split_step(x: Tensor, state: GSAState, num_heads: int, gate_logits: Tensor | None) -> Parts:
    """Return views of the parts of x (B, W), one token of each row; the state gives the sizes.

    The gate logits are the given ones (H·M,), the same for all rows, or else the last part of x.
    """
    _, H, M, K = state.k.shape
    V = state.v.shape[3]
    widths = [num_heads * K, H * K, H * V]
    if gate_logits is None:
        q, k, v, logits = x.split([*widths, H * M], dim=-1)
    else:
        q, k, v = x.split(widths, dim=-1)
        logits = gate_logits.expand(x.shape[0], -1)
    return Parts(
        q.unflatten(-1, (num_heads, K)),
        k.unflatten(-1, (H, K)),
        v.unflatten(-1, (H, V)),
        logits.unflatten(-1, (H, M)),
    )


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    scale: float,
    between: str,
    *,
    sizes: str = "(B, T, HQ, K)",
) -> Tensor:
    """Check that the inputs fit each other; return g, or s if there is no g.

    `sizes` names the axes of q in messages.

    Raises:
        TypeError, ValueError: if one does not fit; the message names it.
    """
    check_between(op, between)
    gates = s if g is None else g
    if gates is None:
        raise ValueError(f"{op}: g or s must be given, got neither")
    checks.check_inputs(op, _SHAPES[sizes], q, k, v, g, s, scale=scale)
    return gates


def check_between(op: str, between: Any) -> None:
    """Raise a ValueError if there is no such function between the two passes."""
    if between not in get_args(Between):
        raise ValueError(f"{op}: between must be one of {get_args(Between)}, got {between!r}")


def split_projection(op: str, x: Tensor, form: Form) -> Parts:
    """Check a projection and its heads, slots and damping; return its parts as views."""
    check_floating(op, "x", x)
    for name in ("num_kv_heads", "num_slots", "num_heads"):
        check_size(op, name, getattr(form, name))
    HQ, H, M = form.num_heads, form.num_kv_heads, form.num_slots
    if HQ % H:
        raise ValueError(f"{op}: num_heads must be a multiple of num_kv_heads = {H}, got {HQ}")
    check_number(op, "damping", form.damping, positive=True)
    heads = HQ + 2 * H
    width = x.shape[2] - H * M if x.ndim == 3 else 0
    if width < heads or width % heads:
        raise ValueError(
            f"{op}: x must be (B, T, W) with W = ({HQ} + 2 · {H}) D + {H} · {M}, "
            f"got {tuple(x.shape)}"
        )
    return form.split(x)


def check_state(
    op: str,
    state: GSAState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise an error if the borders are invalid, or the state does not fit the inputs."""
    num_states = count_sequences(op, cu_seqlens, q)
    if state is not None:
        slots = (num_states, *gates.shape[2:])
        shapes = [(*slots, x.shape[3]) for x in (k, v)]
        checks.check_parts(op, "initial_state", state, GSAState, shapes, q)


def unsupported(q: Tensor, M: int, K: int, V: int) -> str | None:
    """Return why the kernels do not support a call, or None if they do.

    q is (B, T, HQ, K), or what a step gets, (B, ...).
    """
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{q.dtype}; supported: float32, bfloat16, float16"
    if 0 in q.shape[:2]:
        return "no rows, or rows of no tokens"
    if M > 128 or max(K, V) > 512:
        return f"M = {M}, K = {K}, V = {V}; supported: M up to 128, K and V up to 512"
    # ptxas 12.9 still compiles this product of matrices wrong; a step has none.
    if q.is_cuda and q.ndim == 4 and q.dtype == torch.float16 and M > 64:
        return f"float16 with M = {M} on a GPU; supported there: M up to 64, or bfloat16"
    return None
