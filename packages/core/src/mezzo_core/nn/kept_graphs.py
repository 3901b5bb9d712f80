"""Keeps CUDA graphs after a call of `generate`, for the next similar call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.lm import LM
from mezzo_core.nn.sampler import Sampler
from mezzo_core.ops.precision import product_settings

Owner = TypeVar("Owner")
_PLAIN = (bool, int, float, str, type(None), Sampler)

_idle: dict[LM, dict[Any, list[Any]]] = {}
"""Owners of graphs that no call uses now, by model, `product_settings` and `_likeness`."""


@contextmanager
def keep_graphs(model: LM) -> Iterator[None]:
    """Inside this context, calls of `generate` and `stream` with this model share CUDA graphs.

    A capture takes as long as many steps. Calls share a graph if they have the same number of rows,
    the same sampling and the same assistant, and states of the same shapes: those of recurrent
    models always are; those of attention are if prompt plus new tokens have the same length. Until
    the context ends, buffers as large as the states stay in memory. Results do not change.
    """
    if model in _idle:
        yield
        return
    _idle[model] = {}
    try:
        yield
    finally:
        del _idle[model]


@contextmanager
def lent(model: LM, new: Owner) -> Iterator[Owner]:
    """Yield an owner of graphs: the new one, or a kept one with the new one's values.

    Graphs read and overwrite the tensors of their owner, so these are copied in place.
    """
    likeness = _likeness(new, set()) if model in _idle else None
    if likeness is None:
        yield new
        return
    kept = _idle[model].setdefault((product_settings(), likeness), [])
    owner = kept.pop() if kept else new
    if owner is not new:
        _refill(owner, new)
    try:
        yield owner
    except GeneratorExit:  # the caller wants no more tokens
        kept.append(owner)
        raise
    kept.append(owner)  # but not after another exception: its graphs may be incomplete


def _likeness(owner: Any, seen: set[int]) -> Any:
    """Return a key that is equal for owners that can share graphs; None if this one cannot."""
    seen.add(id(owner))
    parts: list[Any] = [type(owner)]
    for name, value in vars(owner).items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                part: Any = leaf.shape, leaf.dtype, leaf.device
            elif isinstance(leaf, nn.Module):
                addresses = [x.data_ptr() for x in (*leaf.parameters(), *leaf.buffers())]
                casts = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
                # By its parts: an assistant with rollback becomes another model at each call.
                part = *map(id, leaf.children()), *addresses, *casts
            elif isinstance(leaf, (Graphs, torch.Generator)):
                part = type(leaf)
            elif isinstance(leaf, _PLAIN):
                part = leaf
            elif id(leaf) in seen:
                continue
            elif not _is_ours(leaf):
                return None  # such as a state in a file
            elif (part := _likeness(leaf, seen)) is None:
                return None
            parts.append((name, part))
    return tuple(parts)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("mezzo_core.nn.") and hasattr(value, "__dict__")


def _refill(owner: Any, new: Any) -> None:
    """Copy the values of the new owner into a kept one; tensors stay where graphs read them."""
    for name, value in vars(new).items():
        pairs = list(zip(tree_leaves(getattr(owner, name)), tree_leaves(value), strict=True))
        if all(isinstance(leaf, _PLAIN) for _, leaf in pairs):
            setattr(owner, name, value)
        else:
            for old, x in pairs:
                if isinstance(x, Tensor) and x.shape != old.shape:
                    old.set_(x)  # no graph reads a tensor whose shape changes
                elif isinstance(x, Tensor):
                    old.copy_(x)
                elif isinstance(x, torch.Generator):
                    old.set_state(x.get_state())
                elif _is_ours(x) and not isinstance(x, (Graphs, nn.Module)):
                    _refill(old, x)
