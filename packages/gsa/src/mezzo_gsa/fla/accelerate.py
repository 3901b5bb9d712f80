"""Our kernels in the layers of flash-linear-attention: its models stay as they are.

Its layers of GSA, GLA, HGRN2, RetNet and ABC call functions of q, k and v by names in their
modules. `accelerate_fla` puts ours behind these names. Calls that ours do not support go to its
own.

Its other kernels stay. Its activations and convolutions try up to 30 candidates each at their first
call, but here only one: such short kernels gain little from a search that takes minutes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from mezzo_core.errors import UserError
from torch import Tensor

from mezzo_gsa.ops import ABCState, GSAState, chunk_abc, chunk_gla, chunk_gsa
from mezzo_gsa.ops.gla.arguments import unsupported as not_in_gla
from mezzo_gsa.ops.gsa.arguments import unsupported as not_in_gsa
from mezzo_gsa.retnet import log_decay

RELEASE = "0.6"
"""The releases of that library that we know."""


def accelerate_fla() -> ExitStack:
    """Give models of flash-linear-attention our kernels: GSA, GLA, HGRN2, RetNet and ABC.

    Models that were built before have them too. Weights, caches and checkpoints are the library's,
    and outputs are equal up to rounding. Only ABC differs after a cache: its own kernels forget how
    much was written before, ours continue as in a whole text. A call that our kernels do not
    support goes to the library's. Its activations and convolutions are no longer tuned at the first
    call. A second call of this function changes nothing.

    Returns:
        A stack that undoes all this by `close()`, or at the end of a `with` block.

    Raises:
        UserError: if the library is not installed, or of another release than 0.6.
    """
    try:
        found = import_module("fla").__version__
    except ModuleNotFoundError as error:
        raise UserError("accelerate_fla needs flash-linear-attention: pip install it") from error
    if not found.startswith(f"{RELEASE}."):
        raise UserError(f"accelerate_fla needs flash-linear-attention {RELEASE}, got {found}")
    undo = ExitStack()
    for place, name, ours in _KERNELS:
        module = import_module(f"fla.layers.{place}")
        theirs = getattr(module, name)
        if not hasattr(theirs, "replaces"):
            setattr(module, name, _in_place_of(theirs, ours))
            undo.callback(setattr, module, name, theirs)
    for tuner in _tuners():
        if len(tuner.configs) > 1:  # an earlier call may have chosen one already
            undo.callback(setattr, tuner, "configs", tuner.configs)
            tuner.configs = [_usual(tuner.configs)]
    return undo


def _tuners() -> Iterator[Any]:
    """Yield the autotuners of the library's activations and convolutions."""
    for place in ("activations", "causal_conv1d"):
        for kernel in vars(import_module(f"fla.modules.{place}.ops")).values():
            inner = getattr(kernel, "fn", None)  # within heuristics
            yield from (each for each in (kernel, inner) if hasattr(each, "configs"))


def _usual(configs: list[Any]) -> Any:
    """Return the candidate of four warps with the middle block."""
    found = [each for each in configs if each.num_warps == 4] or configs
    return found[len(found) // 2]


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours, and theirs if ours returns None."""

    @wraps(theirs)
    def either(*args: Any, **others: Any) -> Any:
        found = ours(*args, **others)
        return theirs(*args, **others) if found is None else found

    either.replaces = theirs  # type: ignore[attr-defined]
    return either


def _gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    *rest: Any,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, list[Tensor | None]] | None:
    if g is None or rest or _asks_more(others):
        return None
    if not _alike(q, k, v) or not_in_gsa(q, g.shape[-1], k.shape[-1], v.shape[-1]):
        return None
    state = None
    if initial_state is not None:
        state = GSAState(initial_state[0].transpose(2, 3).contiguous(), initial_state[1])
    # The layer's s is 1 - exp(g), which the op computes itself, without its rounding to 16 bits.
    out, after = chunk_gsa(
        q, k, v, g, scale=_scale(scale, q), initial_state=state, cu_seqlens=cu_seqlens
    )
    if not output_final_state:
        return out, [None, None]
    return out, [after.k.transpose(2, 3).contiguous(), after.v]


def _abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    initial_state: tuple[Tensor, ...] | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...] | None] | None:
    if not _alike(q, k, v) or not_in_gsa(q, s.shape[-1], k.shape[-1], v.shape[-1]):
        return None
    state = None
    if initial_state is not None:
        if len(initial_state) == 2:  # a cache of its own kernel lacks the sum of the weights
            return None
        keys, values, z = initial_state
        state = ABCState(keys.transpose(2, 3).contiguous(), values, z)
    out, after = chunk_abc(q, k, v, s, reading="code", scale=_scale(None, q), initial_state=state)
    if not output_final_state:
        return out, None
    return out, (after.k.transpose(2, 3).contiguous(), after.v, after.z)


def _gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *rest: Any,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    gate = g if gk is None else gk
    if gate is None or rest or _asks_more(others):
        return None
    if not _alike(q, k, v) or not_in_gla(q, v):
        return None
    state = initial_state
    if state is not None and state_v_first:
        state = state.transpose(2, 3).contiguous()
    out, after = chunk_gla(
        q, k, v, gate, scale=_scale(scale, q), initial_state=state, cu_seqlens=cu_seqlens
    )
    if not output_final_state:
        return out, None
    return out, after.transpose(2, 3).contiguous() if state_v_first else after


def _retention(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor | None] | None:
    if rest:
        return None
    B, T, H, _ = q.shape
    decay = log_decay(H, q.device, torch.float32).expand(B, T, H)[..., None]
    return _gla(q, k, v, decay, **options)


def _asks_more(others: Mapping[str, Any]) -> bool:
    """Tell whether a call has an argument that our kernels lack."""
    return any(value is not None and value is not False for value in others.values())


def _alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dtype == k.dtype == v.dtype


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


_KERNELS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("gsa", "chunk_gsa", _gsa),
    ("gsa", "fused_recurrent_gsa", _gsa),
    ("gla", "chunk_gla", _gla),
    ("gla", "fused_recurrent_gla", _gla),
    ("hgrn2", "chunk_gla", _gla),
    ("hgrn2", "fused_recurrent_gla", _gla),
    ("multiscale_retention", "chunk_retention", _retention),
    ("multiscale_retention", "fused_recurrent_retention", _retention),
    ("abc", "chunk_abc", _abc),
)
"""The module of its layers, the function's name there, and our replacement."""
