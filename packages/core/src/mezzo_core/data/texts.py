"""What can be asked of any description of text: of one text, a mixture, or examples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mezzo_core.data.answers import AnswersConfig
from mezzo_core.data.config import DataConfig
from mezzo_core.data.hub import HUB_PREFIX
from mezzo_core.data.mixture import MixtureConfig

TextConfig = DataConfig | MixtureConfig | AnswersConfig
"""The configurations of text; tasks have others."""


def texts_of(config: TextConfig) -> tuple[DataConfig, ...]:
    """Return the texts of a mixture, or the one text."""
    if isinstance(config, MixtureConfig):
        return config.texts
    return (config.text if isinstance(config, AnswersConfig) else config,)


def name_texts(config: TextConfig) -> str:
    """Return the sources of all texts, and of those to validate on, for messages."""
    held_out = dict.fromkeys(text.validation_source for text in texts_of(config))
    return " or ".join(repr(name) for name in (config.source, *held_out) if name)


def change_texts(config: TextConfig, **changes: Any) -> TextConfig:
    """Return the configuration with other values of these fields in each of its texts."""
    texts = tuple(replace(text, **changes) for text in texts_of(config))
    if isinstance(config, MixtureConfig):
        return replace(config, texts=texts)
    return replace(config, text=texts[0]) if isinstance(config, AnswersConfig) else texts[0]


def absolute_tokenizer(name: str) -> str:
    """Return a tokenizer's name or path so that it is valid in every folder."""
    is_name = name == "byte" or name.startswith(HUB_PREFIX)
    return name if is_name else str(Path(name).expanduser().resolve())
