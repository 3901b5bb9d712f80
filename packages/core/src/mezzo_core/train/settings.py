"""All settings of a run by their places in its configuration, such as "model.mixers.head_dim"."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from mezzo_core.errors import UserError, nearest
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.flags import FLAGS


def describe_settings(config: TrainConfig) -> list[tuple[str, str, str]]:
    """Return each setting's place, its value, and the flag that changes it.

    A place in a tuple of configurations, such as the layers, has a line for each different value.
    If there are several, each line has the numbers of the layers with its value.
    """
    words = {flag.path: flag.word for flag in FLAGS}
    words |= {"data.source": "--data", "data.validation_source": "--validation-data"}
    words |= {"init_from": "--init-from"}
    lines: dict[str, dict[str, list[int]]] = {}
    parts = set()
    for place, index, value in _settings(config):
        if isinstance(value, type):
            parts.add(place)
        lines.setdefault(place, {}).setdefault(_show(value), []).append(index)
    rows = []
    for place, values in lines.items():
        for value, indices in values.items():
            many = f" ({', '.join(map(str, indices))})" if len(values) > 1 else ""
            rows.append((place, value + many, "" if place in parts else words.get(place, "--set")))
    return rows


def _settings(config: Any, place: str = "", index: int = 0) -> Iterator[tuple[str, int, Any]]:
    """Yield the place of each value, its number in the tuple that has it, and the value."""
    for field in fields(config):
        here, value = f"{place}.{field.name}".removeprefix("."), getattr(config, field.name)
        items = value if isinstance(value, tuple) else (value,)
        if not any(map(is_dataclass, items)):
            yield here, index, value
            continue
        for i, item in enumerate(items):
            number = i if isinstance(value, tuple) else index
            yield here, number, type(item)
            yield from _settings(item, here, number)


def _show(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_show, value)) if isinstance(value, tuple) else str(value)


def apply_settings(config: TrainConfig, given: Sequence[str]) -> TrainConfig:
    """Return the configuration with other values, each given as "PLACE=VALUE".

    A place in a tuple of configurations means all of these that have it.

    Raises:
        UserError: if there is no such place, or its class refuses the value.
    """
    for text in given:
        place, equals, word = text.partition("=")
        if not equals:
            raise UserError(f"--set takes SETTING=VALUE, got {text!r}")
        found = _settings(config)
        known = dict.fromkeys(name for name, _, value in found if not isinstance(value, type))
        if place not in known:
            raise UserError(f"--set: no setting is {place!r}{nearest(place, known)}")
        config = _changed(config, place.split("."), word)
    return config


def _changed(config: Any, place: Sequence[str], word: str) -> Any:
    if isinstance(config, tuple):
        return tuple(_changed(item, place, word) for item in config)
    name, *rest = place
    if not is_dataclass(config) or name not in (field.name for field in fields(config)):
        return config  # a layer of another kind
    if rest:
        value = _changed(getattr(config, name), rest, word)
    else:  # "none" can be one of a field's words
        is_its_word = word in get_args(get_type_hints(type(config))[name])
        value = word if is_its_word else _parse(word)
    return replace(config, **{name: value})  # type: ignore[type-var]


def _parse(text: str) -> Any:
    """Return the number, the word, None for "none", or a tuple for values between commas."""
    if "," in text:
        return tuple(map(_parse, text.split(",")))
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
