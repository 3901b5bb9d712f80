"""Damaged files, as left by accidents, other programs or attackers, to test readers with.

A test replaces a file by each of its damaged forms and reads it. The reader must raise a UserError
of one line, or return the same as for the undamaged file.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

# Values that replace one in a JSON file. The last ones are inserted into the text unchanged.
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    "",
    "x",
    "../x",
    "hub:json",
    "\x1b[2J",
    [],
    {},
    [1],
    {"a": 1},
)
_TEXTS = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 5000 + "]" * 5000, "{", '"\\ud800"')


class Damage(NamedTuple):
    """A damaged form of a file."""

    what: str
    content: bytes


def damages(content: bytes, rng: random.Random) -> Iterator[Damage]:
    """Yield damaged forms of any file: bytes flipped, cut off, added or replaced."""
    yield Damage("empty", b"")
    yield Damage("zeros", bytes(len(content)))
    yield Damage("noise", rng.randbytes(len(content)))
    yield Damage("more", content + b"\x80\x00]}")
    for place in (0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(4))):
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        yield Damage(f"a bit flipped in byte {place}", bytes(flipped))
        yield Damage(f"cut before byte {place}", content[:place])


def json_damages(content: bytes) -> Iterator[Damage]:
    """Yield forms of a JSON file in which one value, at any depth, is replaced or removed."""
    whole = json.loads(content)
    for place in _places(whole):
        named = "/".join(str(key) for key in place)
        for value in _VALUES:
            yield Damage(f"{named} = {value!r}", json.dumps(_with(whole, place, value)).encode())
        for text in _TEXTS:
            marked = json.dumps(_with(whole, place, "HERE"))
            yield Damage(f"{named} = {text[:20]}", marked.replace('"HERE"', text).encode())
        if place:
            yield Damage(f"{named} gone", json.dumps(_without(whole, place)).encode())


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _places(part, (*at, key))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _places(part, (*at, i))


def _with(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = value.copy()
    changed[place[0]] = _with(value[place[0]], place[1:], new)
    return changed


def _without(value: Any, place: tuple[Any, ...]) -> Any:
    changed = value.copy()
    if place[1:]:
        changed[place[0]] = _without(value[place[0]], place[1:])
    else:
        del changed[place[0]]
    return changed
