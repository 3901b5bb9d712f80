"""Checks the shapes of an op's arguments against a table."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_core.ops.checks import check_dtype


class Shapes:
    """The shapes of an op's tensors, by the names of the arguments.

        SHAPES = Shapes(x="... D", bias="D | None", filled="D")
        D = SHAPES.check("op", x, bias)["D"]

    A letter stands for one size everywhere, and "..." for the same leading axes. Tensors must be
    floating-point, or integers after "int: " (int32 or int64) or "int64: ", and all on the device
    of the first. The letters in `filled` may not be 0.
    """

    def __init__(self, *, filled: str = "", **shapes: str) -> None:
        self._filled = frozenset(filled.split())
        self._shapes: list[_Shape] = []
        for name, words in shapes.items():
            shape, _, optional = words.partition(" | ")
            kind, _, letters = shape.rpartition(": ")
            self._shapes.append(_Shape(name, kind, tuple(letters.split()), optional == "None"))

    def check(
        self,
        op: str,
        *tensors: Any,
        of: str = "",
        device: torch.device | None = None,
        **known: int,
    ) -> dict[str, Any]:
        """Check the tensors of a call, in the order of the names; return sizes by their letters.

        Args:
            op: the op's name, for messages.
            tensors: one for each name.
            of: a prefix of the names in messages, such as "state.".
            device: where the tensors must be; None: where the first one is.
            known: letters whose sizes are fixed already.

        Raises:
            TypeError: if an argument is no tensor, or has another dtype.
            ValueError: if a shape or a device does not fit.
        """
        sizes: dict[str, Any] = known
        for shape, x in zip(self._shapes, tensors, strict=True):
            if x is None and shape.is_optional:
                continue
            name, kind, letters = f"{of}{shape.name}", shape.kind, shape.letters
            check_dtype(op, name, x, kind)
            num_known, found = len(sizes), tuple(x.shape)
            lead = len(found) - len(letters) + 1
            if letters[0] == "..." and lead >= 0:
                found = (found[:lead], *found[lead:])
            fits = len(found) == len(letters)
            for letter, size in zip(letters, found, strict=False):
                fits = fits and sizes.setdefault(letter, size) == size
                fits = fits and (letter not in self._filled or size != 0)
            if not fits:
                wanted = self._in_words(letters, dict([*sizes.items()][:num_known]))
                raise ValueError(f"{op}: {name} must be {wanted}, got {tuple(x.shape)}")
            on = device or tensors[0].device
            if x.device != on:
                first = "the inputs" if device else self._shapes[0].name
                raise ValueError(f"{op}: {name} is on {x.device}, {first} on {on}")
        return sizes

    def _in_words(self, letters: Sequence[str], known: Mapping[str, Any]) -> str:
        """Write a shape with the sizes that are known in place of their letters."""
        parts: list[Any] = []
        for letter in letters:
            size = known.get(letter, letter)
            parts += size if isinstance(size, tuple) else (size,)
        filled = [part for part in parts if part in self._filled]
        # An f-string, since torch.compile traces no str() and would show an error of its own.
        words = f"({', '.join([f'{part}' for part in parts])}{',' if len(parts) == 1 else ''})"
        return f"{words}, {', '.join(filled)} at least 1" if filled else words


class _Shape(NamedTuple):
    name: str
    kind: str  # "int", "int64", or "" for floating-point
    letters: tuple[str, ...]
    is_optional: bool


def check_one_dtype(op: str, **tensors: Tensor) -> None:
    """Raise a TypeError if tensors, by the arguments' names, differ in dtype."""
    dtypes = [x.dtype for x in tensors.values()]
    if any(dtype != dtypes[0] for dtype in dtypes):
        *names, last = tensors
        got = ", ".join(map(str, dtypes))
        raise TypeError(
            f"{op}: {', '.join(names)} and {last} must have one floating dtype, got {got}"
        )


def check_heads(op: str, HQ: int, H: int) -> None:
    """Raise a ValueError unless HQ heads of queries can share H heads of keys and values."""
    if HQ % H:
        raise ValueError(
            f"{op}: the heads of q must be a multiple of those of k and v, got {HQ} and {H}"
        )
