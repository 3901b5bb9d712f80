"""Functions on states: trees of tensors whose first axis is the batch.

`AbstractSequenceModule` uses them, and says there what each is for.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mezzo_core.ops.checks import check_floating, is_read

Rows = Tensor | Sequence[int]
"""Rows of a batch, in any order: a (N,) int64 tensor, or ints."""


class Leaf(NamedTuple):
    """Describes a tensor of a state before the first token.

    Attributes:
        sizes: its shape without the batch axis. An axis of size 0 is the token axis of a tensor
            that grows.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Leaf":
        """Describe a tensor (1, ...) of `init_state(1)`."""
        return cls(tuple(tensor.shape[1:]), tensor.dtype, tensor.device)


def grows(first: Any) -> bool:
    """Tell from `init_state(1)` of a module whether its states grow with the tokens."""
    return any(0 in x.shape for x in tree_leaves(first))


def only_counts(first: Any, overwritten: Sequence[bool]) -> bool:
    """Tell whether tokens overwrite nothing but counters, so that a state can simply be set back.

    `first` is `init_state(1)` of a module, and `overwritten` what its `overwritten()` returns.
    """
    changing = [x for x, on in zip(tree_leaves(first), overwritten, strict=True) if on]
    return all(x.dtype == torch.int64 and x.ndim == 1 for x in changing)


def with_fewer(state: Any, overwritten: Sequence[bool], amount: Tensor) -> Any:
    """Set a state for which `only_counts` holds back by `amount` (B,) tokens in each row."""
    leaves, tree = tree_flatten(state)
    parts = zip(leaves, overwritten, strict=True)
    return tree_unflatten([x - amount.to(x.device) if on else x for x, on in parts], tree)


def select_rows(state: Any, rows: Tensor) -> Any:
    """Return rows of every tensor, in new tensors."""
    places = {rows.device: rows}

    def taken(x: Tensor) -> Tensor:
        if x.device not in places:
            places[x.device] = rows.to(x.device)
        return x.index_select(0, places[x.device])

    return tree_map(taken, state)


def reset_rows(state: Any, rows: Tensor, first: Any) -> Any:
    """Copy a state, with some rows reset to `first` (`init_state(1)`), or to 0 where it grows."""

    def restarted(x: Tensor, start: Tensor) -> Tensor:
        there = rows.to(x.device)
        if 0 in start.shape:
            return x.index_fill(0, there, 0)
        return x.index_copy(0, there, start.to(x.dtype).expand(len(rows), *start.shape[1:]))

    return tree_map(restarted, state, first)


def put_rows_(state: Any, rows: Sequence[int], new: Any, overwritten: Sequence[bool]) -> None:
    """Overwrite rows of a state from `reserve` by those of another, in place.

    Args:
        state: with room for as many tokens in all as `new`.
        rows: row i of `new` goes to row `rows[i]`; further rows of `new` are dropped.
        new: a state of the same module, from `reserve`.
        overwritten: what the module's `overwritten()` returns. Tensors that only grow may differ in
            their number of slots, beyond all tokens.

    Raises:
        ValueError: if an overwritten tensor has other row shapes in the two states.
    """
    parts = list(zip(tree_leaves(state), tree_leaves(new), overwritten, strict=True))
    if any(on and old.shape[1:] != x.shape[1:] for old, x, on in parts):
        raise ValueError(
            f"put_rows_: rows of {shapes(new)} do not fit into {shapes(state)}: "
            "reserve room for as many tokens in all"
        )
    places = torch.tensor(rows, dtype=torch.int64)
    there = {device: places.to(device) for device in {old.device for old, _, _ in parts}}
    for old, x, on in parts:
        if not on:
            num_slots = min(old.shape[1], x.shape[1])
            old, x = old[:, :num_slots], x[:, :num_slots]
        old.index_copy_(0, there[old.device], x[: len(rows)].to(old.dtype))


def as_rows(name: str, rows: Any, batch: int, device: torch.device) -> Tensor:
    """Return rows of a batch as an int64 tensor; values of a tensor on a GPU are not checked.

    Raises:
        TypeError: if they are no int64 tensor of one axis, and no sequence of ints.
        ValueError: if one is not from 0 to `batch` - 1.
    """
    if not isinstance(rows, Tensor):
        is_sequence = isinstance(rows, Sequence) and not isinstance(rows, str | bytes)
        if not is_sequence or not all(
            isinstance(row, Integral) and not isinstance(row, bool) for row in rows
        ):
            raise TypeError(f"{name}: rows must be ints or an int64 tensor, got {rows!r}")
        _check_in_batch(name, [int(row) for row in rows], batch)
        return torch.tensor([int(row) for row in rows], dtype=torch.int64, device=device)
    if rows.dtype != torch.int64 or rows.ndim != 1:
        raise TypeError(
            f"{name}: rows must be int64 of shape (N,), got {rows.dtype} "
            f"of shape {tuple(rows.shape)}"
        )
    if is_read(rows):
        _check_in_batch(name, rows.tolist(), batch)
    return rows


def _check_in_batch(name: str, rows: Sequence[int], batch: int) -> None:
    for row in rows:
        if not 0 <= row < batch:
            raise ValueError(f"{name}: rows must be from 0 to {batch - 1}, got {row}")


def check_like(module: str, where: str, value: Any, wanted: Any, batch: int) -> int | None:
    """Check a part of a state; return its number of tokens, or None if its size is fixed.

    Args:
        module: the name of its module's class.
        where: the part, as messages call it.
        value: the part.
        wanted: the same part of `init_state(1)`, with a `Leaf` for each tensor.
        batch: rows of the batch.

    Raises:
        TypeError: if a part is of another type.
        ValueError: if a tensor has another shape, or is elsewhere.
    """
    if isinstance(wanted, Leaf):
        return _check_tensor(module, where, value, wanted, batch)
    if type(value) is not type(wanted) or len(value) != len(wanted):
        raise TypeError(
            f"{where} must be a {type(wanted).__name__} of {len(wanted)}, "
            f"as init_state returns it, got {type(value).__name__}"
        )
    names = [f"{where}.{name}" for name in getattr(wanted, "_fields", range(len(wanted)))]
    grown = {
        name: check_like(module, name, part, like, batch)
        for name, part, like in zip(names, value, wanted, strict=True)
    }
    sizes = {name: size for name, size in grown.items() if size is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the fields of the state must have grown alike, got {sizes}")
    return None


def _check_tensor(module: str, where: str, value: Any, wanted: Leaf, batch: int) -> int | None:
    if wanted.dtype.is_floating_point:
        check_floating(module, where, value)
    elif not isinstance(value, Tensor) or value.dtype != wanted.dtype:
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{where} must be an {str(wanted.dtype).removeprefix('torch.')} tensor, got {kind}"
        )
    # An axis that is empty at first is the token axis of a state that grows: any size fits.
    sizes = wanted.sizes
    fits = len(value.shape) == 1 + len(sizes) and all(
        size in (0, got) for size, got in zip(sizes, value.shape[1:], strict=True)
    )
    if not fits or value.shape[0] != batch or value.device != wanted.device:
        shape = ", ".join([str(batch), *(str(size or "any") for size in sizes)])
        raise ValueError(
            f"{where} must be ({shape}) on {wanted.device}, "
            f"got {tuple(value.shape)} on {value.device}"
        )
    return value.shape[1 + sizes.index(0)] if 0 in sizes else None


def shapes(state: Any) -> str:
    """List the shapes of a state's tensors."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tree_leaves(state))
